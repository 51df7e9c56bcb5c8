"""Models described by sizes: what their ranks hold, and that equal places hold equal values."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moe_comm.cli.reshard.model_shapes import (
    LatentAttention,
    MoEShape,
    ShapedModel,
    TensorList,
    build_module,
    fill,
    find_differences,
    roster,
)
from moe_comm.cli.reshard.published_shapes import PUBLISHED_SHAPES
from moe_comm.resharding.describe.metadata import ParameterMetadata
from moe_comm.resharding.describe.metadata_extraction import extract_module_metadata
from moe_comm.resharding.describe.parallelism import Parallelism

SMALL = MoEShape(
    num_layers=3,
    hidden=64,
    num_heads=8,
    num_query_groups=4,
    num_experts=8,
    expert_ffn=16,
    ffn=64,
    num_dense_layers=1,
    shared_expert_ffn=32,
    vocab=64,
    has_qk_norm=True,
)
LATENT = dataclasses.replace(
    SMALL,
    latent_attention=LatentAttention(
        query_rank=24, key_value_rank=16, head_dim=8, rope_dim=4, value_dim=8
    ),
)
FUSED = dataclasses.replace(SMALL, has_fused_experts=True)
LAYOUTS = ["single", "tp2.ep2", "ep4", "tp4", "tp2.pp2.ep2.etp1", "tp2.ep4.etp1", "pp2.ep2"]


def tensors_of(module: ShapedModel) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def part_of(whole: torch.Tensor, meta: ParameterMetadata) -> torch.Tensor:
    """Part of a whole tensor on a rank, the plain way."""
    if meta.expert_dim is not None:
        ranks = meta.expert_parallel_group_ranks
        whole = whole.chunk(len(ranks), meta.expert_dim)[ranks.index(meta.owner_rank)]
    if not meta.is_tp:
        return whole
    ranks = meta.tensor_parallel_group_ranks
    segments = whole.chunk(len(ranks) * meta.partition_stride, meta.partition_dim)
    return torch.cat(segments[ranks.index(meta.owner_rank) :: len(ranks)], meta.partition_dim)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [SMALL, LATENT, FUSED], ids=["grouped", "latent", "fused"])
def test_equal_places_hold_equal_values_under_every_layout(shape: MoEShape, layout: str) -> None:
    whole = build_module(shape, Parallelism(1), 0, dtype=torch.bfloat16)
    fill(whole, seed=3)
    wholes = tensors_of(whole)
    parallelism = Parallelism.parse(layout, 4)
    seen = set()
    for rank in range(4):
        module = build_module(shape, parallelism, rank, dtype=torch.bfloat16, rank_offset=10)
        fill(module, seed=3)
        mine = tensors_of(module)
        metas = roster(shape, parallelism, rank, rank_offset=10)
        assert [meta.name for meta in metas] == list(mine)
        for meta in metas:
            tensor = mine[meta.name]
            assert (meta.shape, meta.dtype) == (tuple(tensor.shape), tensor.dtype)
            assert meta.owner_rank == rank + 10
            assert meta.resolved_name is not None
            assert torch.equal(part_of(wholes[meta.resolved_name], meta), tensor), meta.name
            seen.add(meta.resolved_name)
    assert seen == set(wholes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [SMALL, LATENT, FUSED], ids=["grouped", "latent", "fused"])
def test_described_metadata_is_what_is_read_of_a_module(shape: MoEShape, layout: str) -> None:
    parallelism = Parallelism.parse(layout, 4)
    for rank in range(4):
        module = build_module(
            shape, parallelism, rank, dtype=torch.bfloat16, rank_offset=10, device="meta"
        )
        read = extract_module_metadata(module, rank + 10, num_experts=shape.num_experts)
        assert read == roster(shape, parallelism, rank, rank_offset=10)


def test_a_list_of_tensors_is_divided_like_experts() -> None:
    tensors = TensorList(num_tensors=12, size=40)
    assert tensors.num_bytes() == 12 * 40 * 2
    whole = build_module(tensors, Parallelism(1), 0, dtype=torch.bfloat16)
    fill(whole, seed=3)
    parallelism = Parallelism.parse("ep4", 4)
    module = build_module(tensors, parallelism, 2, dtype=torch.bfloat16)
    fill(module, seed=3)
    metas = roster(tensors, parallelism, 2)
    assert metas == extract_module_metadata(module, 2, num_experts=12)
    assert [meta.global_expert_index for meta in metas] == [6, 7, 8]
    for meta in metas:
        mine, expected = tensors_of(module)[meta.name], tensors_of(whole)[str(meta.resolved_name)]
        assert torch.equal(mine, expected)
    assert torch.stack(list(tensors_of(whole).values())).unique(dim=0).shape == (12, 40)
    for layout, message in (("ep8", "got 12 and 8"), ("tp2", "by ep alone, got tp2")):
        with pytest.raises(ValueError, match=message):
            tensors.check(Parallelism.parse(layout, 8))
    with pytest.raises(ValueError, match="size must be >= 1, got 0"):
        TensorList(num_tensors=1, size=0)


def test_values_depend_on_name_row_column_and_seed() -> None:
    module = build_module(SMALL, Parallelism(1), 0, dtype=torch.float32)
    fill(module, seed=3)
    first = {name: tensor.clone() for name, tensor in tensors_of(module).items()}
    weight = first["output_layer.weight"]
    assert weight.unique(dim=0).shape == weight.shape
    assert not torch.equal(weight, first["embedding.word_embeddings.weight"])
    fill(module, seed=4)
    assert not torch.equal(module.get_parameter("output_layer.weight"), weight)


def test_differences_name_the_parameter_and_the_element() -> None:
    module = build_module(SMALL, Parallelism.parse("ep4", 4), 1, dtype=torch.bfloat16)
    fill(module, seed=3)
    assert find_differences(module, seed=3) == []
    module.get_parameter("decoder.layers.2.mlp.experts.linear_fc1.weight1").data[5, 7] = 2.0
    module.get_buffer("decoder.layers.1.mlp.router.expert_bias")[3] = float("nan")
    found = find_differences(module, seed=3)
    assert len(found) == 2
    assert "linear_fc1.weight1: expected" in found[0]
    assert "row 5, column 7, got 2.0" in found[0]
    assert "expert_bias" in found[1]
    assert "got nan" in found[1]


def test_module_carries_what_resharding_reads() -> None:
    module = build_module(SMALL, Parallelism.parse("pp2.tp2", 4), 3, dtype=torch.bfloat16)
    assert module.config.num_moe_experts == 8
    assert (module.pg_collection.tp.size(), module.pg_collection.pp.rank()) == (2, 1)
    # Stages take 2 and 1 of 3 layers.
    assert module.get_submodule("decoder.layers.0").layer_number == 3
    expert = module.get_parameter("decoder.layers.0.mlp.experts.linear_fc2.weight0")
    assert (expert.allreduce, expert.partition_dim, expert.tensor_model_parallel) == (
        False,
        1,
        True,
    )


def test_tied_embeddings_have_an_output_layer_on_a_stage_of_its_own() -> None:
    tied = dataclasses.replace(SMALL, has_tied_embeddings=True)
    names = [meta.name for meta in roster(tied, Parallelism(2), 1)]
    assert "output_layer.weight" not in names
    names = [meta.name for meta in roster(tied, Parallelism(2, pp=2), 1)]
    assert "output_layer.weight" in names


def test_published_sizes_add_up() -> None:
    billions = {name: round(shape.num_bytes() / 2e9) for name, shape in PUBLISHED_SHAPES.items()}
    assert billions == {
        "mixtral-8x7b": 47,
        "qwen3-30b-a3b": 31,
        "qwen3-235b-a22b": 235,
        "deepseek-v3": 671,
        "kimi-k2": 1026,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers must be >= 1, got 0"),
        ({"num_heads": 7}, "hidden must be a multiple of num_heads.*64 and 7"),
        ({"num_query_groups": 3}, "multiple of num_query_groups, got 8 and 3"),
        ({"num_dense_layers": 4}, r"in \[0, 3\], got 4"),
        ({"ffn": 0}, "ffn of dense layers must be >= 1, got 0"),
        ({"expert_ffn": 0}, "expert_ffn must be >= 1, got 0"),
    ],
)
def test_sizes_are_checked(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp8", "num_query_groups must be a multiple of tp, got 4 and 8"),
        ("ep16", "num_experts must be a multiple of ep, got 8 and 16"),
        ("etp32", "expert_ffn must be a multiple of expert_tp, got 16 and 32"),
        ("pp4", "num_layers must be >= pp, got 3 and 4"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(layout: str, message: str) -> None:
    parallelism = Parallelism.parse(layout, 32)
    for make in (
        lambda: roster(SMALL, parallelism, 0),
        lambda: build_module(SMALL, parallelism, 0, dtype=torch.bfloat16),
    ):
        with pytest.raises(ValueError, match=message):
            make()

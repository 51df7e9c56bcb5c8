"""Attributes that resharding reads of modules: names in the whole model, who holds what, which source to read."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_comm.resharding import utils
from moe_comm.resharding.describe.metadata import MeshLayout, MeshPlacement, ParameterMetadata
from moe_comm.resharding.describe.parallelism import Parallelism, ProcessGroups, RankGroup

GROUPS = Parallelism.parse("tp2.ep2", 8).groups(5)


def meta(name: str = "w", **fields: object) -> ParameterMetadata:
    return ParameterMetadata(name, (4, 4), torch.float32, 4, **fields)


def parameter(*shape: int, **attributes: object) -> nn.Parameter:
    result = nn.Parameter(torch.zeros(shape))
    for name, value in attributes.items():
        setattr(result, name, value)
    return result


def extract(param: torch.Tensor, name: str = "w", **options: object) -> ParameterMetadata:
    return utils.extract_param_metadata(param, name, 5, GROUPS, **options)


# ---------------------------------------------------------------------------------------------
# Names.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlp.experts.linear_fc1.weight12", 12),
        ("experts.linear_fc2.bias0", 0),
        ("mlp.linear_fc1.weight", None),
        ("weights3.x", None),
        ("layers.3.weight", None),
    ],
)
def test_expert_number_in_a_name(name: str, expected: int | None) -> None:
    assert utils._detect_expert_index_from_param_name(name) == expected


def test_layers_get_their_number_in_the_whole_model() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module() for _ in range(11)])
    for i, layer in enumerate(model.layers):
        layer.layer_number = 17 + i
        layer.inner = nn.ModuleList([nn.Linear(1, 1)])
    model.head = nn.Linear(1, 1)
    model.head.layer_number = 3  # no layer: its path has no number
    prefixes = utils._build_layer_module_prefix_map(model)
    assert len(prefixes) == 11
    assert prefixes["layers.1"] == "layers.17"
    resolve = utils._resolve_global_layer_number_in_name
    assert resolve("layers.1.inner.0.weight", prefixes) == "layers.17.inner.0.weight"
    assert resolve("layers.10.inner.0.weight", prefixes) == "layers.26.inner.0.weight"
    assert resolve("head.weight", prefixes) == "head.weight"
    assert resolve("layers.1", prefixes | {"layers": "x"}) == "layers.17"


def test_experts_get_their_number_in_the_whole_model() -> None:
    ours = meta(
        "layers.0.experts.fc1.weight1",
        is_ep=True,
        num_experts=8,
        owner_rank=6,
        expert_parallel_group_ranks=[4, 6],
    )
    utils.assign_resolved_name_inplace(ours, layer_module_prefix_map={"layers.0": "layers.9"})
    assert ours.resolved_name == "layers.9.experts.fc1.weight5"
    assert ours.global_expert_index == 5
    ours.name = "experts.local_experts.3.fc1.weight"
    utils.assign_ep_resolved_name_inplace(ours)
    assert ours.resolved_name == "experts.local_experts.7.fc1.weight"
    assert ours.global_expert_index == 7


def test_a_tensor_of_several_experts_keeps_its_name() -> None:
    fused = meta(
        "experts.w13", is_ep=True, num_experts=8, owner_rank=1, expert_parallel_group_ranks=[0, 1]
    )
    utils.assign_ep_resolved_name_inplace(fused)
    assert (fused.resolved_name, fused.global_expert_index) == ("experts.w13", None)
    fused.name, fused.expert_dim = "experts.weight1", 0
    utils.assign_ep_resolved_name_inplace(fused)
    assert (fused.resolved_name, fused.global_expert_index) == ("experts.weight1", None)


@pytest.mark.parametrize("num_experts", [None, 9])
def test_experts_that_do_not_divide_are_refused(num_experts: int | None) -> None:
    odd = meta(
        "weight0",
        is_ep=True,
        num_experts=num_experts,
        owner_rank=1,
        expert_parallel_group_ranks=[0, 1],
    )
    with pytest.raises(ValueError, match=rf"weight0 .* got {num_experts} and \[0, 1\]"):
        utils.assign_ep_resolved_name_inplace(odd)


def test_rank_in_group() -> None:
    assert utils._get_rank_in_group(7, [3, 7]) == 1
    with pytest.raises(ValueError, match=r"Rank 4 not found in process group \[3, 7\]"):
        utils._get_rank_in_group(4, [3, 7])


# ---------------------------------------------------------------------------------------------
# Attributes and groups.


def test_attributes_of_a_dense_parameter() -> None:
    found = extract(
        parameter(
            6,
            4,
            tensor_model_parallel=True,
            partition_dim=1,
            partition_stride=2,
            partition_sizes=(2, 2),
        )
    )
    assert found == ParameterMetadata(
        "w",
        (6, 4),
        torch.float32,
        4,
        is_tp=True,
        partition_dim=1,
        partition_stride=2,
        partition_sizes=[2, 2],
        owner_rank=5,
        tensor_parallel_group_ranks=[4, 5],
        data_parallel_group_ranks=[1, 3, 5, 7],
        pipeline_parallel_group_ranks=[5],
        resolved_name="w",
    )


def test_a_replicated_parameter_has_a_tensor_parallel_group() -> None:
    found = extract(parameter(4))
    assert not found.is_tp
    assert found.tensor_parallel_group_ranks == [4, 5]
    assert found.expert_parallel_group_ranks is None


def test_an_expert_uses_the_groups_of_experts() -> None:
    groups = Parallelism(8, tp=4, ep=2, expert_tp=2).groups(5)
    found = utils.extract_param_metadata(
        parameter(4, 4, allreduce=False), "fc1.weight1", 5, groups, num_experts=4
    )
    assert found.is_ep
    assert found.is_tp, "grouped linear layers do not say that they are sharded"
    assert found.tensor_parallel_group_ranks == [4, 5]
    assert found.expert_parallel_group_ranks == [5, 7]
    assert found.data_parallel_group_ranks == [1, 5]
    assert found.resolved_name == "fc1.weight1"
    assert found.global_expert_index == 1


def test_offset_and_shared_lists() -> None:
    known: dict[object, object] = {}
    found = [
        extract(parameter(4), rank_offset=100, _rank_list_cache=known),
        extract(parameter(4), rank_offset=100, _rank_list_cache=known),
    ]
    assert found[0].data_parallel_group_ranks == [101, 103, 105, 107]
    assert found[0].data_parallel_group_ranks is found[1].data_parallel_group_ranks
    assert found[0].owner_rank == 5


def test_fused_experts_by_attribute() -> None:
    found = extract(
        parameter(8, 6, allreduce=False, expert_dim=1, expert_view=(8, 2, 3)), num_experts=4
    )
    assert (found.expert_dim, found.local_view) == (1, (8, 2, 3))
    with pytest.raises(ValueError, match=r"expert_view of w .* got \(8, 2, 2\) and \(8, 6\)"):
        extract(parameter(8, 6, expert_dim=1, expert_view=(8, 2, 2)))
    with pytest.raises(ValueError, match=r"expert_dim of w .* got 2"):
        extract(parameter(8, 6, expert_dim=2))


def test_no_groups() -> None:
    with pytest.raises(ValueError, match="must have pg_collection"):
        utils.extract_param_metadata(parameter(4), "w", 0, None)
    with pytest.raises(ValueError, match="w belongs to experts"):
        utils.extract_param_metadata(parameter(4, allreduce=False), "w", 0, object(), num_experts=2)


class GroupedExperts(nn.Module):
    """Attributes of Megatron's `GroupedMLP`: 3 experts, hidden 4, inner 5."""

    def __init__(self) -> None:
        super().__init__()
        self.num_local_experts = 3
        options = {"tensor_model_parallel": True, "allreduce": False}
        self.weight1 = parameter(4, 15, partition_dim=1, **options)
        self.weight2 = parameter(15, 4, partition_dim=0, **options)


def test_grouped_experts_are_read_as_matrices() -> None:
    model = nn.Module()
    model.experts = GroupedExperts()
    model.pg_collection = GROUPS
    first, second = utils.extract_module_metadata(model, 5, num_experts=6)
    assert (first.local_view, first.expert_dim, first.partition_dim) == ((3, 4, 5), 0, 2)
    assert (second.local_view, second.expert_dim, second.partition_dim) == ((3, 5, 4), 0, 1)
    assert first.resolved_name == "experts.weight1"
    assert first.global_expert_index is None


def test_the_bias_of_a_row_parallel_layer_is_replicated() -> None:
    layer = nn.Module()
    for i in range(2):
        layer.register_parameter(f"weight{i}", parameter(4, 4, allreduce=False, partition_dim=1))
        layer.register_parameter(f"bias{i}", parameter(4, allreduce=False))
    layer.pg_collection = GROUPS
    found = {m.name: m.is_tp for m in utils.extract_module_metadata(layer, 5, num_experts=4)}
    assert found == {"weight0": True, "weight1": True, "bias0": False, "bias1": False}


# ---------------------------------------------------------------------------------------------
# Process groups and DTensors.


@pytest.fixture
def world() -> Iterator[None]:
    """Rank 5 of 8, without the others."""
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_process_groups_are_numbered_in_the_plans_group() -> None:
    tp, dp = dist.new_group([4, 5]), dist.new_group([3, 5, 7])
    own = dist.new_group([5])
    groups = ProcessGroups(tp=tp, pp=own, ep=own, dp=dp, expt_tp=own, expt_dp=own)
    found = utils.extract_param_metadata(parameter(4), "w", 5, groups)
    assert found.tensor_parallel_group_ranks == [4, 5]
    assert found.data_parallel_group_ranks == [3, 5, 7]
    plan_group = dist.new_group([3, 4, 5, 7])
    found = utils.extract_param_metadata(parameter(4), "w", 2, groups, group=plan_group)
    assert found.tensor_parallel_group_ranks == [1, 2]
    assert found.data_parallel_group_ranks == [0, 2, 3]
    with pytest.raises(ValueError, match=r"ranks \[3, 5, 7\], of which \[7\] are not in the group"):
        utils.extract_param_metadata(parameter(4), "w", 2, groups, group=dist.new_group([3, 4, 5]))
    found = utils.extract_param_metadata(parameter(4), "w", 2, groups, rank_offset=8)
    assert found.tensor_parallel_group_ranks == [12, 13]


@pytest.mark.usefixtures("world")
def test_a_dtensor_says_where_it_lies() -> None:
    mesh = DeviceMesh("cpu", torch.arange(8).view(2, 2, 2))
    local = torch.zeros(3, 5, dtype=torch.bfloat16)
    placements = [_StridedShard(0, split_factor=2), Partial("avg"), Shard(0)]
    tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size((10, 5)), stride=(5, 1)
    )
    # Needs no pg_collection.
    found = utils.extract_param_metadata(nn.Parameter(tensor), "w", 5, None)
    assert found.shape == (3, 5)
    assert not found.is_buffer
    assert found.mesh == MeshLayout(
        (2, 2, 2),
        tuple(range(8)),
        (
            MeshPlacement("strided_shard", dim=0, split_factor=2),
            MeshPlacement("partial", op="avg"),
            MeshPlacement("shard", dim=0),
        ),
        (10, 5),
    )
    mesh = DeviceMesh("cpu", [5, 7])
    tensor = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    model = nn.Module()
    model.register_buffer("b", tensor)
    plan_group = dist.new_group([1, 5, 7])
    (found,) = utils.extract_module_metadata(model, 1, group=plan_group)
    assert found.mesh.mesh_ranks == (1, 2)
    assert found.is_buffer


@pytest.mark.usefixtures("world")
def test_a_placement_that_cannot_be_moved_is_named() -> None:
    mesh = DeviceMesh("cpu", [4, 5])
    tensor = DTensor.from_local(torch.zeros(2), mesh, [Partial("band")], run_check=False)
    with pytest.raises(ValueError, match=r"^w has placement .*band"):
        utils.extract_param_metadata(tensor, "w", 5, None)


# ---------------------------------------------------------------------------------------------
# Tensors of a module.


def test_refit_tensors_are_parameters_then_persistent_buffers() -> None:
    model = nn.Module()
    model.inner = nn.BatchNorm1d(3)
    model.register_buffer("scratch", torch.ones(1), persistent=False)
    model.register_buffer("nothing", None)
    model.weight = nn.Parameter(torch.ones(1))
    assert [name for name, _ in utils.named_refit_tensors(model)] == [
        "weight",
        "inner.weight",
        "inner.bias",
        "inner.running_mean",
        "inner.running_var",
        "inner.num_batches_tracked",
    ]
    full_name, owner, name, _ = next(utils.named_persistent_buffers(model))
    assert (full_name, owner, name) == ("inner.running_mean", model.inner, "running_mean")


def test_the_cache_notices_every_replacement() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    tensors = utils.get_refit_tensor_dict(model)
    assert utils.get_refit_tensor_dict(model) is tensors

    def assert_noticed() -> None:
        nonlocal tensors
        found = utils.get_refit_tensor_dict(model)
        assert found is not tensors
        expected = dict(utils.named_refit_tensors(model))
        assert found.keys() == expected.keys()
        assert all(found[name] is expected[name] for name in expected)
        assert utils.get_refit_tensor_dict(model) is found
        tensors = found

    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert_noticed()
    model[1][0].running_mean = torch.ones(2)
    assert_noticed()
    model[1][0] = nn.BatchNorm1d(2)
    assert_noticed()
    model.register_parameter("more", nn.Parameter(torch.ones(1)))
    assert_noticed()
    del model.more
    assert_noticed()
    # The last one, so that the order of the tensors stays.
    bias = model[0].bias
    del model[0].bias
    model[0].renamed = bias
    assert_noticed()
    utils.invalidate_refit_tensor_cache(model)
    assert_noticed()


def test_the_cache_is_neither_copied_nor_a_leak() -> None:
    model = nn.Linear(2, 2)
    utils.get_refit_tensor_dict(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert utils.get_refit_tensor_dict(other)["weight"] is other.weight
    reference = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert reference() is None, "the cache refers to its module"
    finally:
        gc.enable()


def test_local_tensor_shares_memory_and_has_no_history() -> None:
    tensor = nn.Parameter(torch.ones(2))
    local = utils.local_tensor(tensor)
    assert not local.requires_grad
    assert local.data_ptr() == tensor.data_ptr()


# ---------------------------------------------------------------------------------------------
# The choice among sources.


def source(rank: int, dp: list[int], ep: list[int] | None = None) -> ParameterMetadata:
    return meta(owner_rank=rank, data_parallel_group_ranks=dp, expert_parallel_group_ranks=ep)


def test_a_rank_reads_from_itself() -> None:
    sources = [source(0, [0, 2]), source(1, [1, 3]), source(2, [0, 2]), source(3, [1, 3])]
    for rank in range(4):
        assert utils.select_src_metadata_balanced(sources, meta(), rank).owner_rank == rank


def test_others_spread_over_groups_and_then_members() -> None:
    sources = [source(0, [0, 2]), source(1, [1, 3]), source(2, [0, 2]), source(3, [1, 3])]
    chosen = [
        utils.select_src_metadata_balanced(sources, meta(), rank).owner_rank
        for rank in range(4, 12)
    ]
    assert chosen == [0, 1, 2, 3, 0, 1, 2, 3]


def test_equal_expert_groups_read_place_by_place() -> None:
    sources = [source(rank, [rank], [0, 1]) for rank in (0, 1)]
    destination = meta(expert_parallel_group_ranks=[8, 9])
    for rank in (8, 9):
        chosen = utils.select_src_metadata_balanced(sources, destination, rank)
        assert chosen.owner_rank == rank - 8
    wider = meta(expert_parallel_group_ranks=[8, 9, 10])
    assert utils._filter_by_ep_local_rank(sources, wider, 10) == sources


def test_no_source_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"must be non-empty.* w"):
        utils.select_src_metadata_balanced([], meta(), 0)
    sources = [source(0, [0], [0, 1])]
    with pytest.raises(ValueError, match=r"No source metadata with EP local rank 1 .*rank 9"):
        utils.select_src_metadata_balanced(sources, meta(expert_parallel_group_ranks=[8, 9]), 9)


def test_a_rank_group_is_enough() -> None:
    group = RankGroup((4, 5), 5)
    assert utils.extract_param_metadata(
        parameter(2), "w", 5, type("Groups", (), {"tp": group, "dp": group})()
    ).tensor_parallel_group_ranks == [4, 5]

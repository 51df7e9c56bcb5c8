"""Conversions run over where elements are, against the same run over the elements."""

from __future__ import annotations

import gc
import re
import sys
import types
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from moe_comm.resharding import PlanError, transformers_views
from moe_comm.resharding.describe.converted_views import converted_views
from tests.helpers.checkpoint_oracle import faults_of, uncovered
from tests.helpers.cut_tensors import numbered
from tests.helpers.published_conversion import publish_conversion
from tests.unit.test_reshard_dtensor_plans import fake_world

Tensors = dict[str, torch.Tensor]


def experts(tensors: Tensors) -> Tensors:
    """Fused and stacked experts as each one's gate and up."""
    disk = {}
    for half, tensor in zip(("gate", "up"), tensors["w"].chunk(2, dim=1), strict=True):
        rows = tensor.contiguous().chunk(tensor.shape[0])
        disk |= {f"{number}.{half}": row.squeeze(0) for number, row in enumerate(rows)}
    return disk


def interleaved(tensors: Tensors) -> Tensors:
    """Even and odd columns apart, transposed."""
    w = tensors["w"]
    return {"gate": w[..., ::2].transpose(1, 2), "up": w[:, :, 1::2].transpose(1, 2).contiguous()}


def put_together(tensors: Tensors) -> Tensors:
    """Rotated halves of heads between rows as they are, and a stack."""
    w = tensors["w"]
    rows = w.reshape(-1, w.shape[-1])
    turned = rows.view(len(w), 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
    return {
        "qkv": torch.cat([turned, rows, turned]),
        "stack": torch.stack([w, w], dim=1),
        "flat": w.flatten().unsqueeze(0),
        "turned": turned.t(),
        "part": turned[w.shape[1] : 3 * w.shape[1]],
    }


def whole(tensors: Tensors) -> Tensors:
    return tensors


CONVERSIONS: list[Callable[[Tensors], Tensors]] = [experts, interleaved, put_together, whole]
PLACED: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((2,), (Shard(0),)),
    ((4,), (Shard(0),)),
    ((3,), (Shard(1),)),
    ((4,), (Shard(2),)),
    ((2,), (_StridedShard(1, split_factor=2),)),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 2), (Shard(1), Shard(2))),
    ((3, 2), (Replicate(), Shard(1))),
]


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_views_of_plain_tensors_are_what_the_conversion_makes_of_them(
    convert: Callable[[Tensors], Tensors],
) -> None:
    tensors = {"w": numbered((6, 8, 4)), "scalar": torch.tensor(3.0)}
    views = converted_views(tensors, convert)
    disk = convert(tensors)
    assert faults_of(views, disk) == []
    assert uncovered([(view.name, view.shape, view.dims) for view in views], disk) == []
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert {view.tensor.untyped_storage().data_ptr() for view in views} <= storages


@pytest.mark.parametrize("convert", CONVERSIONS)
@pytest.mark.parametrize("placed", PLACED, ids=str)
@pytest.mark.parametrize("shape", [(6, 8, 4), (5, 4, 8)], ids=str)
def test_views_of_dtensors_are_parts_of_what_the_conversion_makes_of_the_whole(
    shape: tuple[int, ...],
    placed: tuple[tuple[int, ...], tuple[Placement, ...]],
    convert: Callable[[Tensors], Tensors],
) -> None:
    mesh_shape, placements = placed
    num_ranks = torch.Size(mesh_shape).numel()
    tensor = numbered(shape)
    disk = convert({"w": tensor})
    held = []
    for rank in range(num_ranks):
        with fake_world(rank, num_ranks):
            mesh = init_device_mesh("cpu", mesh_shape)
            part = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
            views = converted_views({"w": part}, convert)
            assert faults_of(views, disk) == []
            held += [(view.name, view.shape, view.dims) for view in views]
    assert uncovered(held, disk) == []


@st.composite
def operations(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    kinds = ["narrow", "transpose", "view", "select", "unsqueeze", "cat", "split", "step"]
    number = st.integers(0, 10**6)
    return draw(st.lists(st.tuples(st.sampled_from(kinds), number, number), max_size=6))


def run(tensor: torch.Tensor, steps: list[tuple[str, int, int]]) -> torch.Tensor:
    """Views one after the other; numbers choose among what fits the shape."""
    for kind, one, other in steps:
        if tensor.dim() == 0:
            break
        dim = one % tensor.dim()
        size = tensor.shape[dim]
        if kind == "narrow":
            start = other % size
            tensor = tensor.narrow(dim, start, 1 + one % (size - start))
        elif kind == "transpose":
            tensor = tensor.transpose(dim, other % tensor.dim())
        elif kind == "view" and tensor.dim() > 1:
            tensor = tensor.flatten(dim, min(dim + 1, tensor.dim() - 1))
        elif kind == "view":
            divisors = [d for d in range(1, size + 1) if size % d == 0]
            tensor = tensor.unflatten(dim, (divisors[other % len(divisors)], -1))
        elif kind == "select":
            tensor = tensor.select(dim, other % size)
        elif kind == "unsqueeze":
            tensor = tensor.unsqueeze(dim)
        elif kind == "cat":
            tensor = torch.cat([tensor, tensor], dim)
        elif kind == "split":
            tensor = tensor.split(1 + other % size, dim)[0].contiguous()
        elif size % 2 == 0:
            tensor = tensor[(slice(None),) * dim + (slice(other % 2, None, 2),)]
    return tensor


@given(operations(), operations())
@settings(max_examples=150, deadline=None)
def test_any_views_one_after_the_other_are_followed_or_refused(
    first: list[tuple[str, int, int]], second: list[tuple[str, int, int]]
) -> None:
    def convert(tensors: Tensors) -> Tensors:
        return {"one": run(tensors["w"], first), "both": run(run(tensors["w"], first), second)}

    tensors = {"w": numbered((4, 6, 2))}
    disk = convert(tensors)
    refused = ""
    views = []
    try:
        views = converted_views(tensors, convert)
    except PlanError as error:
        refused = str(error)
    if refused:
        assert re.match(r"w: .*no rectangle", refused)
        return
    assert faults_of(views, disk) == []
    assert uncovered([(view.name, view.shape, view.dims) for view in views], disk) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w * 1.0,
        lambda w: w.to(torch.bfloat16),
        lambda w: w[torch.tensor([1, 0])],
        lambda w: w.expand(2, 6, 4, 2),
        lambda w: w[:0],
        lambda w: w[1:5:2],
        lambda w: w[2::2],
        lambda w: w.transpose(0, 1).flatten()[1:9],
        lambda w: torch.cat([w.transpose(0, 1).reshape(3, 16), w.flatten()[:20].view(2, 10)], 1),
    ],
)
def test_what_is_no_rectangle_is_refused_by_name(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises((PlanError, RuntimeError), match=r"^layer\.w: |Sizes of tensors"):
        converted_views(
            {"layer.w": numbered((6, 4, 2)).float()}, lambda t: {"disk": change(t["layer.w"])}
        )


def test_a_tensor_of_nobody_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"^disk: comes out of the conversion with elements that"):
        converted_views({"w": torch.ones(2)}, lambda _: {"disk": torch.ones(2)})
    assert gc.isenabled()


def test_a_pending_sum_is_refused_by_name() -> None:
    with fake_world(0, 2):
        part = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
        with pytest.raises(PlanError, match=r"^w: holds a pending sum"):
            converted_views({"w": part}, whole)


class Tied(torch.nn.Module):
    """Part of a model of transformers that is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(3, 2)
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.arange(4.0))
        self.register_buffer("unsaved", torch.arange(4.0))
        self.all_tied_weights_keys = {"head.weight": "embed.weight"}
        self._keys_to_ignore_on_save = {"unsaved"}


class WithState(Tied):
    """One whose state has more than tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 1}


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for where transformers publishes its conversion."""

    def revert(model: torch.nn.Module, state: Tensors) -> Mapping[str, torch.Tensor]:
        return {
            f"disk.{name}": tensor.t() if tensor.dim() > 1 else tensor
            for name, tensor in state.items()
        }

    publish_conversion(monkeypatch, revert)


@pytest.mark.usefixtures("published")
def test_a_model_is_described_without_tied_and_ignored_tensors() -> None:
    model = Tied()
    disk = {"disk.embed.weight": model.embed.weight.detach().t(), "disk.kept": model.kept}
    views = transformers_views(model).views
    assert {view.name for view in views} == set(disk)
    assert faults_of(views, disk) == []


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model, "hf_quantizer", 1), r"^Tied is quantized \(hf_quantizer\)"),
        (lambda model: setattr(model, "_hf_peft_config_loaded", True), r"^Tied has adapters"),
        (
            lambda model: setattr(model.head, "weight", torch.nn.Parameter(torch.ones(3, 2))),
            r"^head\.weight: is tied to embed\.weight by the model's own words",
        ),
        (
            lambda model: setattr(model, "__class__", WithState),
            r"^_extra_state: the model's state has a dict, not a tensor",
        ),
    ],
)
def test_a_model_that_is_not_plain_is_refused(
    change: Callable[[torch.nn.Module], None], message: str
) -> None:
    model = Tied()
    change(model)
    with pytest.raises(PlanError, match=message):
        transformers_views(model)


def test_a_transformers_without_conversions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "transformers.core_model_loading"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(ImportError, match=r"no revert_weight_conversion, .* transformers 5\.23"):
        transformers_views(Tied())

"""State dicts of one process: what is in them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from moe_comm import Placement
from moe_comm.checkpoints import CheckpointState, ChunkedTensor, placed_views
from moe_comm.resharding import CheckpointView, CheckpointViews, Parallelism, PlanError
from moe_comm.resharding.describe import intervals
from moe_comm.testing import RankContext
from tests.helpers.threaded_refits import error_of, threads

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class _Net(torch.nn.Module):
    """Parameters given by name."""

    def __init__(self, **weights: torch.Tensor) -> None:
        super().__init__()
        self.pg_collection = Parallelism(1).groups(0)
        for name, weight in weights.items():
            self.register_parameter(name, torch.nn.Parameter(weight))


def _load(net: _Net, folder: Path, optimizer: torch.optim.Optimizer | None = None) -> None:
    dcp.load({"app": CheckpointState(net, optimizer)}, checkpoint_id=folder, no_dist=True)


def _save(net: _Net, folder: Path, optimizer: torch.optim.Optimizer | None = None) -> None:
    dcp.save({"app": CheckpointState(net, optimizer)}, checkpoint_id=folder, no_dist=True)


def test_odd_tensors(tmp_path: Path) -> None:
    """Without dimensions, without elements, transposed, of numbers that are no weights by themselves."""

    def weights() -> dict[str, torch.Tensor]:
        return {
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 3),
            "turned": torch.arange(6.0).view(2, 3).t(),
            "complex": torch.tensor([1 + 2j]),
        }

    net = _Net(**weights())
    net.register_buffer("codes", torch.arange(5.0).to(torch.float8_e4m3fn))
    net.register_buffer("flags", torch.tensor([True, False]))
    net.register_buffer("scratch", torch.ones(3), persistent=False)
    _save(net, tmp_path)
    target = _Net(**{name: torch.zeros_like(weight) for name, weight in weights().items()})
    target.register_buffer("codes", torch.zeros(5).to(torch.float8_e4m3fn))
    target.register_buffer("flags", torch.tensor([False, False]))
    _load(target, tmp_path)
    for name, weight in net.state_dict().items():
        loaded = target.state_dict()[name]
        assert (
            torch.equal(loaded, weight) if name != "codes" else loaded.tolist() == weight.tolist()
        )
    assert target.turned.stride() == (1, 3)
    saved = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert sorted(saved) == [f"app.model.{name}" for name in sorted(net.state_dict())]


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
        lambda params: torch.optim.Adam(params, lr=torch.tensor(0.5), amsgrad=True),
        lambda params: torch.optim.RMSprop(params, lr=0.5, centered=True),
        lambda params: torch.optim.SGD(params, lr=0.5),
    ],
    ids=["momentum", "adam", "rmsprop", "no state"],
)
def test_optimizers_of_torch(tmp_path: Path, make: Any) -> None:
    """One that goes on from a checkpoint does what the first one does."""
    nets = [_Net(a=torch.arange(6.0).view(2, 3), b=torch.ones(4)) for _ in range(2)]
    first, second = (make(net.parameters()) for net in nets)

    def train(net: _Net, optimizer: torch.optim.Optimizer, seed: int) -> None:
        for param in net.parameters():
            param.grad = torch.full_like(param, seed / 8)
        optimizer.step()
        optimizer.zero_grad()

    train(nets[0], first, 1)
    train(nets[0], first, 2)
    _save(nets[0], tmp_path, first)
    for group in second.param_groups:
        group["lr"] = torch.tensor(9.0) if isinstance(group["lr"], torch.Tensor) else 9.0
    _load(nets[1], tmp_path, second)
    for net, optimizer in zip(nets, (first, second), strict=True):
        train(net, optimizer, 3)
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(one, other)


class _CompiledSGD(torch.optim.SGD):
    """An optimizer that compiles a function of its step, as torchao's do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        add = torch.compile(torch.Tensor.add_, backend="eager", fullgraph=True)
        for param in self.param_groups[0]["params"]:
            total = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
            add(total, param.grad)
            param.sub_(total)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (_CompiledSGD, {"momentum": 0.5}),
        (torch.optim.Adam, {"weight_decay": 0.5, "foreach": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.5}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
        (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Rprop, {}),
    ],
)
@pytest.mark.parametrize("is_loaded", [False, True], ids=["saved", "loaded"])
def test_a_checkpoint_before_the_first_step_changes_nothing(
    tmp_path: Path, kind: Any, options: dict[str, Any], is_loaded: bool
) -> None:
    """Neither the one that is saved nor one that is loaded trains otherwise than one that never was."""
    nets = [_Net(a=torch.arange(6.0).view(2, 3), b=torch.ones(4)) for _ in range(2)]
    one, other = (kind(net.parameters(), lr=0.25, **options) for net in nets)
    hooked: list[object] = []
    other.register_step_post_hook(lambda *given: hooked.append(given))
    torch.use_deterministic_algorithms(True)  # memory that nobody writes is NaN
    try:
        _save(nets[1], tmp_path, other)
    finally:
        torch.use_deterministic_algorithms(False)
    if is_loaded:
        nets[1].b.grad = torch.ones(4)  # as after a first backward
        other = kind(nets[1].parameters(), lr=0.5, **options)
        _load(nets[1], tmp_path, other)
        assert nets[1].b.grad.tolist() == [1] * 4
    assert not hooked
    for seed in (3, 2):
        for net, optimizer in zip(nets, (one, other), strict=True):
            for param in net.parameters():
                param.grad = torch.full_like(param, seed / 8)
            optimizer.step()
    assert torch.equal(nets[0].a, nets[1].a)
    assert torch.equal(nets[0].b, nets[1].b)


def test_state_is_made_of_parameters_that_lack_it(tmp_path: Path) -> None:
    """Also where others have it, and where gradients are there."""
    nets = [_Net(a=torch.ones(3), b=torch.ones(4)) for _ in range(2)]
    one, other = (torch.optim.AdamW(net.parameters(), lr=0.5, weight_decay=0.5) for net in nets)
    for param, grad in ((nets[0].a, 1.0), (nets[0].b, 2.0), (nets[1].a, 3.0)):
        param.grad = torch.full_like(param, grad)
    one.step()
    other.step()
    before = nets[1].a.tolist()
    state = CheckpointState(nets[1], other).state_dict()["optim"]["state"]
    assert set(state["b"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert (float(other.state[nets[1].a]["step"]), nets[1].a.tolist()) == (1, before)
    assert (other.state[nets[1].b]["step"], nets[1].b.tolist()) == (0, [1] * 4)
    assert (nets[1].a.grad.tolist(), nets[1].b.grad) == ([3] * 3, None)
    assert other.param_groups[0]["weight_decay"] == 0.5
    _save(nets[0], tmp_path, one)
    _load(nets[1], tmp_path, other)
    for name in ("a", "b"):
        kept, loaded = one.state[getattr(nets[0], name)], other.state[getattr(nets[1], name)]
        assert {key: value.tolist() for key, value in kept.items()} == {
            key: value.tolist() for key, value in loaded.items()
        }


def test_state_that_is_cut_otherwise_is_refused() -> None:
    net = _Net(a=torch.ones(4, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    state = optimizer.state[net.a]
    for value, says in (
        (torch.ones(4), r"a: rows of the optimizer has shape \(4,\), and its parameter \(4, 3\)"),
        (
            torch.ones(3, 4).t(),
            r"a: rows of the optimizer has strides \(1, 4\), its parameter \(3, 1\)",
        ),
        ([1], "a: rows of the optimizer is a list, no tensor or number"),
    ):
        state["rows"] = value
        with pytest.raises(PlanError, match=says):
            CheckpointState(net, optimizer).state_dict()
    state["rows"] = 3
    assert CheckpointState(net, optimizer).state_dict()["optim"]["state"]["a"] == {"rows": 3}
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(7))]})
    with pytest.raises(PlanError, match=r"parameter 0 of a group .* of shape \(7,\), is none that"):
        CheckpointState(net, optimizer).state_dict()
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got dict"):
        CheckpointState(net, {})  # type: ignore[arg-type]


def test_views_are_described_again_where_the_owner_has_changed(tmp_path: Path) -> None:
    net = _Net(a=torch.ones(2))

    def describe() -> list[CheckpointView]:
        size = net.a.numel()
        return [CheckpointView("w", (size,), (intervals.whole(size),), net.a.data)]

    state = CheckpointState(CheckpointViews(describe, net))
    state.state_dict()
    net.a = torch.nn.Parameter(torch.full((3,), 5.0))
    dcp.save({"app": state}, checkpoint_id=tmp_path, no_dist=True)
    plain = {"app": {"model": {"w": torch.zeros(3)}}}
    dcp.load(plain, checkpoint_id=tmp_path, no_dist=True)
    assert plain["app"]["model"]["w"].tolist() == [5, 5, 5]


def test_modules_hear_that_their_weights_are_others(tmp_path: Path) -> None:
    class Cached(_Net):
        def refresh_cache(self) -> None:
            self.total = self.a.sum().item()

    _save(_Net(a=torch.ones(3)), tmp_path)
    net = Cached(a=torch.zeros(3))
    _load(net, tmp_path)
    assert net.total == 3


def test_parts_of_a_larger_storage_are_written_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacked = torch.arange(24.0).view(4, 3, 2).bfloat16()
    views = [
        CheckpointView(f"experts.{i}", (3, 2), tuple(map(intervals.whole, (3, 2))), stacked[i])
        for i in range(4)
    ]
    state = CheckpointState(CheckpointViews(views))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a tensor was copied")

    monkeypatch.setattr(torch.Tensor, "clone", refuse)
    dcp.save({"app": state}, checkpoint_id=tmp_path, no_dist=True)
    monkeypatch.undo()
    expected = stacked.clone()
    stacked.zero_()
    dcp.load({"app": state}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(stacked, expected)


def test_state_of_a_fused_parameter_is_cut_as_it_is(tmp_path: Path) -> None:
    net = _Net(fused=torch.zeros(4, 2))
    rows = (intervals.whole(2),) * 2
    halves = {"gate": net.fused.data[:2], "up": net.fused.data[2:]}
    views = [CheckpointView(name, (2, 2), rows, half) for name, half in halves.items()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.5)
    net.fused.grad = torch.arange(8.0).view(4, 2)
    optimizer.step()
    state = CheckpointState(CheckpointViews(views, net), optimizer)
    dcp.save(state.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    found = {"optim": {"state": {"up": {"momentum_buffer": torch.zeros(2, 2)}}}}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert found["optim"]["state"]["up"]["momentum_buffer"].tolist() == [[4, 5], [6, 7]]


class _Experts(torch.nn.Module):
    def __init__(self, context: RankContext, **attributes: Any) -> None:
        super().__init__()
        self.pg_collection = Parallelism(2, ep=2).groups(context.rank_idx)
        self.up = torch.nn.Parameter(torch.ones(2, 3))
        self.up.allreduce = False  # type: ignore[attr-defined]
        for name, value in attributes.items():
            setattr(self.up, name, value)


def test_experts_that_do_not_say_where_they_lie_are_refused() -> None:
    def run(context: RankContext) -> str:
        return error_of(
            lambda: CheckpointState(_Experts(context), group=context.group).state_dict()
        )

    for text in threads(run, 2):
        assert "up: rank 0 holds some of the experts in shape (2, 3)" in text
        assert "state expert_dim" in text

    def whole(context: RankContext) -> tuple[int, ...]:
        model = _Experts(context, expert_dim=0)
        state = CheckpointState(model, group=context.group).state_dict()
        return tuple(state["model"]["up"].shape)

    assert threads(whole, 2) == [(4, 3)] * 2


def test_options_that_ranks_do_not_share_are_named() -> None:
    def run(context: RankContext) -> str:
        model = _Experts(context, expert_dim=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5 + context.rank_idx)
        return error_of(lambda: CheckpointState(model, optimizer, context.group).state_dict())

    for text in threads(run, 2):
        assert "up: lr of the optimizer is 0.5 on rank 0 and 1.5 on rank 1" in text


def test_a_chunked_tensor_is_for_nothing_else() -> None:
    tensor = ChunkedTensor((4, 2), torch.float32, [(1, 0)], [torch.ones(2, 2)])
    assert repr(tensor) == "ChunkedTensor((4, 2), torch.float32, [(1, 0)+(2, 2)])"
    with pytest.raises(NotImplementedError, match="a ChunkedTensor is only for"):
        tensor + 1


def test_slots_beyond_those_of_the_placement() -> None:
    slots = torch.arange(3.0).view(3, 1)
    views = list(placed_views("w", slots, Placement([[1, -1], [0]], 2), 0))
    assert [(view.dims[0], view.tensor.tolist()) for view in views] == [(((1, 0, 1),), [[0.0]])]
    with pytest.raises(
        ValueError, match=r"w: rank 0 has 2 slots of the placement, got .* \(1, 1\)"
    ):
        list(placed_views("w", slots[:1], Placement([[1, -1], [0]], 2), 0))

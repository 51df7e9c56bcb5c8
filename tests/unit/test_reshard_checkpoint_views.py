"""Refits between sides that say in a checkpoint's own names what they hold."""

from __future__ import annotations

import random
import re
import sys
import types
from typing import Any

import pytest
import torch

from moe_comm.resharding import (
    Refit,
    ReshardTransform,
    build_local_reshard_plan,
    execute_reshard_plan,
    format_plan,
    get_or_create_service,
    is_stale,
    verify_refit,
)
from moe_comm.resharding.describe.checkpoint_views import (
    CheckpointView,
    CheckpointViews,
    unique_names,
)
from moe_comm.resharding.describe.intervals import Interval, whole
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.resharding.move.sources import piece_of
from moe_comm.resharding.plan.joined_pieces import strides_in
from moe_comm.resharding.plan.plan_check import verify_plans
from moe_comm.resharding.plan.planner import build_plan_from_rank_metadata
from moe_comm.resharding.plan.rank_metadata import (
    RankMetadata,
    decode_rank_metadata,
    encode_rank_metadata,
)
from moe_comm.testing import RankContext
from tests.helpers.checkpoint_layouts import (
    DrawnSide,
    drawn_finer,
    drawn_shapes,
    drawn_wholes,
)
from tests.helpers.threaded_refits import count_plans, error_of, threads

pytestmark = pytest.mark.usefixtures("no_refit_caches")


def view(name: str, tensor: torch.Tensor, shape: Any = None, **starts: int) -> CheckpointView:
    """A view that holds, of dimension `d0` and so on, what begins at an index; else from 0."""
    shape = tuple(tensor.shape) if shape is None else shape
    dims = tuple(
        (Interval(starts.get(f"d{dim}", 0), 0, size),) for dim, size in enumerate(tensor.shape)
    )
    return CheckpointView(name, shape, dims, tensor)


def metadata_of(views: Any, rank: int, *, is_written: bool = False) -> RankMetadata:
    side = CheckpointViews(views)
    metas = side.metadata(rank, is_written=is_written)
    return decode_rank_metadata(encode_rank_metadata(metas, side.ties()))


def draw(seed: int) -> tuple[int, dict[str, tuple[int, ...]], DrawnSide, DrawnSide]:
    """Ranks, shapes, and both sides."""
    rng = random.Random(seed)
    shapes, num_ranks = drawn_shapes(rng), rng.randint(1, 4)
    dtypes = rng.choice([(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
    finer, grains = drawn_finer(rng, shapes)
    options: list[dict[str, Any]] = rng.choice(
        [[{}, {}], [{"finer": finer}, {"grains": grains}], [{"grains": grains}, {"finer": finer}]]
    )
    source = DrawnSide(rng, shapes, num_ranks, dtypes[0], **options[0])
    target = DrawnSide(rng, shapes, num_ranks, dtypes[1], **options[1])
    return num_ranks, shapes, source, target


# ---------------------------------------------------------------------------------------------
# Against dense tensors.


@pytest.mark.parametrize("seed", range(60))
def test_plans_between_drawn_layouts_move_what_dense_tensors_say(seed: int) -> None:
    num_ranks, shapes, source, target = draw(seed)
    ranks = range(num_ranks)
    by_rank = [
        (metadata_of(source.views[r], r), metadata_of(target.views[r], r, is_written=True))
        for r in ranks
    ]
    plans = {r: build_plan_from_rank_metadata(by_rank, r) for r in ranks}
    verify_plans(plans)
    wholes = drawn_wholes(shapes, torch.float32, seed)
    sides = [[CheckpointViews(side.views[r]) for r in ranks] for side in (source, target)]
    tensors = [[views.state().tensors for views in some] for some in sides]
    for r in ranks:
        source.fill(r, wholes)
    sends = {
        (op.peer_rank, op.task_id): piece_of(tensors[0][r][op.param_name], op)
        for r, plan in plans.items()
        for op in plan.send_ops
    }
    for r, plan in plans.items():
        for op in plan.recv_ops:
            place = piece_of(tensors[1][r][op.param_name], op)
            place.copy_(sends.pop((r, op.task_id)))
    assert sends == {}
    for r in ranks:
        assert target.wrong(r, wholes) == []


@pytest.mark.parametrize("seed", range(100, 112))
@pytest.mark.parametrize("verify", ["plan", "checksum"])
def test_refits_between_drawn_layouts(seed: int, verify: Any) -> None:
    num_ranks, shapes, source, target = draw(seed)

    def rank(context: RankContext) -> None:
        me = context.rank_idx
        sides = [CheckpointViews(side.views[me]) for side in (source, target)]
        held = Refit(*sides, "symmetric", context.group, verify=verify, strict=True)
        for round_idx in range(3):
            wholes = drawn_wholes(shapes, torch.float32, seed + round_idx)
            source.fill(me, wholes)
            held.run()
            assert target.wrong(me, wholes) == []

    threads(rank, num_ranks)


# ---------------------------------------------------------------------------------------------
# Modules on the other side, owners, and several places of one name.


class Fused(torch.nn.Module):
    """An engine's layer: q and k fused, and a cache of what it derives."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(8, 3))
        self.num_refreshes = 0

    def refresh_cache(self) -> None:
        self.num_refreshes += 1

    def views(self) -> list[CheckpointView]:
        return [view("q.weight", self.qk.data[:4]), view("k.weight", self.qk.data[4:])]


def named_module(context: RankContext, value: float) -> torch.nn.Module:
    module = torch.nn.Module()
    for name in "qk":
        child = torch.nn.Linear(3, 4, bias=False)
        torch.nn.init.constant_(child.weight, value + (name == "k"))
        module.add_module(name, child)
    module.pg_collection = Parallelism(context.num_ranks).groups(context.rank_idx)
    return module


@pytest.mark.parametrize("to_views", [True, False])
def test_views_meet_a_module_of_the_same_names(to_views: bool) -> None:
    def rank(context: RankContext) -> None:
        module, fused = named_module(context, 1.0), Fused()
        views = CheckpointViews(fused.views, fused)
        pair = (module, views) if to_views else (views, module)
        held = Refit(*pair, "symmetric", context.group, verify="checksum", strict=True)
        for round_idx in range(3):
            expected = torch.full((8, 3), 10.0 + round_idx)
            expected[4:] += 1
            with torch.no_grad():
                (module.q.weight if to_views else fused.qk[:4]).copy_(expected[:4])
                (module.k.weight if to_views else fused.qk[4:]).copy_(expected[4:])
            held.run()
            found = fused.qk if to_views else torch.cat([module.q.weight, module.k.weight])
            assert torch.equal(found, expected)
            assert fused.num_refreshes == (round_idx + 1 if to_views else 0)

    threads(rank, 2)


def test_an_owner_that_moves_its_tensors_is_described_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans_made = count_plans(monkeypatch)

    def rank(context: RankContext) -> None:
        module, fused = named_module(context, 1.0), Fused()
        held = Refit(module, CheckpointViews(fused.views, fused), "symmetric", context.group)
        held.run()
        if context.rank_idx == 1:
            fused.qk.data = torch.zeros(8, 3)
        held.run()
        assert torch.equal(fused.qk[4:], module.k.weight)
        assert len(plans_made) == 2  # the same plan, in other memory
        fused.qk.data = torch.zeros(3, 8).T
        held.run()
        assert torch.equal(fused.qk[4:], module.k.weight)

    threads(rank, 2)
    assert len(plans_made) == 4  # other strides


def test_fixed_views_of_an_owner_that_moved_are_refused() -> None:
    def rank(context: RankContext) -> str:
        module, fused = named_module(context, 1.0), Fused()
        held = Refit(module, CheckpointViews(fused.views(), fused), "symmetric", context.group)
        fused.register_buffer("unrelated", torch.zeros(2))
        held.run()
        if context.rank_idx == 1:
            fused.qk.data = torch.zeros(8, 3)
        return error_of(held.run)

    for text in threads(rank, 2):
        assert text.startswith("ValueError: ")
        assert "checkpoint views of q.weight and 1 others are not where they were" in text
        assert text.count("rank 1") == 1 or "their owner holds other tensors" in text


class FewExperts(torch.nn.Module):
    """Two of four experts, as an engine's loader finds them by a map: the local number of each, -1 elsewhere."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.experts = torch.nn.Parameter(torch.zeros(2, 3))
        self.layer = torch.nn.Module()
        expert_map = torch.full((4,), -1)
        expert_map[first : first + 2] = torch.arange(2)
        self.layer.expert_map_manager = types.SimpleNamespace(expert_map=expert_map)  # type: ignore[assignment]
        self.layer.router = types.SimpleNamespace(  # type: ignore[assignment]
            eplb_state=types.SimpleNamespace(logical_to_physical_map=None)
        )

    def views(self) -> list[CheckpointView]:
        places: Any = self.layer.expert_map_manager.expert_map  # type: ignore[union-attr]
        return [
            view(f"{expert_idx}.weight", self.experts[place])
            for expert_idx, place in enumerate(places.tolist())
            if place >= 0
        ]


def refit_of_few_experts(
    context: RankContext, *, is_fixed: bool = False
) -> tuple[FewExperts, Refit]:
    source = [view(f"{idx}.weight", torch.full((3,), float(idx))) for idx in range(4)]
    engine = FewExperts(2 * context.rank_idx)
    described = engine.views() if is_fixed else engine.views
    return engine, Refit(
        CheckpointViews(source), CheckpointViews(described, engine), "symmetric", context.group
    )


def test_views_follow_the_map_of_an_engine_whose_experts_have_moved() -> None:
    def rank(context: RankContext) -> None:
        engine, held = refit_of_few_experts(context)
        held.run()
        mine = 2.0 * context.rank_idx
        assert engine.experts.tolist() == [[mine] * 3, [mine + 1] * 3]
        manager: Any = engine.layer.expert_map_manager
        if context.rank_idx == 1:
            manager.expert_map.copy_(torch.tensor([1, -1, -1, 0]))  # in place, as engines do
        held.run()
        expected = [3.0, 0.0] if context.rank_idx == 1 else [0.0, 1.0]
        assert engine.experts[:, 0].tolist() == expected
        manager.expert_map = torch.tensor([-1, -1, 0, 1])
        held.run()
        assert engine.experts[:, 0].tolist() == [2.0, 3.0]

    threads(rank, 2)


def test_views_that_cannot_follow_a_map_are_refused() -> None:
    def rank(context: RankContext, how: str) -> str:
        engine, held = refit_of_few_experts(context, is_fixed=how == "fixed")
        held.run()
        if context.rank_idx == 1 and how == "fixed":
            engine.layer.expert_map_manager.expert_map[0] = 1  # type: ignore[union-attr, operator, index]
        elif context.rank_idx == 1:
            state: Any = engine.layer.router.eplb_state  # type: ignore[union-attr]
            state.logical_to_physical_map = torch.tensor([[2], [0], [1], [3]])
        return error_of(held.run)

    for how, wanted in (
        (
            "fixed",
            r"layer: its expert map was \[-1, -1, 0, 1\] when .*, and is \[1, -1, 0, 1\]: make",
        ),
        (
            "balanced",
            r"layer: its expert map was None when .*, and is \[\[2\], .*loader keeps the first",
        ),
    ):
        for text in threads(rank, 2, how):
            assert re.search(rf"rank 1.*{wanted}", text) or re.search(wanted, text), text


def test_views_follow_the_map_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    places = torch.tensor([[1, 0]])
    metadata = types.SimpleNamespace(physical_to_logical_map_cpu=places)
    location: Any = types.ModuleType("sglang.srt.eplb.expert_location")
    location.get_global_expert_location_metadata = lambda: metadata
    monkeypatch.setitem(sys.modules, location.__name__, location)
    experts = torch.zeros(2, 3)
    side = CheckpointViews(
        lambda: [
            view(f"{expert}.w", experts[slot]) for slot, expert in enumerate(places[0].tolist())
        ],
        torch.nn.Linear(1, 1),
    )
    first = side.state()
    assert side.state() is first
    places.copy_(torch.tensor([[0, 1]]))
    assert side.state() is not first
    assert [each.name for each in side.views] == ["0.w", "1.w"]


def test_storage_without_a_module_is_watched_too() -> None:
    def rank(context: RankContext) -> str:
        flat = torch.zeros(24)
        views = [view("q.weight", flat[:12].view(4, 3)), view("k.weight", flat[12:].view(4, 3))]
        held = Refit(named_module(context, 5.0), CheckpointViews(views), "symmetric", context.group)
        held.run()
        assert torch.equal(flat, torch.tensor([5.0] * 12 + [6.0] * 12))
        if context.rank_idx == 1:
            flat.untyped_storage().resize_(0)
        return error_of(held.run)

    for text in threads(rank, 2):
        assert "are not where they were" in text


def test_a_failed_refit_marks_the_owner_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(context: RankContext) -> None:
        module, fused = named_module(context, 1.0), Fused()
        views = CheckpointViews(fused.views, fused)
        held = Refit(module, views, "symmetric", context.group)

        def fail() -> None:
            raise ArithmeticError("no cache")

        fused.refresh_cache = fail  # type: ignore[method-assign]
        assert "no cache" in error_of(held.run)
        assert is_stale(fused)
        assert is_stale(views)
        assert "stale and must not be read" in error_of(
            lambda: Refit(views, module, "symmetric", context.group)
        )
        del fused.refresh_cache
        held.run()
        assert not is_stale(views)

    threads(rank, 1)


def test_one_memory_under_two_names_is_received_once_and_must_be_one_in_the_source() -> None:
    def rank(context: RankContext, *, is_one: bool) -> Any:
        embedding, output = torch.full((4, 3), 2.0), torch.full((4, 3), 3.0)
        source = [view("embed", embedding), view("head", embedding if is_one else output)]
        table = torch.zeros(4, 3)
        target = [view("embed", table), view("head", table)]
        pair = CheckpointViews(source), CheckpointViews(target)
        text = error_of(lambda: Refit(*pair, "symmetric", context.group, strict=True).run())
        return text, table.sum().item()

    assert threads(lambda context: rank(context, is_one=True), 2) == [("", 24.0)] * 2
    for text, total in threads(lambda context: rank(context, is_one=False), 2):
        assert "embed and head are one tensor on destination rank 0, but apart" in text
        assert total == 0


@pytest.mark.parametrize("num_dims", [8, 9, 11])
def test_views_of_more_dimensions_than_are_copied_with_strides(num_dims: int) -> None:
    """A join would be of one dimension more, and reversed ones cannot be merged."""
    sources = torch.arange(3.0 * 2**num_dims).view(3, *[2] * num_dims)
    targets = torch.zeros_like(sources).permute(0, *range(num_dims, 0, -1))

    def rank(context: RankContext) -> None:
        me = context.rank_idx
        side = [view(f"w{i}", tensor) for i, tensor in enumerate((sources, targets)[me])]
        pair = (None, CheckpointViews(side)) if me else (CheckpointViews(side), None)
        held = Refit(*pair, "symmetric", context.group, verify="checksum")
        for _ in range(2):
            if me:
                targets.fill_(-1)
            held.run()
            assert not me or torch.equal(targets, sources)

    threads(rank, 2)


def test_one_memory_of_a_source_is_sent_under_each_of_its_names() -> None:
    def rank(context: RankContext) -> None:
        table = torch.arange(12.0).view(4, 3)
        targets = torch.zeros(2, 4, 3)
        names = ("embed", "head")
        pair = [view(name, table) for name in names], list(map(view, names, targets))
        Refit(*map(CheckpointViews, pair), "symmetric", context.group, strict=True).run()
        assert torch.equal(targets, table.expand(2, 4, 3))

    threads(rank, 2)


def test_columns_between_each_other_are_joined_as_far_as_strides_say_that_they_are_apart() -> None:
    starts = (
        1,
        120,
        121,
        240,
    )  # with rows 2 apart: pairs lie equally far, and both pairs as one do not tell

    def rank(context: RankContext) -> None:
        columns = torch.arange(4 * 60.0).view(4, 60)
        storage = torch.full((360,), -1.0)
        targets = [storage.as_strided((60,), (2,), start) for start in starts]
        sides = [
            CheckpointViews(list(map(view, "abcd", tensors))) for tensors in (columns, targets)
        ]
        Refit(*sides, "symmetric", context.group, strict=True).run()
        assert all(map(torch.equal, targets, columns))
        assert int((storage == -1).sum()) == 360 - 240

    threads(rank, 1)


@pytest.mark.parametrize("first", [(0, (1, 4)), (24, (4, 1))], ids=["strides", "offset"])
def test_views_that_are_cut_anew_in_one_storage(first: Any) -> None:
    """Storage, shapes and indices of two joined views are as they were."""

    def rank(context: RankContext) -> None:
        places: list[Any] = [(0, (4, 1)), (40, (4, 1))]
        flat = torch.zeros(60)

        def describe() -> list[CheckpointView]:
            return [
                view(name, flat.as_strided((4, 4), strides, offset))
                for name, (offset, strides) in zip("ab", places, strict=True)
            ]

        owner = torch.nn.Linear(1, 1)
        source = torch.arange(32.0).view(2, 4, 4)
        pair = CheckpointViews(map(view, "ab", source)), CheckpointViews(describe, owner)
        held = Refit(*pair, "symmetric", context.group)
        held.run()
        places[0] = first
        owner.bias = torch.nn.Parameter(torch.zeros(1))
        flat.zero_()
        held.run()
        for each, expected in zip(describe(), source, strict=True):
            assert torch.equal(each.tensor, expected)

    threads(rank, 2)


class Doubled(ReshardTransform):
    """Sends twice the values of some views, which it receives in buffers of its own."""

    def __init__(self, targets: list[CheckpointView]) -> None:
        self.targets = {each.name: each.tensor for each in targets}

    def should_transform(self, param_name: str) -> bool:
        return param_name in self.targets

    def prepare_send(self, param_name: str, src_slice: Any, src_param: Any) -> list[torch.Tensor]:
        return [src_param[src_slice] * 2]

    def prepare_recv(self, param_name: str, dst_slice: Any) -> list[torch.Tensor]:
        return [torch.empty_like(self.targets[param_name][dst_slice])]

    def finalize_recv(self, param_name: str, dst_slice: Any, recv_buffers: Any) -> None:
        assert recv_buffers[0].shape == (3, 2)  # a piece is not cut
        self.targets[param_name][dst_slice].copy_(recv_buffers[0])


@pytest.mark.parametrize("limit", [None, 30])
def test_views_that_a_transform_makes_are_not_joined(limit: int | None) -> None:
    def rank(context: RankContext) -> None:
        stacks = torch.ones(6, 3, 2), torch.zeros(6, 3, 2)
        source, target = ([view(f"w{i}", each) for i, each in enumerate(some)] for some in stacks)
        held = Refit(
            CheckpointViews(source),
            CheckpointViews(target),
            "symmetric",
            context.group,
            transform=Doubled(target[:4]),
            execution_batch_bytes=limit,
        )
        for _ in range(2):
            stacks[1].zero_()
            held.run()
            assert stacks[1][:, 0, 0].tolist() == [2, 2, 2, 2, 1, 1]

    threads(rank, 1)


# ---------------------------------------------------------------------------------------------
# What is wrong is said on every rank, before anything moves.


def refused(source: Any, target: Any, **options: Any) -> list[str]:
    """Errors of both ranks, given what each holds of both sides."""

    def rank(context: RankContext) -> str:
        me = context.rank_idx
        written = [each.tensor.clone() for each in target[me]]
        text = error_of(
            lambda: Refit(
                CheckpointViews(source[me]),
                CheckpointViews(target[me]),
                "symmetric",
                context.group,
                **options,
            ).run()
        )
        assert text.startswith("PlanError: ")
        assert all(
            torch.equal(each.tensor, values)
            for each, values in zip(target[me], written, strict=True)
        )
        return text

    return threads(rank, 2)


def test_a_name_that_no_source_has() -> None:
    source = [[view("w", torch.ones(2, 2))], []]
    target = [[view("w", torch.zeros(2, 2))], [view("v", torch.zeros(2, 2))]]
    for text in refused(source, target):
        assert "Destination parameter 'v' on rank 1 not found in source model" in text


def test_a_name_that_no_target_takes_is_an_error_where_strict() -> None:
    source = [[view("w", torch.ones(2, 2))], [view("v", torch.ones(2, 2))]]
    target = [[view("w", torch.zeros(2, 2))]] * 2
    for text in refused(source, target, strict=True):
        assert "source parameter 'v' on rank 1 has no destination" in text


def test_another_shape_and_a_transposed_one() -> None:
    target = [[view("w", torch.zeros(4, 6))], []]
    for text in refused([[], [view("w", torch.ones(4, 5))]], target):
        assert "w: shapes do not add up: source rank 1 holds (4, 5) (a view) of (4, 5)" in text
        assert "target rank 0 holds (4, 6) (a view) of (4, 6)" in text
    for text in refused([[], [view("w", torch.ones(6, 4))]], target):
        assert "of (6, 4)" in text
        assert "of (4, 6)" in text


def finer(disk_shape: tuple[int, ...], shape: tuple[int, ...]) -> CheckpointView:
    tensor = torch.arange(48.0).view(shape)
    return CheckpointView("w", shape, tuple(map(whole, shape)), tensor, disk_shape)


@pytest.mark.parametrize("shape", [(2, 4, 6), (2, 24)])
def test_another_shape_on_disk_with_a_common_finer_view(shape: tuple[int, ...]) -> None:
    """As many elements, and a view of both is one of each: only the disk shapes tell."""
    source = [[], [finer((8, 6), (2, 4, 6))]]
    target = [[finer((2, 24), (2, 4, 6))] if shape == (2, 4, 6) else [view("w", torch.ones(shape))]]
    for text in refused(source, [*target, []]):
        assert "w: shapes do not add up: source rank 1 holds (2, 4, 6) (a view) of (8, 6); " in text
        assert f"target rank 0 holds {shape} (a view) of (2, 24)" in text


def test_a_module_of_another_shape_than_that_on_disk() -> None:
    def rank(context: RankContext) -> str:
        target = torch.nn.Module()
        target.register_parameter("w", torch.nn.Parameter(torch.zeros(2, 24)))
        target.pg_collection = Parallelism(2).groups(context.rank_idx)
        source = CheckpointViews([finer((8, 6), (2, 4, 6))])
        return error_of(lambda: build_local_reshard_plan(source, target, group=context.group))

    for text in threads(rank, 2):
        assert (
            "source rank 0 holds (2, 4, 6) (a view) of (8, 6); target rank 0 holds (2, 24)" in text
        )


@pytest.mark.parametrize("disk_shape", [(8, 6), (48,), (2, 4, 6), (2, 4, 2, 3)])
def test_a_finer_view_of_the_other_side_is_the_same_tensor(disk_shape: tuple[int, ...]) -> None:
    def rank(context: RankContext) -> bool:
        source = finer((8, 6), (2, 4, 6))
        target = view("w", torch.zeros(disk_shape))
        sides = CheckpointViews([source]), CheckpointViews([target])
        Refit(*sides, "symmetric", context.group, verify="checksum").run()
        return torch.equal(target.tensor.flatten(), source.tensor.flatten())

    assert threads(rank, 2) == [True, True]


@pytest.mark.parametrize("first", ["w", "w (view 2)", "w (view 2) (view 2)"])
def test_names_that_end_like_the_labels_of_views(first: str) -> None:
    """Every tensor gets its own, whatever it is called and in whichever order it is named."""
    names = ["w", "w", "w (view 2)", "w (view 2)", "w (view 2) (view 2)", "w (view 1)"]
    names.sort(key=lambda name: name != first)
    assert len(set(unique_names(names))) == len(names)

    def rank(context: RankContext) -> bool:
        numbers = {name: float(number) for number, name in enumerate(sorted(set(names)))}
        source = [view(name, torch.full((3,), numbers[name])) for name in dict.fromkeys(names)]
        # Of the label that one rank has for a view, the other has a tensor.
        mine = names if context.rank_idx == 0 else [name for name in names if "(" in name]
        target = [view(name, torch.zeros(3)) for name in mine]
        sides = CheckpointViews(source), CheckpointViews(target)
        Refit(*sides, "symmetric", context.group, verify="checksum").run()
        return all(torch.equal(v.tensor, torch.full((3,), numbers[v.name])) for v in target)

    assert threads(rank, 2) == [True, True]


def test_elements_that_no_source_holds() -> None:
    ones = torch.ones(4, 6)
    source = [
        [view("w", ones[:2], (4, 6))],
        [view("w", ones[2:, :2], (4, 6), d0=2), view("w", ones[2:, 3:], (4, 6), d0=2, d1=3)],
    ]
    target = [[], [view("w", torch.zeros(4, 6))]]
    for text in refused(source, target):
        assert "no source rank holds elements [[2, 4], [2, 3]] of the whole tensor" in text
        assert "which rank 1 needs" in text


def test_a_dtype_that_does_not_become_the_other() -> None:
    source = [[view("w", torch.ones(2, 2))], []]
    target = [[], [view("w", torch.zeros(2, 2, dtype=torch.int32))]]
    for text in refused(source, target):
        assert "rank 0 holds torch.float32, which does not become the torch.int32 of rank 1" in text


def test_destinations_that_share_bytes() -> None:
    source = [[view("w", torch.ones(4, 2)), view("v", torch.ones(4, 2))], []]
    table = torch.zeros(4, 3)
    target = [[], [view("w", table[:, :2]), view("v", table[:, 1:])]]
    for text in refused(source, target):
        assert "destination parameters w and v overlap in memory" in text


@pytest.mark.parametrize("strides", [(0, 1), (1, 1)])
def test_a_destination_with_two_elements_in_one_place(strides: tuple[int, ...]) -> None:
    source = [[view("v", torch.ones(4, 2)), view("w", torch.ones(4, 2))], []]
    twice = torch.zeros(8).as_strided((4, 2), strides)
    target = [[], [view("v", torch.zeros(4, 2)), view("w", twice)]]
    text = f"destination parameter w has two elements in one place: shape (4, 2), strides {strides}"
    for said in refused(source, target, execution_batch_bytes=64):
        assert text in said


@pytest.mark.parametrize("name", ["", "a\nb"])
def test_a_name_that_is_no_line(name: str) -> None:
    source = [[view("w", torch.ones(2, 2))], [view(name, torch.ones(2))]]
    target = [[view("w", torch.zeros(2, 2))], []]
    for text in refused(source, target):
        assert f"{name!r} is no name of a parameter" in text
        assert "seen by rank 1" in text


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        ((whole(2), whole(4)), "cannot be a view of shape"),
        ((whole(2), (Interval(1, 0, 3),)), r"indices \[1, 4\) of dimension 1 are not in a tensor"),
        (
            (whole(2), (Interval(0, 0, 1), Interval(1, 2, 2))),
            "lie at 2 of the view, after 1 others",
        ),
        (
            (whole(2), (Interval(0, 0, 2), Interval(1, 2, 1))),
            "index 1 of dimension 1 is held twice",
        ),
    ],
)
def test_intervals_that_are_no_view(dims: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CheckpointView("w", (2, 3), dims, torch.zeros(2, 3))


@pytest.mark.parametrize("disk_shape", [(5, 4), (4, 6)])
def test_a_disk_shape_that_the_shape_does_not_cut(disk_shape: tuple[int, ...]) -> None:
    shape = (3, 8)
    with pytest.raises(
        ValueError, match=r"w: shape \(3, 8\) does not cut .* disk_shape \(\d, \d\)"
    ):
        CheckpointView("w", shape, tuple(map(whole, shape)), torch.zeros(shape), disk_shape)


def test_what_is_no_view() -> None:
    with pytest.raises(TypeError, match="views must be CheckpointView, got 3"):
        CheckpointViews([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="w: a view must be a plain, strided tensor"):
        CheckpointViews([view("w", torch.zeros(2, 2).to_sparse())])
    with pytest.raises(ValueError, match="w: a view is a lazy conjugate or negation"):
        CheckpointViews([view("w", torch.zeros(2, 2, dtype=torch.complex64).conj())])


@pytest.mark.parametrize("limit", [None, 32, 64])
def test_views_of_one_kind_that_others_cut_differently(limit: int | None) -> None:
    """Two tensors alike on ranks 0 and 1 are seen as other shapes because of what rank 2 says."""
    tensors = [torch.arange(48.0).view(8, 6)[:, ::2] + 100 * number for number in range(2)]
    whole_targets = [torch.zeros(8, 3) for _ in range(2)]
    finer = [torch.zeros(2, 4, 3), torch.zeros(4, 2, 3)]
    names = ["a", "b"]
    target = [[], list(map(view, names, whole_targets)), list(map(view, names, finer))]

    def rank(context: RankContext) -> None:
        me = context.rank_idx
        Refit(
            None if me else CheckpointViews(map(view, names, tensors)),
            CheckpointViews(target[me]),
            "symmetric",
            context.group,
            execution_batch_bytes=limit,
        ).run()

    threads(rank, 3)
    for number, expected in enumerate(tensors):
        assert torch.equal(whole_targets[number], expected)
        assert torch.equal(finer[number].view(8, 3), expected)


# ---------------------------------------------------------------------------------------------
# Pieces in one pattern at both ends are one copy.

LAYERS, EXPERTS, INNER, HIDDEN = 2, 4, 4, 3


def experts(
    num_experts: int, first: int, *, inner: int = INNER, start: int = 0, interleaved: bool = False
) -> tuple[list[torch.Tensor], list[CheckpointView]]:
    """Storages of layers, and views of experts from `first` on, each of `inner` rows from `start` on."""
    storages, views = [], []
    for layer in range(LAYERS):
        fused = torch.zeros(num_experts, 2 * inner, HIDDEN)
        storages.append(fused)
        for expert in range(num_experts):
            for number, name in enumerate(("gate", "up")):
                rows = slice(number, None, 2) if interleaved else slice(number * inner, None)
                tensor = fused[expert, rows][:inner]
                whole_name = f"layers.{layer}.experts.{first + expert}.{name}"
                views.append(view(whole_name, tensor, (INNER, HIDDEN), d0=start))
    return storages, views


def joined_plans(sources: Any, targets: Any) -> list[Any]:
    by_rank = [
        (metadata_of(src, r), metadata_of(dst, r, is_written=True))
        for r, (src, dst) in enumerate(zip(sources, targets, strict=True))
    ]
    plans = {r: build_plan_from_rank_metadata(by_rank, r) for r in range(len(by_rank))}
    verify_plans(plans)
    return list(plans.values())


@pytest.mark.parametrize("interleaved", [False, True])
def test_experts_of_a_layer_are_one_copy(interleaved: bool) -> None:
    sources = [experts(2, 2 * rank, interleaved=interleaved)[1] for rank in range(2)]
    plans = joined_plans(sources, [[], experts(4, 0)[1]])
    assert [len(plan.send_ops) for plan in plans] == [LAYERS, LAYERS]
    assert len(plans[1].recv_ops) == 2 * LAYERS
    for op in (*plans[0].send_ops, *plans[1].recv_ops):
        assert len(op.pieces) == 2 * 2
        rows = (2, 2, INNER, HIDDEN) if interleaved else (2 * 2 * INNER * HIDDEN,)
        assert op.joined.sizes == rows
    assert "and 3 others in a pattern" in format_plan(plans[0])


def test_halves_of_experts_are_one_copy_to_each_rank() -> None:
    targets = [experts(4, 0, inner=2, start=2 * rank)[1] for rank in range(2)]
    plans = joined_plans([experts(4, 0)[1], []], targets)
    assert [(op.peer_rank, op.joined.sizes) for op in plans[0].send_ops] == [
        (rank, (8, 2 * HIDDEN)) for rank in (0, 1) for _ in range(LAYERS)
    ]


def test_pieces_of_two_dtypes_or_storages_are_not_joined() -> None:
    rows = torch.zeros(4, 2)
    target = [view(name, rows[i]) for i, name in enumerate("abcd")]
    apart = [view(name, torch.ones(2)) for name in "abcd"]
    assert len(joined_plans([apart], [target])[0].send_ops) == 4
    ones = torch.ones(4, 2)
    together = [view(name, ones[i]) for i, name in enumerate("abcd")]
    assert len(joined_plans([together], [target])[0].send_ops) == 1
    halves = ones.view(torch.bfloat16)[:, :2]
    mixed = [*together[:2], view("c", halves[2]), view("d", halves[3])]
    assert [len(op.pieces) for op in joined_plans([mixed], [target])[0].send_ops] == [2, 2]


@pytest.mark.parametrize(
    ("shape", "strides", "finer"),
    [
        ((4, 6), (12, 2), (2, 2, 3, 2)),
        ((1, 6), (99, 2), (2, 3)),
        ((6, 1), (1, 6), (1, 6, 1)),
        ((4, 1, 3), (3, 77, 1), (4, 3)),
        ((), (), ()),
    ],
)
def test_strides_of_a_finer_view_are_torch_s(shape: Any, strides: Any, finer: Any) -> None:
    tensor = torch.arange(200).as_strided(shape, strides)
    found = torch.arange(200).as_strided(finer, strides_in(shape, strides, finer))
    assert torch.equal(found, tensor.reshape(finer))


def test_what_differs_of_joined_pieces_is_named() -> None:
    def rank(context: RankContext) -> str:
        _, source = experts(4, 0)
        storages, target = experts(4, 0)
        pair = CheckpointViews(source), CheckpointViews(target)
        held = Refit(*pair, "symmetric", context.group)
        held.run()
        plan = build_local_reshard_plan(*pair, group=context.group)
        assert verify_refit(plan, *pair, context.group).num_bytes == sum(
            each.nbytes for each in storages
        )
        if context.rank_idx == 1:
            storages[1][2, 5, 1] += 1  # up of expert 2
        text = error_of(lambda: verify_refit(plan, *pair, context.group))
        assert is_stale(pair[1]) == (context.rank_idx == 1)
        return text

    for text in threads(rank, 2):
        assert "rank 1: layers.1.experts.2.up, piece 0 [0:4, 0:3], from rank 1" in text
        assert text.count("checksum") == 1


def test_a_plan_is_not_run_between_views_that_lie_elsewhere() -> None:
    def rank(context: RankContext) -> None:
        _, source = experts(4, 0)
        _, target = experts(4, 0)
        plan = build_local_reshard_plan(
            CheckpointViews(source), CheckpointViews(target), group=context.group
        )
        service = get_or_create_service("symmetric", context.group)
        spread = torch.zeros(LAYERS * EXPERTS, 2, INNER + 1, HIDDEN)
        elsewhere = [
            view(each.name, spread[i // 2, i % 2, :INNER]) for i, each in enumerate(target)
        ]
        apart = [view(each.name, each.tensor.clone()) for each in target]
        for views, text in (
            (elsewhere, "up was planned at element 12 of its storage with strides (3, 1), it lies"),
            (apart, "was planned at element"),
        ):
            side = CheckpointViews(views)
            message = error_of(
                lambda side=side: execute_reshard_plan(
                    plan, CheckpointViews(source), side, service, context.group
                )
            )
            assert text in message
            assert all(not each.tensor.any() for each in views)

    threads(rank, 1)


def test_a_transform_that_a_plan_does_not_know_is_refused() -> None:
    class OfUp(ReshardTransform):
        def should_transform(self, param_name: str) -> bool:
            return param_name.endswith("3.up")

    def rank(context: RankContext) -> None:
        pair = CheckpointViews(experts(4, 0)[1]), CheckpointViews(experts(4, 0)[1])
        plan = build_local_reshard_plan(*pair, group=context.group)
        service = get_or_create_service("symmetric", context.group)
        assert "experts.3.up is for a transform that the plan was not made with" in error_of(
            lambda: execute_reshard_plan(plan, *pair, service, context.group, OfUp())
        )

    threads(rank, 1)

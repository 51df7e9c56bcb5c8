"""Refits with deltas: blocks that changed travel, and whoever lacks what they are changes of gets the whole."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

from moe_comm.errors import RefitError
from moe_comm.peers.bootstrap import bootstrap_for
from moe_comm.resharding import (
    CheckpointView,
    CheckpointViews,
    DeltaReport,
    FP8BlockReshardTransform,
    is_stale,
    mark_stale,
    place_in_heap,
    refit,
)
from moe_comm.resharding.describe.intervals import Interval
from moe_comm.resharding.describe.intervals import whole as every
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.resharding.formats.number_formats import FP8BlockTensor
from moe_comm.resharding.hold import deltas
from moe_comm.resharding.hold.deltas import Delta, Deltas
from moe_comm.testing import RankContext
from tests.helpers.checkpoint_layouts import DrawnSide, drawn_wholes, part_of
from tests.helpers.sharded_nets import ShardedNet, whole
from tests.helpers.threaded_refits import error_of, nets, threads

BLOCK = 1 << 16
SHAPES: Any = {
    "embedding": ((1200, 320), 0),
    "up": ((1536, 320), 0),
    "down": ((320, 1536), 1),
    "norm": ((40000,), None),
    "scale": ((), None),
}

pytestmark = pytest.mark.usefixtures("no_refit_caches")


def wait_for_all(context: RankContext) -> None:
    assert context.group is not None
    bootstrap_for(context.group).all_gather(None)


class Run:
    """A refit with deltas on one rank, and what it must bring."""

    def __init__(
        self, context: RankContext, src: str, dst: str, method: str = "symmetric", **options: Any
    ) -> None:
        self.shapes = options.pop("shapes", SHAPES)
        self.source, self.target = nets(context, src, dst, shapes=self.shapes)
        self.source.fill(0)
        self.wholes = {name: whole(name, shape, 0) for name, (shape, _) in self.shapes.items()}
        if options.pop("in_heap", False):
            service = refit.get_or_create_service(method, context.group)
            place_in_heap(self.target, service.communicator)
        options = {"deltas": "blocks", **options}
        self.refit = refit.Refit(self.source, self.target, method, context.group, **options)

    @torch.no_grad()
    def change(self, name: str, index: Any, value: float) -> None:
        """Change an element of the whole model: on every rank the same."""
        self.wholes[name][index] = value
        self.give(self.source, name)

    def part(self, net: ShardedNet, name: str) -> torch.Tensor:
        full, dim = self.wholes[name], self.shapes[name][1]
        return full if dim is None else full.chunk(net.tp_size, dim)[net.tp_rank]

    @torch.no_grad()
    def give(self, net: ShardedNet, name: str) -> None:
        net.get_parameter(name).copy_(self.part(net, name))

    def run(self, changed: Any = None) -> DeltaReport:
        self.refit.run(changed=changed)
        assert self.wrong() == []
        assert not is_stale(self.target)
        assert self.refit.last_delta is not None
        return self.refit.last_delta

    def wrong(self) -> list[str]:
        return [
            name
            for name in self.shapes
            if not torch.equal(
                self.target.get_parameter(name).float(), self.part(self.target, name)
            )
        ]


def change_and_run(context: RankContext, layouts: tuple[str, str], seed: int, options: Any) -> None:
    run = Run(context, *layouts, **options)
    report = run.run()
    assert set(report.whole.values()) == {"it holds nothing of an earlier refit"}
    assert report.sent_bytes == report.total_bytes
    draw = random.Random(seed)
    for _ in range(4):
        names = draw.sample(list(SHAPES), draw.randrange(4))
        for name in names:
            shape = SHAPES[name][0]
            run.change(name, tuple(draw.randrange(size) for size in shape), draw.randrange(-99, 99))
        report = run.run()
        assert report.whole == {}
        # A changed element is in one block of every piece that has it.
        replicas = 4 * context.num_ranks
        assert report.num_changed <= len(names) * replicas
        assert report.sent_bytes <= report.num_changed * BLOCK < report.total_bytes
        assert (report.num_changed > 0) >= (report.sent_bytes > 0)


@pytest.mark.parametrize("verify", [None, "checksum"])
@pytest.mark.parametrize("deltas", ["blocks", "checked"])
@pytest.mark.parametrize("in_heap", [True, False])
@pytest.mark.parametrize(
    "layouts", [("tp2", "tp4"), ("tp4", "single"), ("single", "tp2"), ("tp4", "tp4")]
)
def test_changed_blocks_arrive(
    layouts: tuple[str, str], in_heap: bool, deltas: str, verify: str | None
) -> None:
    options = {"in_heap": in_heap, "deltas": deltas, "verify": verify}
    threads(change_and_run, 4, layouts, hash(layouts) % 1000, options)


def test_nothing_changed_moves_nothing() -> None:
    def body(context: RankContext) -> None:
        run = Run(context, "tp2", "single")
        run.run()
        report = run.run()
        assert (report.sent_bytes, report.num_changed, report.whole) == (0, 0, {})
        assert report.num_blocks > 40
        assert report.undivided == ()

    threads(body, 2)


def test_much_changed_goes_to_its_place_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "_MOST_BYTES", BLOCK)

    def body(context: RankContext) -> None:
        run = Run(context, "tp2", "single")
        run.run()
        run.wholes = {name: values + 1 for name, values in run.wholes.items()}
        run.wholes = {name: values.bfloat16().float() for name, values in run.wholes.items()}
        for name in SHAPES:
            run.give(run.source, name)
        report = run.run()
        assert len(report.whole) == 4
        assert all("bytes changed" in why for why in report.whole.values())

    threads(body, 2)


def test_memory_beside_the_target_is_bounded() -> None:
    def body(context: RankContext) -> None:
        run = Run(context, "tp2", "single", execution_batch_bytes=100_000)
        run.run()
        run.change("up", (5, 5), 7.0)
        report = run.run()
        for why in report.whole.values():
            assert re.fullmatch(
                r"\d+ bytes changed, of which 25000 may wait beside the target", why
            )
        assert report.whole.keys() == {(0, 0), (0, 1)}

    threads(body, 2)


def spoil(run: Run, what: str) -> str:
    """Have the target hold something else; returns what refits say of it."""
    up = run.target.up
    if what == "written":
        with torch.no_grad():
            up[3, 3] = 0.5
        return "something else has written its target since"
    if what == "replaced":
        up.data = torch.zeros_like(up)
        return "its tensors are others, or lie elsewhere, than after the last refit"
    if what == "marked":
        mark_stale(run.target, "by hand")
        return "something else has written its target since"
    assert what == "flipped"
    up.data.view(torch.uint8).numpy()[7, 7] ^= 4
    return "it does not hold what was sent to it"


@pytest.mark.parametrize("verify", [None, "checksum"])
@pytest.mark.parametrize("what", ["written", "replaced", "marked", "flipped"])
def test_who_holds_something_else_gets_the_whole(what: str, verify: Any) -> None:
    def body(context: RankContext) -> None:
        run = Run(context, "tp2", "tp2", deltas="checked", verify=verify)
        run.run()
        run.change("norm", (5,), 7.0)
        why = spoil(run, what) if context.rank_idx == 1 else ""
        report = run.run()
        assert {dst for _, dst in report.whole} == {1}, "and nobody else"
        if context.rank_idx == 1:
            assert set(report.whole.values()) == {why}
        run.change("norm", (5,), 8.0)
        assert run.run().whole == {}

    threads(body, 2)


def test_a_flipped_byte_is_seen_by_the_proof_where_nobody_checks() -> None:
    def body(context: RankContext) -> None:
        run = Run(context, "tp2", "tp2", verify="checksum")
        run.run()
        if context.rank_idx == 1:
            spoil(run, "flipped")
        with pytest.raises(RefitError, match=r"rank 1: up, piece 0 .*the source has checksum"):
            run.refit.run()
        assert is_stale(run.target) == (context.rank_idx == 1)
        assert len(run.run().whole) == 2, "tokens of what failed are forgotten"
        assert run.run().whole == {}

    threads(body, 2)


def test_a_parameter_written_behind_views_of_its_data_gets_the_whole() -> None:
    """The views are tensors of their own, whose version does not count what the parameter is given."""

    def body(context: RankContext) -> None:
        source, engine = nets(context, "tp2", "tp2", shapes=SHAPES)
        source.fill(0)

        def describe() -> list[CheckpointView]:
            shape, up = (1536, 320), engine.up
            rows = (Interval(768 * context.rank_idx, 0, 768),)
            return [CheckpointView("up", shape, (rows, every(320)), up.data)]

        views = CheckpointViews(describe, engine)
        held = refit.Refit(source, views, "symmetric", context.group, deltas="blocks")
        held.run()
        held.run()
        assert held.last_delta.whole == {}, "the refit's own writes are no reason"
        with torch.no_grad():
            engine.up.zero_()
        held.run()
        assert torch.equal(engine.up, source.up)
        assert set(held.last_delta.whole.values()) == {
            "something else has written its target since"
        }

    threads(body, 2)


def test_who_missed_a_refit_gets_the_whole() -> None:
    """Another refit brings other weights in between, of which the first one knows nothing."""

    def body(context: RankContext) -> None:
        run = Run(context, "tp2", "tp2")
        run.run()
        other = ShardedNet(Parallelism.parse("tp2", 2), context.rank_idx, SHAPES).fill(5)
        refit.swap_model_weights(other, run.target, "symmetric", group=context.group)
        assert len(run.run().whole) == 2
        refit.swap_model_weights(run.source, run.target, "symmetric", group=context.group)
        assert len(run.run().whole) == 2
        assert run.run().whole == {}

    threads(body, 2)


@pytest.mark.parametrize("lost_by", [0, 1])
def test_who_does_not_know_how_a_refit_ended_has_the_whole(
    lost_by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Deltas.commit
    lost: list[int] = []

    def lose(deltas: Deltas, delta: Delta) -> None:
        if delta.ranks.rank_idx == lost_by and not lost:
            lost.append(lost_by)
            raise RuntimeError("killed")
        commit(deltas, delta)

    def body(context: RankContext) -> None:
        run = Run(context, "tp2", "single")
        run.run()
        wait_for_all(context)
        if context.rank_idx == 0:
            monkeypatch.setattr(Deltas, "commit", lose)
        wait_for_all(context)
        run.change("up", (0, 0), 3.0)
        run.change("up", (1500, 0), 3.0)
        text = error_of(run.refit.run)
        assert text == ("RuntimeError: killed" if context.rank_idx == lost_by else "")
        why = "it has missed a refit, or the source has"
        expected = {
            (src, dst): "it holds nothing of an earlier refit" if dst == lost_by else why
            for src in range(2)
            for dst in range(2)
            if lost_by in (src, dst)
        }
        run.change("up", (0, 0), 4.0)
        assert run.run().whole == expected
        assert run.run().whole == {}

    threads(body, 2)


class Masks:
    """Masks of a change, in each of the forms that there are."""

    def __init__(self, form: str, source: ShardedNet, rank_idx: int) -> None:
        up = torch.zeros(source.up.shape, dtype=torch.bool)
        if rank_idx == 0:
            up[5, 7] = True
        if form == "rows":
            up = up.any(1, keepdim=True)
        self.up: Any = bool(up.any()) if form == "tensors" else up
        self.is_callable = form == "callable"

    def given(self) -> Any:
        if self.is_callable:
            return lambda name: self.up if name == "up" else False
        return {"up": self.up}


@pytest.mark.parametrize("form", ["elements", "rows", "tensors", "callable"])
@pytest.mark.parametrize("layouts", [("tp2", "single"), ("tp2", "tp2"), ("single", "tp2")])
def test_masks_say_what_changed(form: str, layouts: tuple[str, str]) -> None:
    def body(context: RankContext) -> None:
        run = Run(context, *layouts, verify="checksum")
        run.run({})  # nothing is there yet: everything travels
        assert run.run().num_changed == 0
        run.change("up", (5, 7), 3.0)
        report = run.run(Masks(form, run.source, context.rank_idx).given())
        assert report.whole == {}
        assert report.num_changed >= 1
        assert report.sent_bytes <= BLOCK * report.num_changed

    threads(body, 2)


def test_a_wrong_mask_is_seen_by_the_proof() -> None:
    def body(context: RankContext) -> None:
        run = Run(context, "tp2", "single", verify="checksum")
        run.run()
        run.change("up", (5, 7), 3.0)
        run.change("down", (5, 7), 3.0)
        with pytest.raises(RefitError, match="rank 1: down, piece 0"):
            run.refit.run(changed={"up": True})
        assert set(run.run().whole.values()) <= {"it holds nothing of an earlier refit"}

    threads(body, 2)


def test_a_wrong_mask_without_a_proof_is_made_good_by_the_next_look() -> None:
    def body(context: RankContext) -> None:
        run = Run(context, "tp2", "single")
        run.run()
        run.change("up", (5, 7), 3.0)
        run.refit.run(changed={"down": True})
        assert run.wrong() == ["up"]
        report = run.run()
        assert (report.whole, report.num_changed) == ({}, 2)

    threads(body, 2)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        (
            {"ups": True},
            "ValueError: .*changed names 'ups', which the source on this rank does not",
        ),
        (
            {"up": torch.ones(7, dtype=torch.bool)},
            r"the mask of up has shape \(7,\), .* \(768, 320\)",
        ),
        (
            {"up": torch.ones(320)},
            "TypeError: .*the mask of up must be a bool or a tensor of bools",
        ),
        (True, "TypeError: .*changed must be a mapping by name, or a callable, got True"),
    ],
)
def test_masks_that_are_none(changed: Any, error: str) -> None:
    def body(context: RankContext) -> str:
        run = Run(context, "tp2", "single")
        run.run()
        text = error_of(lambda: run.refit.run(changed=changed if context.rank_idx == 1 else None))
        run.change("up", (5, 7), 3.0)
        assert run.run().whole == {}, "nothing was touched"
        return text

    for text in threads(body, 2):
        assert re.search(error, text), text


def test_options_that_are_none() -> None:
    def body(context: RankContext) -> None:
        with pytest.raises(ValueError, match=r"deltas must be one of .*, got 'all'"):
            Run(context, "tp2", "single", deltas="all")
        run = Run(context, "tp2", "single", deltas=None)
        with pytest.raises(ValueError, match="changed is for a refit with deltas"):
            run.refit.run(changed={"up": True})
        run.refit.run()
        assert run.wrong() == []
        assert run.refit.last_delta is None

    threads(body, 2)


def test_ranks_that_ask_for_different_deltas() -> None:
    def body(context: RankContext) -> str:
        deltas = "blocks" if context.rank_idx else "checked"
        return error_of(lambda: Run(context, "tp2", "single", deltas=deltas))

    for text in threads(body, 2):
        assert "deltas='blocks'" in text
        assert "deltas='checked'" in text


def test_a_plan_made_anew_keeps_what_ranks_know() -> None:
    def body(context: RankContext) -> None:
        run = Run(context, "tp2", "tp2")
        run.run()
        if context.rank_idx == 0:
            refit.clear_plan_cache()
        wait_for_all(context)
        run.change("up", (5, 7), 3.0)
        report = run.run()
        assert {dst for _, dst in report.whole} <= {0, 1}
        assert run.run().whole == {}

    threads(body, 2)


def mask_of(side: CheckpointViews, names: set[str]) -> dict[str, bool]:
    """Views that are of some names of the checkpoint."""
    tensors = side.state().tensors
    return {name: True for name in tensors if any(name.startswith(each) for each in names)}


@pytest.mark.parametrize("seed", range(24))
def test_changes_between_drawn_layouts(seed: int) -> None:
    """Views of any indices and strides on both sides, several of one name, in pieces of several blocks."""
    rng = random.Random(seed)
    shapes = {f"w{number}": (rng.choice((60, 400)), rng.choice((6, 300))) for number in range(5)}
    shapes["bias"] = (1,)
    num_ranks = rng.randint(1, 4)
    dtypes = [torch.float32, torch.float32 if seed % 4 else torch.bfloat16]
    source, target = (DrawnSide(rng, shapes, num_ranks, dtype) for dtype in dtypes)
    wholes = drawn_wholes(shapes, torch.float32, seed)
    changes: list[list[tuple[str, int]]] = [
        [(name, rng.randrange(wholes[name].numel())) for name in rng.sample(list(shapes), 2)]
        for _ in range(4)
    ]
    options: Any = {
        "verify": rng.choice(("plan", "checksum")),
        "deltas": rng.choice(("blocks", "checked")),
    }
    has_masks = rng.random() < 0.5

    def rank(context: RankContext) -> tuple[int, int]:
        me, mine = context.rank_idx, {name: whole.clone() for name, whole in wholes.items()}
        source.fill(me, mine)
        sides = [CheckpointViews(side.views[me]) for side in (source, target)]
        held = refit.Refit(*sides, "symmetric", context.group, strict=True, **options)
        held.run()
        sent = total = 0
        for changed in changes:
            for name, at in changed:
                mine[name].view(-1)[at] = (mine[name].view(-1)[at] + 1) % 100
            source.fill(me, mine)
            held.run(
                changed=mask_of(sides[0], {name for name, _ in changed}) if has_masks else None
            )
            for view in target.views[me]:
                expected = part_of(mine[view.name], view.shape, view.dims)
                assert torch.equal(view.tensor, expected.to(view.tensor.dtype)), view.name
            report = held.last_delta
            assert report.whole == {}
            sent, total = sent + report.sent_bytes, total + report.total_bytes
        assert target.wrong(me, mine) == []
        return sent, total

    for sent, total in threads(rank, num_ranks):
        if dtypes[0] == dtypes[1]:
            assert 0 < sent < total
        else:
            assert sent == total == 0


def test_what_changes_its_dtype_travels_whole_and_is_named() -> None:
    def body(context: RankContext) -> None:
        run = Run(context, "tp2", "single", verify="checksum")
        run.target.up.data = run.target.up.data.float()
        report = run.run()
        assert report.undivided == ("up",)
        run.change("up", (5, 7), 3.0)
        run.change("norm", (7,), 3.0)
        report = run.run()
        assert report.whole == {}
        assert 0 < report.sent_bytes <= 2 * BLOCK
        assert report.undivided == ("up",)

    threads(body, 2)


@pytest.mark.parametrize("quantize_on_send", [True, False])
def test_what_a_transform_makes_travels_whole_and_is_named(quantize_on_send: bool) -> None:
    def body(context: RankContext) -> None:
        source, target = nets(context, "tp2", "tp2", shapes=SHAPES)
        refit.prepare_swap_model_weights(source, target, group=context.group)
        buffers = {"up": FP8BlockTensor.empty(tuple(target.up.shape), (128, 128))}
        del target.up
        transform = FP8BlockReshardTransform(
            {"up"}, buffers, block=(128, 128), quantize_on_send=quantize_on_send
        )
        held = refit.Refit(
            *(source.fill(0), target, "symmetric", context.group),
            transform=transform,
            verify="checksum",
            deltas="checked",
        )
        for seed in range(3):
            source.fill(seed)
            held.run()
            assert target.wrong(seed) == []
            expected = source.up.detach().float()
            found = buffers["up"].dequantize().float()
            assert torch.allclose(found, expected, rtol=0.07, atol=0.01)
            report = held.last_delta
            assert report.undivided == ("up",)
            assert bool(report.whole) == (seed == 0)

    threads(body, 2)

"""`moe-comm bench reshard` on small sizes: what it checks and what it reports, not how fast it is."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.cli.bench.memory import PeakMemory
from moe_comm.cli.bench.processes import WorkerError, WorkerProcesses
from moe_comm.cli.bench.reshard import run, worker
from moe_comm.cli.bench.reshard.case import CHECKSUM, ReshardCase, ReshardOptions, shape_of_bytes
from moe_comm.cli.reshard.world import PlanningCase
from moe_comm.peers.communicator import Communicator
from moe_comm.resharding.describe.checkpoint_views import CheckpointViews
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.command_line import output_of

pytest.importorskip("moe_comm._host")

CASE = ReshardCase(
    layouts=PlanningCase(
        shape=shape_of_bytes(4 << 20, torch.bfloat16),
        source=Parallelism.parse("ep2", 2),
        destination=Parallelism.parse("tp2", 2),
    )
)


def bench(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    out = tmp_path / "out.json"
    output_of("bench", "reshard", *arguments, "--json", str(out))
    document = json.loads(out.read_text())
    assert document["environment"]["cores"] >= 1
    assert all(case["check"] == "ok" for case in document["cases"])
    return list(document["cases"])


@pytest.mark.full
def test_a_model_is_moved_into_the_heap_and_outside_it(tmp_path: Path) -> None:
    heap, outside = bench(
        tmp_path,
        *("--ranks", "2", "--from", "ep2", "--to", "tp2", "--bytes", "4MiB", "--peers", "gloo"),
        *("--repeats", "2"),
    )
    assert (heap["destination"], outside["destination"]) == ("heap", "outside")
    for case in (heap, outside):
        assert (case["from"], case["to"], case["transport"]) == ("ep2", "tp2", "symmetric")
        assert case["bytes"] == CASE.num_bytes()
        assert case["roof_bytes"] == pytest.approx(case["bytes"], rel=1e-3)
        assert len(case["pairs"]) == case["num_pairs"] + case["num_dropped"]
        assert case["p50_us"] <= case["p95_us"]
        assert case["speedup"]["gloo"] > 0.0
        assert case["peer_p50_us"]["gloo"] > 0.0
        assert 0.0 < case["outside_copies_us"] < case["p95_us"]
        # The second refit finds all it needs.
        assert case["memory_bytes"]["second_heap"] == 0
    # Slots are made where something is received outside the heap.
    assert outside["memory_bytes"]["heap"] > heap["memory_bytes"]["heap"]


def test_a_list_of_tensors_goes_to_ranks_of_its_own(tmp_path: Path) -> None:
    cases = bench(
        tmp_path,
        *("--source-ranks", "2", "--destination-ranks", "1", "--tensors", "50"),
        *("--destination", "heap,shared", "--peers", "checksum", "--repeats", "1"),
    )
    assert [case["destination"] for case in cases] == ["heap", "shared"]
    for case in cases:
        assert (case["ranks"], case["disjoint"], case["num_tensors"]) == (3, True, 50)
        assert (case["from"], case["to"]) == ("ep2", "single")
        assert case["bytes"] == 2 * 50 * 4096
        assert case["speedup"]["checksum"] > 0.0
    # Slots for tensors smaller than a page.
    assert cases[1]["memory_bytes"]["heap"] > 0


@pytest.mark.parametrize("places", ["attic", "heap,attic", ""])
def test_a_place_for_destinations_that_there_is_not(places: str) -> None:
    said = output_of("bench", "reshard", "--destination", places, exit_code=1)
    assert f"memory must be one of heap, shared, outside, got {places.split(',')[-1]!r}" in said


def test_the_proof_is_that_of_the_same_refit() -> None:
    make_worker = functools.partial(_AskedWorker, CASE, ReshardOptions())
    with WorkerProcesses(2, make_worker) as ranks:
        for transport, verify in (("symmetric", None), (CHECKSUM, "checksum")):
            assert ranks.call("asked", transport) == [("SymmetricCopyService", verify)] * 2


class _AskedWorker(worker.ReshardWorker):
    """A worker that is asked what a refit is called with."""

    def asked(self, transport: str) -> tuple[str, str | None]:
        """Refit over one transport, which may be a peer's name."""
        found: list[tuple[str, str | None]] = []

        def swap(_: object, __: object, service: object, *, verify: str | None) -> None:
            found.append((type(service).__name__, verify))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "swap_model_weights", swap)
            self._refit(transport)
        (answer,) = found
        return answer


def test_experts_of_a_layer_are_stacked_and_come_by_name_too(tmp_path: Path) -> None:
    (case,) = bench(
        tmp_path,
        *("--source-ranks", "2", "--destination-ranks", "1", "--from", "ep2", "--to", "single"),
        *("--bytes", "4MiB", "--experts", "8", "--stacked-experts", "--peers", "full-tensors"),
        *("--destination", "outside", "--repeats", "1"),
    )
    assert (case["stacked_experts"], case["shape"]["num_experts"]) == (True, 8)
    # Tensors of 4 layers, two of every expert and 6 others, and 3 around the layers.
    assert case["num_tensors"] == 4 * (2 * 8 + 6) + 3
    assert case["speedup"]["full-tensors"] > 0.0


@pytest.mark.full
@pytest.mark.parametrize(("source", "destination"), [("ep2", "tp2"), ("tp2", "ep2.etp1")])
def test_views_of_a_stack_may_be_cut(source: str, destination: str) -> None:
    layouts = dataclasses.replace(
        CASE.layouts,
        source=Parallelism.parse(source, 2),
        destination=Parallelism.parse(destination, 2),
    )
    case = dataclasses.replace(CASE, layouts=layouts, is_stacked=True)
    make_worker = functools.partial(_StackedWorker, case, ReshardOptions())
    with WorkerProcesses(2, make_worker) as ranks:
        run._check(ranks, "symmetric")
        assert ranks.call("num_storages") == [1, 1]


class _StackedWorker(worker.ReshardWorker):
    """A worker that is asked what it was told to hold."""

    def num_storages(self) -> int:
        """Count the storages of a layer's first weights of experts."""
        assert isinstance(self.target_side, CheckpointViews)
        return len(
            {
                view.tensor.untyped_storage().data_ptr()
                for view in self.target_side.views
                if "layers.0.mlp.experts.linear_fc1" in view.name
            }
        )


@pytest.mark.full
def test_another_transport_is_measured(tmp_path: Path) -> None:
    (case,) = bench(
        tmp_path,
        *("--ranks", "2", "--from", "ep2", "--to", "tp2", "--bytes", "4MiB", "--repeats", "1"),
        *("--transport", "nvshmem", "--destination", "outside"),
    )
    assert case["transport"] == "nvshmem"
    assert case["gbs"] > 0.0


def test_a_wrong_element_ends_the_run() -> None:
    make_worker = functools.partial(_ForgetfulWorker, CASE, ReshardOptions())
    with WorkerProcesses(2, make_worker) as ranks:
        with pytest.raises(WorkerError, match=r"rank 1: decoder.layers.0.mlp.router.weight: exp"):
            run._check(ranks, "symmetric")


class _ForgetfulWorker(worker.ReshardWorker):
    """Rank 1 writes an element after every refit."""

    def _refit(self, transport: str) -> None:
        super()._refit(transport)
        if self.rank_idx == 1:
            self.target.get_parameter("decoder.layers.0.mlp.router.weight")[3, 5] = 1.0


def _peaks(context: RankContext) -> tuple[int, int, int, int, int]:
    with Communicator(context.group, backend="host") as communicator:
        with PeakMemory(communicator) as nothing:
            pass
        with PeakMemory(communicator) as peak:
            gone = torch.ones(25_000_000)
            del gone
            kept = communicator.empty(1 << 20, dtype=torch.uint8)
        return (
            kept.numel(),
            peak.heap_bytes,
            peak.private_bytes,
            nothing.heap_bytes,
            nothing.private_bytes,
        )


def test_peak_memory_sees_what_came_and_went() -> None:
    # In a process that never took more: not every kernel lets it reset its highest mark.
    [(kept, heap, private, no_heap, no_private)] = run_ranks(_peaks, 1, fresh=True)
    assert heap == kept == 1 << 20
    assert private == pytest.approx(100_000_000, rel=0.1)
    assert (no_heap, no_private < 10_000_000) == (0, True)

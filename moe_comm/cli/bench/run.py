"""Runs a case: check, then rounds in which ours and every peer are timed next to each other."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from moe_comm.cli.bench.case import BenchCase
from moe_comm.cli.bench.environment import last_level_cache_bytes
from moe_comm.cli.bench.internode_traffic import internode_bytes
from moe_comm.cli.bench.memory import WindowMemory, total_bytes
from moe_comm.cli.bench.options import (
    LATENCY_OPERATIONS,
    LAYER,
    THROUGHPUT_OPERATIONS,
    BenchOptions,
)
from moe_comm.cli.bench.peers.mpi import MpiPeer
from moe_comm.cli.bench.peers.mpi_launcher import MpiNotFoundError, find_mpi
from moe_comm.cli.bench.processes import RankProcesses
from moe_comm.cli.bench.replicas import summarize_rows
from moe_comm.cli.bench.result import BenchRow
from moe_comm.cli.bench.statistics import (
    Interval,
    all_wall_times_us,
    medians,
    percentile,
    time_columns,
    wall_times_us,
)
from moe_comm.cli.bench.times import (
    NUM_WARM_UP,
    Rounds,
    SideTimes,
    ratios_in_rounds,
    sides_in_turn,
    summarize_roof,
)
from moe_comm.cli.bench.traffic import (
    combine_bytes,
    copy_in_bytes,
    dispatch_bytes,
    rank_traffic,
)
from moe_comm.ep.config import Layout

NUM_ITERATIONS = 200
NUM_PEER_ITERATIONS = 20


def operation_bytes(case: BenchCase) -> dict[str, int]:
    """Bytes of every operation over all ranks, by formula."""
    per_rank = [rank_traffic(case, rank_idx) for rank_idx in range(case.num_ranks)]
    dispatch = sum(dispatch_bytes(traffic) for traffic in per_rank)
    combine = sum(combine_bytes(traffic) for traffic in per_rank)
    return {
        "dispatch": dispatch,
        "combine": combine,
        "combine_copy_in": combine + sum(copy_in_bytes(traffic) for traffic in per_rank),
        "dispatch+combine": dispatch + combine,
    }


def default_operations(case: BenchCase) -> tuple[str, ...]:
    """Bandwidth where rows do not fit the last-level cache twice, else latency; and memory.

    Of a case that is compared with a baseline, what differs from it.
    """
    if case.placement is not None and not case.versus_given:
        return ("rows", "dispatch+combine" if _problem_with_experts(case) else LAYER)
    is_small = operation_bytes(case)["dispatch"] <= 2 * max(last_level_cache_bytes(), 1 << 20)
    if case.baseline is None:
        return (*(LATENCY_OPERATIONS if is_small else THROUGHPUT_OPERATIONS), "memory")
    if is_small:
        operations: tuple[str, ...] = ("dispatch+combine",)
    elif case.quantization is not None:
        operations = ("dispatch",)
    else:
        operations = ("dispatch", "combine")
    is_same_memory = case.api == "hybrid_ep" or case.check_messages or case.versus_given
    return operations if is_same_memory else (*operations, "memory")


def _problem_with_experts(case: BenchCase) -> str | None:
    """Why experts cannot be run on what is dispatched, or None."""
    if case.layout is not Layout.EXPERT_MAJOR:
        return f"layout {case.layout.name}"
    if case.quantization is not None:
        return f"quantization {case.quantization.format.name}"
    return f"api {case.api}" if case.api != "native" else None


def check_options(case: BenchCase, options: BenchOptions) -> None:
    """Check the case and the options together.

    Raises:
        ValueError: An option has no meaning for the case.
    """
    if options.backend == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"the cuda backend needs a GPU on this machine, torch {torch.__version__} finds none"
        )
    if options.num_sms is not None and options.backend != "cuda":
        raise ValueError(
            f"num_sms is for backend cuda, got num_sms {options.num_sms} and backend {options.backend}"
        )
    if options.peers and case.layout != Layout.EXPERT_MAJOR:
        raise ValueError(f"peers give expert-major rows, got layout {case.layout.name}")
    if options.peers and options.backend == "cuda":
        raise ValueError(
            f"peers move CPU tensors and the cuda backend those of a GPU, got peers "
            f"{', '.join(options.peers)}"
        )
    if options.mode == "threads":
        needs_processes = {
            "peers": ", ".join(options.peers),
            "backend": "collective" if options.backend == "collective" else "",
            "api": case.api if case.api == "hybrid_ep" else "",
            "local ranks": options.num_local_ranks or "",
            "operations": "memory" if "memory" in options.operations else "",
        }
        for name, value in needs_processes.items():
            if value:
                raise ValueError(
                    f"ranks that are threads have no {name} {value}: use mode processes"
                )
    if "collective" in options.peers and options.backend == "collective":
        raise ValueError("the collective backend is not compared with itself")
    _check_nodes(case, options)
    if case.rank_reduction and options.num_local_ranks not in (None, case.num_ranks):
        raise ValueError(
            f"rank_reduction is of ranks that share a node: a node must have all {case.num_ranks} "
            f"ranks, got {options.num_local_ranks}"
        )
    if options.peers and case.baseline is not None:
        raise ValueError(
            f"a case is compared with peers or with its baseline ({case.baseline[0]}), got peers "
            f"{', '.join(options.peers)}"
        )
    problem = _problem_with_experts(case)
    if LAYER in options.operations and problem is not None:
        raise ValueError(f"experts run on unquantized rows by expert of EpBuffer, got {problem}")
    if options.peers and LAYER in options.operations:
        raise ValueError(f"peers have no experts, got peers {', '.join(options.peers)}")
    if case.placement is not None and options.num_local_ranks is not None:
        raise ValueError(
            f"replicas are measured on one node, got local ranks {options.num_local_ranks}"
        )
    if "rows" in options.operations and case.api != "native":
        raise ValueError(f"rows are counted of EpBuffer.dispatch, got api {case.api}")
    if "differentiable_overhead" in options.operations and case.baseline is not None:
        raise ValueError(
            "differentiable_overhead is of the plain native dispatch, which this case is not"
        )
    if case.api == "hybrid_ep":
        if "memory" in options.operations:
            raise ValueError('memory is measured of api "native", got "hybrid_ep"')
        if options.num_threads is not None or not options.with_huge_pages:
            raise ValueError(
                "HybridEP's functions make their communicator themselves: threads and huge pages "
                f"are not chosen, got {options.num_threads} and {options.with_huge_pages}"
            )


def _check_nodes(case: BenchCase, options: BenchOptions) -> None:
    num_local_ranks = options.num_local_ranks
    if num_local_ranks is None:
        if options.rail != "auto":
            raise ValueError(
                f"a rail joins nodes: it needs local ranks, got rail {options.rail} and no local ranks"
            )
        if case.check_messages:
            raise ValueError(
                "messages between nodes are checked: check_messages needs local ranks, got none"
            )
        return
    if options.backend != "host":
        raise ValueError(
            f"nodes on one machine are of the host backend, got local ranks {num_local_ranks} and "
            f"backend {options.backend}"
        )
    if num_local_ranks < 1 or case.num_ranks % num_local_ranks:
        raise ValueError(
            f"every node has as many ranks: local ranks must divide ranks, got {num_local_ranks} and "
            f"{case.num_ranks}"
        )
    if case.api == "hybrid_ep":
        raise ValueError(
            "HybridEP's functions make their communicator themselves, which spans one node, got "
            f"local ranks {num_local_ranks}"
        )


class CaseRun:
    """One case on living processes; a context manager.

    Args:
        case: The case.
        options: Options of the measurement.
        on_progress: Called with a short text after every round.

    Raises:
        WorkerError: A rank failed.
        RuntimeError: MPI failed.
    """

    def __init__(
        self,
        case: BenchCase,
        options: BenchOptions,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        check_options(case, options)
        self.case = case
        self.options = options
        self.on_progress = on_progress
        self.missing_peers: dict[str, str] = {}
        self.mpi: MpiPeer | None = None
        # The measured side, then those that it is compared with.
        cases = [case] if case.baseline is None else [case, case.baseline[1]]
        self.bytes = [operation_bytes(each) for each in cases]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> CaseRun:
        try:
            self._start()
        except BaseException:
            self._stack.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._stack.__exit__(exc_type, exc, traceback)

    def _start(self) -> None:
        options = self.options
        self.ranks = self._stack.enter_context(RankProcesses(self.case, options))
        self.on_progress("check")
        self.ranks.check()
        described = self.ranks.call("describe")
        self.backend = str(described[0]["backend"])
        self.devices = [str(of_rank["device"]) for of_rank in described]
        self.num_sms: int | None = described[0]["num_sms"]
        if "gloo" in options.peers:
            self.on_progress("check gloo")
            self.ranks.call("prepare_gloo")
        if "collective" in options.peers:
            self.on_progress("check collective")
            self.ranks.call("prepare_collective")
        if "mpi" in options.peers:
            try:
                launcher = find_mpi()
            except MpiNotFoundError as missing:
                self.missing_peers["mpi"] = str(missing)
                return
            self.on_progress(f"check {launcher.version}")
            self.mpi = MpiPeer(launcher, self.case, self.ranks.folder, is_pinned=options.is_pinned)
            self._stack.callback(self.mpi.close)
            self.mpi.check()

    def run(self) -> list[BenchRow]:
        """Measure every operation of the options."""
        operations = self.options.operations or default_operations(self.case)
        rows = [self._count_rows()] if "rows" in operations else []
        rows += [
            self._measure_throughput(operation)
            for operation in operations
            if operation in THROUGHPUT_OPERATIONS
        ]
        self.ranks.call("release_roof")
        if LAYER in operations:
            self.on_progress("check experts")
            self.ranks.check("prepare_experts")
            rows.append(self._measure_throughput(LAYER))
        if "dispatch+combine" in operations:
            rows.append(self._measure_latency())
        if "differentiable_overhead" in operations:
            rows.append(self._measure_differentiable())
        # Resident memory of a process is of all its ranks.
        if "memory" in operations and self.backend == "host" and self.options.mode == "processes":
            rows.append(self._measure_memory())
        return rows

    def _row(self, operation: str, **columns: Any) -> BenchRow:
        return BenchRow(op=operation, case=self.case, backend=self.backend, **columns)

    def _count_rows(self) -> BenchRow:
        found = self.ranks.call("count_rows")
        return self._row(
            "rows",
            num_pairs=1,
            extra=summarize_rows(self.case, [*zip(*found, strict=True)]),
        )

    def _measure_throughput(self, operation: str) -> BenchRow:
        has_roof = operation != LAYER and all(self.ranks.call("prepare_roof"))
        if not has_roof:
            self.ranks.call("release_roof")  # some rank has none, and all of them time it or none
        peer_operation = "dispatch" if operation == "dispatch" else "combine"
        sides = [SideTimes() for _ in self.bytes]
        rounds = Rounds(sides=sides)

        def run_peers() -> dict[str, list[Interval]]:
            found = self._run_peers(peer_operation, 1)
            return {peer: [each[0] for each in intervals] for peer, intervals in found.items()}

        rounds.run(
            self.options.num_repeats,
            lambda side_idx: self.ranks.call("sample", operation, side_idx),
            run_peers,
            lambda text: self.on_progress(f"{operation} {text}"),
        )
        extra = self._count_internode_bytes(operation)
        if self.case.baseline is not None:
            name = self.case.baseline[0]
            rounds.ratios[name] = ratios_in_rounds(sides[1], sides[0])
            rounds.peer_wall_us[name] = sides[1].wall_us
            extra["baseline"] = {"name": name, **self._summarize_side(operation, 1, sides[1])}
        ours = self._summarize_side(operation, 0, sides[0])
        fields = {field.name for field in dataclasses.fields(BenchRow)}
        extra |= {name: value for name, value in ours.items() if name not in fields}
        return self._row(
            operation,
            extra=extra,
            **rounds.columns(),
            **{name: value for name, value in ours.items() if name in fields},
        )

    def _summarize_side(self, operation: str, side_idx: int, side: SideTimes) -> dict[str, Any]:
        """Times and roof of a side, columns of a row and details for JSON."""
        num_bytes = self.bytes[side_idx].get(operation)
        # A time beside a roof counts when the machine held still around it.
        summary = time_columns(side.wall_us, side.median_us, num_bytes)
        if num_bytes is None:
            return summary | {"ffn_hidden": self.case.ffn_hidden}
        if not side.pairs:
            return summary
        per_rank = self.ranks.call("roof_bytes", side_idx)
        roof_bytes = sum(of_rank[operation] for of_rank in per_rank)
        return summary | summarize_roof(side.pairs, num_bytes, roof_bytes)

    def _measure_latency(self) -> BenchRow:
        sides = range(len(self.bytes))
        for side_idx in sides:
            self.ranks.call("run_back_to_back", NUM_ITERATIONS, side_idx)
        wall_us: list[list[float]] = [[] for _ in sides]
        peer_wall_us: dict[str, list[float]] = {}
        ratios: dict[str, list[float]] = {}
        for round_idx in range(self.options.num_repeats):
            blocks = {
                side_idx: all_wall_times_us(
                    self.ranks.call("run_back_to_back", NUM_ITERATIONS, side_idx)
                )
                for side_idx in sides_in_turn(len(sides), round_idx)
            }
            for side_idx, block in blocks.items():
                wall_us[side_idx] += block
            theirs = {
                peer: all_wall_times_us(intervals)
                for peer, intervals in self._run_peers(
                    "dispatch+combine", NUM_PEER_ITERATIONS
                ).items()
            }
            if self.case.baseline is not None:
                theirs[self.case.baseline[0]] = blocks[1]
            for peer, block in theirs.items():
                peer_wall_us.setdefault(peer, []).extend(block)
                ratio = percentile(block, 0.5) / percentile(blocks[0], 0.5)
                ratios.setdefault(peer, []).append(ratio)
            self.on_progress(f"dispatch+combine {round_idx + 1}/{self.options.num_repeats}")
        num_bytes = self.bytes[0]["dispatch+combine"]
        return self._row(
            "dispatch+combine",
            **time_columns(wall_us[0], percentile(wall_us[0], 0.5), num_bytes),
            speedup=medians(ratios),
            peer_p50_us=medians(peer_wall_us),
            num_pairs=self.options.num_repeats,
            extra={
                "num_iterations": NUM_ITERATIONS,
                "p99_us": percentile(wall_us[0], 0.99),
                **self._count_internode_bytes("dispatch+combine"),
            },
        )

    def _count_internode_bytes(self, operation: str) -> dict[str, Any]:
        """Count the bytes that one more call sends between nodes, also by formula; none with one node."""
        num_local_ranks = self.options.num_local_ranks
        if num_local_ranks is None or num_local_ranks == self.case.num_ranks:
            return {}
        before = sum(self.ranks.call("internode_bytes"))
        if operation == "dispatch+combine":
            self.ranks.call("run_back_to_back", 1, 0)
        else:
            self.ranks.call("sample", operation, 0)
        counted = sum(self.ranks.call("internode_bytes")) - before
        by_formula = internode_bytes(self.case, num_local_ranks)
        by_formula["combine_copy_in"] = by_formula["combine"]
        both = by_formula["dispatch"] + by_formula["combine"]
        by_formula |= {"dispatch+combine": both, LAYER: both}
        return {
            "local_ranks": num_local_ranks,
            "rail": self.options.rail,
            "internode_bytes": counted,
            "internode_formula_bytes": by_formula[operation],
        }

    def _measure_differentiable(self) -> BenchRow:
        self.ranks.call("compare_differentiable", NUM_WARM_UP)
        eager_us: list[float] = []
        differentiable_us: list[float] = []
        for round_idx in range(self.options.num_repeats):
            for per_rank in self.ranks.call("compare_differentiable", NUM_ITERATIONS):
                eager_us += wall_times_us(per_rank["eager"])
                differentiable_us += wall_times_us(per_rank["differentiable"])
            self.on_progress(f"differentiable {round_idx + 1}/{self.options.num_repeats}")
        eager_p50_us = percentile(eager_us, 0.5)
        differentiable_p50_us = percentile(differentiable_us, 0.5)
        return self._row(
            "differentiable_overhead",
            p50_us=differentiable_p50_us - eager_p50_us,
            num_pairs=self.options.num_repeats,
            extra={
                "eager_dispatch_p50_us": eager_p50_us,
                "differentiable_dispatch_p50_us": differentiable_p50_us,
            },
        )

    def _measure_memory(self) -> BenchRow:
        """Resident windows against the windows that the operations need."""
        stages: list[dict[str, WindowMemory]] = self.ranks.call("measure_memory")
        traffic = [rank_traffic(self.case, rank_idx) for rank_idx in range(self.case.num_ranks)]
        dispatched_bytes = sum(t.num_window_rows * t.dispatched_row_bytes for t in traffic)
        rows_bytes = sum(t.num_window_rows * t.row_bytes for t in traffic)
        sums_bytes = sum(t.num_tokens * t.row_bytes for t in traffic)
        expected = {
            "dispatch": dispatched_bytes,
            "combine": dispatched_bytes + rows_bytes + sums_bytes,
            "combine_copy_in": dispatched_bytes + rows_bytes + sums_bytes,
        }
        resident = {
            stage: total_bytes([per_rank[stage] for per_rank in stages]) for stage in expected
        }
        return self._row(
            "memory",
            bytes=resident["combine_copy_in"],
            num_pairs=1,
            extra={
                "resident_bytes": resident,
                "window_bytes": expected,
                "ordinary_expert_output_bytes": rows_bytes,
                "huge_page_bytes": max(per_rank["combine"].huge_page_bytes for per_rank in stages),
            },
        )

    def _run_peers(self, operation: str, num_iterations: int) -> dict[str, list[list[Interval]]]:
        """One block of every peer: intervals by peer and rank."""
        intervals = {}
        if "gloo" in self.options.peers:
            intervals["gloo"] = self.ranks.call("run_gloo", operation, num_iterations)
        if "collective" in self.options.peers:
            intervals["collective"] = self.ranks.call("run_collective", operation, num_iterations)
        if self.mpi is not None:
            intervals["mpi"] = self.mpi.run(operation, num_iterations)
        return intervals

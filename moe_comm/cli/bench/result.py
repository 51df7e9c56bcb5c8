"""Results of the benchmark, in the form in which they are written to JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from moe_comm.cli.bench.case import BenchCase

__all__ = ["BenchRow", "MeasuredRow", "to_json"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """One operation, measured, by any benchmark.

    Args:
        p50_us: Median of the ranks' wall times over ranks and repeats.
        p95_us: 95th percentile of the same.
        op_us: Median time from the first rank's start to the last rank's end, over clean pairs; GB/s comes
            from it.
        bytes: Bytes over all ranks, by formula.
        gbs: `bytes / op_us`.
        roof_gbs: Median bandwidth of the plain loops timed around the operation; None without a roof.
        fraction_of_roof: Median over clean pairs.
        check: `"ok"`, or what differs from the oracle.
        speedup: Median ratio of the time of a peer, or of the case's baseline, to ours, by name.
        peer_p50_us: Median wall time of each.
        num_pairs: Clean pairs behind the fraction (repeats where there is no roof).
        num_dropped: Pairs left out because their roofs disagreed.
        roof_state: `"slow"`, `"fast"`, or both numbers where it changed during the run.
        extra: Row-specific values.
    """

    p50_us: float | None = None
    p95_us: float | None = None
    op_us: float | None = None
    bytes: int | None = None
    gbs: float | None = None
    roof_gbs: float | None = None
    fraction_of_roof: float | None = None
    check: str = "ok"
    speedup: dict[str, float] = dataclasses.field(default_factory=dict)
    peer_p50_us: dict[str, float] = dataclasses.field(default_factory=dict)
    num_pairs: int = 0
    num_dropped: int = 0
    roof_state: str | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON writes it."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("case", "extra")
        }
        return values | self.extra


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchRow(MeasuredRow):
    """One operation of one case of dispatch and combine.

    Args:
        op: `"dispatch"`, `"combine"` (in place), `"combine_copy_in"` (of an ordinary tensor),
            `"dispatch+experts+combine"`, `"dispatch+combine"` (latency, back to back),
            `"differentiable_overhead"`, `"memory"`, or `"rows"` (how many come to each rank).
        case: The case.
        backend: Backend that ran it.
    """

    op: str
    case: BenchCase
    backend: str

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON writes it."""
        case = self.case
        quantization = case.quantization
        scale_format = None if quantization is None else quantization.scale_format
        return {
            "op": self.op,
            "backend": self.backend,
            "ranks": case.num_ranks,
            "tokens": case.num_tokens,
            "hidden": case.hidden,
            "topk": case.num_topk,
            "experts": case.num_experts,
            "dtype": case.dtype,
            "layout": case.layout.name,
            "api": case.api,
            "quantization": None if quantization is None else quantization.format.name,
            "scale_format": None if scale_format is None else scale_format.name,
            "column_major_scales": quantization is not None and quantization.is_column_major,
            "with_weights": case.sends_weights,
            "expert_alignment": case.expert_alignment,
            "skew": case.skew,
            "routing": None if case.routing is None else case.routing.name,
            "huge_page_x": case.with_huge_page_x,
            "node_reduction": case.reduced_local_ranks is not None,
            "rank_reduction": case.rank_reduction,
            "check_messages": case.check_messages,
            "batch": case.batch_idx,
            "placement": None if case.placement is None else case.placement.slots,
            "replica_rule": None if case.placement is None else case.replica_rule,
            "seed": case.seed,
            **super().to_dict(),
        }


def to_json(
    environment: dict[str, Any], rows: Sequence[MeasuredRow], notes: dict[str, str]
) -> dict[str, Any]:
    """The document that `--json` of every benchmark writes.

    Args:
        environment: See `collect_environment`.
        rows: All rows.
        notes: Why a peer is missing, by peer.
    """
    return {
        "environment": environment,
        "cases": [row.to_dict() for row in rows],
        "missing_peers": notes,
    }

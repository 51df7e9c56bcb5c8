"""Figures that others published, and what the model says of the same case.

Every figure is the publisher's, of the publisher's machine and version; none was measured here.
Bandwidths are in the convention of their table: bytes of rows, those that stay included ("logical"),
over time. Run from the root of the repository; it takes 20 s:

    python -m benchmarks.published
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Annotated, Any

import typer
from rich.table import Table

from moe_comm.cli.command_rules import FoldedTable, wide_console
from moe_comm.cli.model.cluster import CLUSTERS, Cluster
from moe_comm.cli.model.drawn_routing import draw_traffic
from moe_comm.cli.model.simulation import simulate
from moe_comm.cli.model.workload import (
    Movement,
    Workload,
    count_row_bytes,
    expected_distinct_limited,
)

FP8 = 1.03125
BF16 = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """One published figure.

    Args:
        who: Library, mode and number of SMs where that matters.
        operation: "dispatch" or "combine".
        cluster: A name of `CLUSTERS`.
        num_nodes: Nodes of `num_local_ranks`.
        num_local_ranks: Ranks per NVLink domain.
        element_bytes: On the wire.
        time_us: Published time, or None.
        gbs: Published bandwidth, or None.
        num_tokens: Of a rank.
        max_nodes: Most nodes of a token.
        is_low_latency: A row per choice, as DeepEP's low-latency kernels send them.
        source: Where it is published.
    """

    who: str
    operation: str
    cluster: str
    num_nodes: int
    num_local_ranks: int
    element_bytes: float
    time_us: float | None = None
    gbs: float | None = None
    num_tokens: int = 4096
    max_nodes: int | None = None
    is_low_latency: bool = False
    source: str


Figures = tuple[tuple[str, float, float], ...]
"""Operation, bytes of an element on the wire, and what was published."""


def _figures(
    who: str, cluster: str, nodes: tuple[int, int], source: str, figures: Figures, **more: Any
) -> tuple[Published, ...]:
    """Figures of one case; `nodes`: their number and the ranks of each. Bandwidths, or times where `more` says so."""
    unit = more.pop("unit", "gbs")
    return tuple(
        Published(
            who=who,
            operation=operation,
            cluster=cluster,
            num_nodes=nodes[0],
            num_local_ranks=nodes[1],
            element_bytes=element,
            source=source,
            **{unit: value},
            **more,
        )
        for operation, element, value in figures
    )


def _deep_ep_v1(ranks: int, dispatch_gbs: float, combine_gbs: float) -> tuple[Published, ...]:
    nodes = max(1, ranks // 8)
    figures = (("dispatch", FP8, dispatch_gbs), ("combine", BF16, combine_gbs))
    limit = {"max_nodes": min(nodes, 4)}
    return _figures("DeepEP V1", "h800-cx7", (nodes, 8), "DeepEP docs/legacy.md", figures, **limit)


def _low_latency(ranks: int, dispatch_us: float, combine_us: float) -> tuple[Published, ...]:
    return _figures(
        *("DeepEP V1 low latency", "h800-cx7", (ranks // 8, 8), "DeepEP docs/legacy.md"),
        (("dispatch", FP8, dispatch_us), ("combine", BF16, combine_us)),
        unit="time_us",
        num_tokens=128,
        is_low_latency=True,
    )


def _deep_ep_v2(
    cluster: str, nodes: int, sms: int, dispatch_gbs: float, combine_gbs: float
) -> tuple[Published, ...]:
    figures = (("dispatch", FP8, dispatch_gbs), ("combine", BF16, combine_gbs))
    who = f"DeepEP V2, {sms} SMs"
    return _figures(who, cluster, (nodes, 8), "DeepEP README", figures, num_tokens=8192)


def _hybrid_ep(
    cluster: str, nodes: int, local_ranks: int, sms: int, fp8: float, bf16: float, combine: float
) -> tuple[Published, ...]:
    figures = (("dispatch", FP8, fp8), ("dispatch", BF16, bf16), ("combine", BF16, combine))
    who = f"HybridEP kernel, {sms} SMs"
    return _figures(who, cluster, (nodes, local_ranks), "HybridEP README", figures)


PUBLISHED: tuple[Published, ...] = (
    *_deep_ep_v1(8, 153, 158),
    *_deep_ep_v1(16, 43, 43),
    *_deep_ep_v1(32, 58, 57),
    *_deep_ep_v1(64, 51, 50),
    *_low_latency(8, 77, 114),
    *_low_latency(16, 118, 195),
    *_low_latency(32, 155, 273),
    *_low_latency(64, 173, 314),
    *_low_latency(128, 192, 369),
    *_low_latency(256, 194, 360),
    *_deep_ep_v2("h100-cx7", 2, 12, 90, 81),
    *_deep_ep_v2("h100-cx7", 4, 6, 61, 61),
    *_deep_ep_v2("b200-cx7", 2, 12, 90, 91),
    *_deep_ep_v2("b200-cx7", 1, 64, 726, 740),
    *_hybrid_ep("h100-cx7", 2, 8, 16, 68.48, 71.71, 62.95),
    *_hybrid_ep("h100-cx7", 4, 8, 16, 55.35, 57.69, 57.46),
    *_hybrid_ep("h100-cx7", 8, 8, 16, 46.52, 49.97, 49.77),
    *_hybrid_ep("b200-cx7", 1, 8, 16, 599.27, 734.95, 673.84),
    *_hybrid_ep("gb200-cx7", 1, 8, 32, 713.98, 764.03, 737.13),
    *_hybrid_ep("gb200-cx7", 1, 16, 32, 650.48, 706.95, 666.26),
    *_hybrid_ep("gb200-cx7", 1, 32, 32, 538.86, 642.23, 605.15),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A published figure beside the model's.

    Args:
        published: The figure.
        predicted_us: The model's time.
        published_us: Published, or from the published bandwidth.
        predicted_gbs: By the bytes of the table's convention; None where the table gives times.
    """

    published: Published
    predicted_us: float
    published_us: float
    predicted_gbs: float | None

    @property
    def ratio(self) -> float:
        """Published over predicted time: above 1 the model is faster than the figure."""
        return self.published_us / self.predicted_us


def compare(published: Published, *, seed: int = 0) -> Comparison:
    """The model's time of a published case: 7168 elements, top-8, uniform routing, 256 experts.

    HybridEP's tables have 8 experts per rank instead. Rows cross links as often as that library sends
    them: once per node and rank (partial sums on the way back), or per choice in low latency.
    """
    num_ranks = published.num_nodes * published.num_local_ranks
    num_experts = 8 * num_ranks if published.who.startswith("HybridEP") else 256
    once = not published.is_low_latency
    movement = Movement(
        element_bytes=published.element_bytes, is_once_per_node=once, is_once_per_rank=once
    )
    cluster = Cluster(
        machine=CLUSTERS[published.cluster],
        num_nodes=published.num_nodes,
        num_local_ranks=published.num_local_ranks,
    )
    workload = Workload(
        num_tokens=published.num_tokens,
        hidden=7168,
        num_topk=8,
        num_experts=num_experts,
        dispatch=movement,
        combine=movement,
        max_nodes=published.max_nodes,
    )
    simulated = simulate(
        draw_traffic(workload, cluster, movement, skew=0.0, seed=seed),
        workload,
        cluster,
        is_combine=published.operation == "combine",
        count_row_bytes=count_row_bytes(num_ranks, num_experts),
    )
    row_bytes = workload.hidden * published.element_bytes
    rows = workload.num_tokens * expected_distinct_limited(
        published.num_nodes if published.num_nodes > 1 else published.num_local_ranks,
        num_experts,
        workload.num_topk,
        published.max_nodes if published.num_nodes > 1 else None,
    )
    published_us, predicted_gbs = published.time_us, None
    if published_us is None:
        assert published.gbs is not None
        published_us = rows * row_bytes / published.gbs / 1e3
        predicted_gbs = rows * row_bytes / simulated.time_us / 1e3
    return Comparison(
        published=published,
        predicted_us=simulated.time_us,
        published_us=published_us,
        predicted_gbs=predicted_gbs,
    )


def spread(comparisons: list[Comparison]) -> tuple[float, float, float]:
    """Lowest, median and highest ratio of published to predicted time."""
    ratios = sorted(comparison.ratio for comparison in comparisons)
    return ratios[0], statistics.median(ratios), ratios[-1]


def _published_table(comparisons: list[Comparison]) -> FoldedTable:
    table = Table(title="published figures against this model", title_justify="left")
    for name in ("who", "operation", "ranks", "source"):
        table.add_column(name)
    for name in ("published", "model", "published time / model"):
        table.add_column(name, justify="right")
    for one in comparisons:
        figure = one.published
        if one.predicted_gbs is None:
            numbers = (f"{one.published_us:,.0f} us", f"{one.predicted_us:,.0f} us")
        else:
            numbers = (f"{figure.gbs:,.0f} GB/s", f"{one.predicted_gbs:,.0f} GB/s")
        table.add_row(
            figure.who,
            f"{figure.operation}, {'fp8' if figure.element_bytes < 2 else 'bf16'}",
            f"{figure.num_nodes} x {figure.num_local_ranks}, {figure.cluster}",
            figure.source,
            *numbers,
            f"{one.ratio:.2f}",
        )
    return FoldedTable(table)


def published(seed: Annotated[int, typer.Option(help="Of the routing that is drawn.")] = 0) -> None:
    """Published figures against those of `moe-comm model`."""
    comparisons = [compare(figure, seed=seed) for figure in PUBLISHED]
    wide_console().print(_published_table(comparisons))
    low, median, high = spread(comparisons)
    typer.echo(
        f"published time over predicted: median {median:.2f}, from {low:.2f} to {high:.2f}. The "
        "model knows links at their stated speed, no protocol overhead and no SM limit: what it "
        "says is what a library could reach, not what it will."
    )


if __name__ == "__main__":
    typer.run(published)

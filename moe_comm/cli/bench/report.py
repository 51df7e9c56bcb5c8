"""Tables and plots of what the benchmark found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from moe_comm.cli.bench.case import BenchCase
from moe_comm.cli.bench.columns import add_columns, number, plot_times, ratio
from moe_comm.cli.bench.parts import PARTS
from moe_comm.cli.bench.result import BenchRow
from moe_comm.cli.command_rules import FoldedTable
from moe_comm.cli.plots import new_figure

LABELS = {
    "dispatch": "dispatch",
    "combine": "combine, in place",
    "combine_copy_in": "combine, ordinary tensor",
    "dispatch+combine": "dispatch + combine",
    "dispatch+experts+combine": "dispatch + experts + combine",
    "differentiable_overhead": "differentiable overhead",
}


def header_line(environment: dict[str, Any]) -> str:
    """The environment on one line."""
    huge = environment["transparent_huge_pages"]
    return (
        f"moe-comm {environment['version']} ({environment['commit'] or 'installed'}) | "
        f"{environment['cpu']}, {environment['cores']} cores, {environment['isa'] or 'no native module'} | "
        f"kernel {environment['kernel']}, shmem_enabled={huge['shmem_enabled']} | "
        f"torch {environment['torch']} | load {environment['load_average']:.2f}"
    )


def case_title(case: BenchCase, *, is_sweep: bool = False) -> str:
    """The case on one line; of a sweep, without its tokens."""
    routing = f"routing {case.routing.name}" if case.routing else f"skew {case.skew:g}"
    kind = "" if case.api == "native" else f", {case.api}"
    if case.quantization is not None:
        assert case.quantization.scale_format is not None
        order = "column-major" if case.quantization.is_column_major else "row-major"
        kind = (
            f", {case.quantization.format.name} with {case.quantization.scale_format.name} scales, "
            f"{order}"
        )
    if case.placement is not None:
        kind += f", {max(map(len, case.placement.slots))} slots a rank, {case.replica_rule}"
    tokens = "sweep over tokens" if is_sweep else f"{case.num_tokens} tokens each"
    return (
        f"dispatch-combine: {case.num_ranks} ranks, {tokens}, hidden {case.hidden}, "
        f"top-{case.num_topk} of {case.num_experts}, {case.dtype}{kind}, {case.layout.name}, "
        f"alignment {case.expert_alignment}, {routing}"
    )


def result_table(rows: Sequence[BenchRow], missing_peers: dict[str, str]) -> Group:
    """Times, bandwidth and ratios of one case; memory and notes below."""
    peers = sorted({peer for row in rows for peer in row.speedup})
    across = ("internode_bytes", "internode_formula_bytes")
    is_across_nodes = any(across[0] in row.extra for row in rows)
    table = Table(title=case_title(rows[0].case), title_justify="left")
    table.add_column("operation")
    for name in ("p50 us", "p95 us", "MB", "GB/s", "roof GB/s", "of roof", "pairs (dropped)"):
        table.add_column(name, justify="right")
    table.add_column("roof state")
    if is_across_nodes:
        add_columns(table, "MB between nodes", "by formula")
    add_columns(table, *(f"vs {peer}" for peer in peers))
    table.add_column("check")
    notes: list[Text] = []
    loads: BenchRow | None = None
    for row in rows:
        if row.op == "memory":
            notes.append(_memory_note(row))
            continue
        if row.op == "rows":
            loads = row
            continue
        table.add_row(
            LABELS[row.op],
            number(row.p50_us, 1),
            number(row.p95_us, 1),
            number(row.bytes, 1, 1e6),
            number(row.gbs, 1),
            number(row.roof_gbs, 1),
            number(row.fraction_of_roof, 3),
            f"{row.num_pairs} ({row.num_dropped})",
            row.roof_state or "-",
            *(number(row.extra.get(name), 3, 1e6) for name in across if is_across_nodes),
            *(ratio(row.speedup.get(peer)) for peer in peers),
            row.check,
        )
    notes += [Text(f"{peer}: not compared, {why}") for peer, why in sorted(missing_peers.items())]
    tables = [FoldedTable(table)] if table.row_count else []
    if loads is None:
        return Group(*tables, *notes)
    title = [] if tables else [Text(case_title(loads.case))]
    return Group(*title, FoldedTable(_rows_table(loads)), *tables, *notes)


def _loads_by_name(row: BenchRow) -> dict[str, dict[str, Any]]:
    """Return the loads in a row of op "rows": those of its baseline, if it has one, and of its case."""
    before = row.extra.get("baseline")
    name = "rows" if row.case.placement is None else row.case.replica_rule
    return ({} if before is None else {before["name"]: before}) | {name: row.extra}


def _rows_table(row: BenchRow) -> Table:
    """Rows of every rank, before and with replicas."""
    loads = _loads_by_name(row)
    table = Table(title="rows per rank", title_justify="left")
    table.add_column("rank")
    add_columns(table, *loads)
    by_rank = zip(*(each["rows_per_rank"] for each in loads.values()), strict=True)
    for rank_idx, numbers in enumerate(by_rank):
        table.add_row(str(rank_idx), *(f"{number:,}" for number in numbers))
    table.add_section()
    ratios = [f"{each['largest_over_mean']:.4f}" for each in loads.values()]
    table.add_row("largest over mean", *ratios)
    if "optimum_rows" in row.extra:
        blank = [""] * (len(loads) - 1)
        table.add_row("optimum of the placement", *blank, f"{row.extra['optimum_over_mean']:.4f}")
        table.add_row("largest over optimum", *blank, f"{row.extra['largest_over_optimum']:.4f}")
    return table


def sweep_tables(rows: Sequence[BenchRow]) -> Group:
    """Build the tables of a sweep: every size with the parts of its time, and the fixed cost."""
    sizes = [row for row in rows if row.op == "sweep"]
    table = Table(title=case_title(sizes[0].case, is_sweep=True), title_justify="left")
    add_columns(table, "tokens", "p50 us", "p95 us", "MB", "GB/s", "roof GB/s", "of roof")
    add_columns(table, *PARTS, "differentiable", "threads")
    table.add_column("check")
    for row in sizes:
        table.add_row(
            str(row.case.num_tokens),
            number(row.p50_us, 1),
            number(row.p95_us, 1),
            number(row.bytes, 2, 1e6),
            number(row.gbs, 1),
            number(row.roof_gbs, 1),
            number(row.fraction_of_roof, 3),
            *(number(row.extra["parts_us"][name], 1) for name in PARTS),
            ratio(row.extra["differentiable_ratio"]),
            ratio(row.extra["threads_ratio"]),
            row.check,
        )
    fixed = Table(title="fixed cost", title_justify="left")
    fixed.add_column("of")
    add_columns(fixed, "p50 us")
    fixed.add_column("against")
    add_columns(fixed, "p50 us", "ratio")
    for row in rows:
        if row.op != "fixed_cost":
            continue
        ((against, their_us),) = row.peer_p50_us.items()
        fixed.add_row(
            row.extra["what"],
            number(row.p50_us, 1),
            against,
            number(their_us, 1),
            ratio(row.extra["ratio"]),
        )
    return Group(
        FoldedTable(table),
        Text(
            f"microseconds of dispatch + combine; {', '.join(PARTS)}: what the middle half of the calls "
            "spent, which adds up; differentiable: its time over the eager time; threads: time with their "
            "number chosen by itself over that with the best fixed number"
        ),
        FoldedTable(fixed),
    )


def write_plot(path: Path, rows: Sequence[BenchRow], environment: dict[str, Any]) -> None:
    """Bars of time per operation, ours beside every peer's, on a logarithmic axis; of rows per rank.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: There is nothing to show.
    """
    timed = [row for row in rows if row.p50_us is not None and row.p50_us > 0.0]
    counted = [row for row in rows if row.op == "rows"]
    if not timed and not counted:
        raise ValueError("nothing was timed, so there is nothing to plot")
    widths = [2.0 + 2.2 * len(timed)] * bool(timed)
    widths += [2.0 + 0.5 * row.case.num_ranks * len(_loads_by_name(row)) for row in counted]
    figure = new_figure(max(6.0, sum(widths)), 4.8)
    every_axes = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    if timed:
        backend = timed[0].backend
        plot_times(every_axes[0], timed, backend, [LABELS[row.op] for row in timed])
    for row, axes in zip(counted, every_axes[len(every_axes) - len(counted) :], strict=True):
        _plot_rows(axes, row)
    title = case_title((timed or counted)[0].case) + "\n" + header_line(environment)
    figure.suptitle(title, fontsize=7)
    figure.savefig(path, dpi=150)


def _plot_rows(axes: Any, row: BenchRow) -> None:
    loads = _loads_by_name(row)
    width = 0.8 / len(loads)
    for idx, (name, each) in enumerate(loads.items()):
        places = [
            rank_idx + (idx - (len(loads) - 1) / 2) * width
            for rank_idx in range(row.case.num_ranks)
        ]
        label = f"{name}: largest {each['largest_over_mean']:.3f} of the mean"
        axes.bar(
            places, each["rows_per_rank"], width, color=f"C{len(loads) - 1 - idx}", label=label
        )
    axes.axhline(
        sum(row.extra["rows_per_rank"]) / row.case.num_ranks,
        color="gray",
        linewidth=1,
        label="mean",
    )
    if "optimum_rows" in row.extra:
        label = "optimum of the placement"
        axes.axhline(row.extra["optimum_rows"], color="black", linestyle=":", label=label)
    axes.set_xticks(range(row.case.num_ranks))
    axes.set_xlabel("rank")
    axes.set_ylabel("rows")
    axes.legend(fontsize=8)
    axes.margins(y=0.4)


def _memory_note(row: BenchRow) -> Text:
    resident, windows = row.extra["resident_bytes"], row.extra["window_bytes"]
    lines = ["memory of all ranks, resident (windows by formula):"]
    for stage, meaning in (
        ("dispatch", "received rows"),
        ("combine", "received rows, expert output in the heap, sums"),
        ("combine_copy_in", "received rows, copy of an expert output outside the heap, sums"),
    ):
        lines.append(
            f"  after {LABELS[stage]}: {resident[stage] / 1e6:.1f} MB ({windows[stage] / 1e6:.1f} MB: {meaning})"
        )
    lines.append(
        f"  the expert output outside the heap itself: {row.extra['ordinary_expert_output_bytes'] / 1e6:.1f} MB more"
    )
    return Text("\n".join(lines))

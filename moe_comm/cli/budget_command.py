"""`moe-comm budget`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import torch
import typer
from rich.table import Table

from moe_comm.cli.bench.case import BenchCase
from moe_comm.cli.bench.options import BenchOptions
from moe_comm.cli.bench.replicas import placement_by_loads
from moe_comm.cli.bench.run import check_options
from moe_comm.cli.command_rules import FoldedTable, in_a_sentence, wide_console
from moe_comm.cli.options import (
    DtypeName,
    LayoutName,
    QuantizationName,
    ScaleFormatName,
    layout_of,
    quantization_of,
    reduced_ranks,
)
from moe_comm.ep import budget as formulas
from moe_comm.ep.config import Capacity
from moe_comm.ep.validation import check_capacity


def budget(
    ranks: Annotated[int, typer.Option(min=1, help="Ranks.")] = 8,
    local_ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a node [default: all].")
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens of every rank and microbatch.")] = 4096,
    hidden: Annotated[int, typer.Option(min=1, help="Elements per row.")] = 7168,
    topk: Annotated[int, typer.Option(min=1, help="Choices per token.")] = 8,
    experts: Annotated[int, typer.Option(min=1, help="Experts over all ranks.")] = 64,
    replicas: Annotated[
        int | None,
        typer.Option(min=0, help="Further slots of every rank, for replicas of experts."),
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Element type of rows.")] = "bf16",
    moe_layers: Annotated[int, typer.Option(min=1, help="MoE layers of a rank.")] = 1,
    microbatches: Annotated[
        int, typer.Option(min=1, help="Microbatches whose backward is still to come.")
    ] = 1,
    recompute: Annotated[
        bool, typer.Option(help="The backward recomputes MoE layers, dispatch included.")
    ] = False,
    weights_in_combine: Annotated[
        bool, typer.Option(help="Combine applies router weights, not the experts.")
    ] = True,
    alignment: Annotated[
        int, typer.Option(min=1, help="Rows per local expert are padded to a multiple.")
    ] = 1,
    imbalance: Annotated[
        float, typer.Option(min=1.0, help="Rows of the busiest rank over the mean.")
    ] = 1.0,
    worst_case: Annotated[bool, typer.Option(help="All tokens go to the same rank.")] = False,
    layout: Annotated[LayoutName, typer.Option(help="Order of rows.")] = "expert-major",
    quantization: Annotated[
        QuantizationName, typer.Option(help="Rows are quantized while they are dispatched.")
    ] = "none",
    scale_format: Annotated[
        ScaleFormatName | None,
        typer.Option(help="Format of scale factors [default: the quantization's first]."),
    ] = None,
    column_major_scales: Annotated[
        bool, typer.Option("--column-major-scales", help="Scale factors in columns.")
    ] = False,
    capacity_rows: Annotated[
        int | None, typer.Option(min=0, help="Rows of every dispatch, exactly; more are dropped.")
    ] = None,
    capacity_rows_per_expert: Annotated[
        int | None, typer.Option(min=0, help="Most rows of an expert; more are dropped.")
    ] = None,
    node_reduction: Annotated[
        bool, typer.Option("--node-reduction", help="Rows are added on their node first.")
    ] = False,
    rank_reduction: Annotated[
        bool, typer.Option("--rank-reduction", help="Rows are added on their rank first, by GPUs.")
    ] = False,
    across_gpus: Annotated[
        bool, typer.Option("--across-gpus", help="Ranks lie on several GPUs of one node.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say how many bytes a configuration needs before anything is allocated."""
    with in_a_sentence("budget"):
        # The case that the benchmark would run: what it refuses is refused here.
        case = BenchCase(
            num_ranks=ranks,
            num_tokens=tokens,
            hidden=hidden,
            num_topk=topk,
            num_experts=experts,
            dtype=dtype,
            layout=layout_of(layout),
            quantization=quantization_of(quantization, scale_format, column_major_scales, dtype),
            expert_alignment=alignment,
            reduced_local_ranks=reduced_ranks(local_ranks, node_reduction),
            rank_reduction=rank_reduction,
        )
        check_options(case, BenchOptions(num_local_ranks=local_ranks))
        capacity = None
        if capacity_rows is not None or capacity_rows_per_expert is not None:
            capacity = Capacity(
                num_rows=capacity_rows,
                num_rows_per_expert=capacity_rows_per_expert,
                on_overflow="drop",
            )
            check_capacity(capacity, case.layout, alignment)
        config = case.config
        if replicas is not None:
            # Sizes follow from the number of slots, whatever lies in them.
            placement = placement_by_loads(torch.ones(experts), ranks, replicas)
            config = dataclasses.replace(config, placement=placement)
        num_slots = int(config.resolve_expert_rank(ranks).bincount().max())
        sizes = config.window_sizes(
            ranks,
            expert_alignment=alignment,
            imbalance=imbalance,
            worst_case=worst_case,
            layout=case.layout,
            quantization=case.quantization,
            capacity=capacity,
            spans_devices=across_gpus,
        )
        result = formulas.budget_bytes(
            sizes,
            num_ranks=ranks,
            num_local_ranks=local_ranks,
            num_moe_layers=moe_layers,
            num_microbatches=microbatches,
            recompute=recompute,
            weights_in_combine=weights_in_combine,
            rail_region_bytes=config.rail_region_bytes(ranks, local_ranks or ranks),
        )
        if as_json:
            document = dataclasses.asdict(result) | {
                "machine_bytes": result.machine_bytes,
                "num_slots_per_rank": num_slots,
            }
            typer.echo(json.dumps(document, indent=1))
            return
        wide_console().print(_table(result, num_slots))
        typer.echo(f"before the first step: communicator.reserve({result.rank_bytes})")


def _table(result: formulas.Budget, num_slots: int) -> FoldedTable:
    sizes = result.sizes
    is_across_nodes = result.num_local_ranks < result.num_ranks
    title = f"windows alive at the peak, one rank of {num_slots} slots"
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    for name in ("windows", "MB each", "MB"):
        table.add_column(name, justify="right")
    for what, count, num_bytes in (
        (
            f"dispatched rows ({sizes.num_recv_rows:,} rows)",
            result.num_dispatched,
            sizes.dispatched,
        ),
        ("dispatched gradients", result.num_gradients, sizes.gradients),
        ("expert outputs", result.num_expert_outputs, sizes.expert_output),
        ("sums", result.num_sums, sizes.sums),
        ("control", 1, sizes.control),
    ):
        table.add_row(
            what, str(count), f"{num_bytes / 1e6:,.2f}", f"{count * num_bytes / 1e6:,.1f}"
        )
    table.add_section()
    table.add_row("heap of one rank", "", "", f"{result.rank_bytes / 1e6:,.1f}")
    table.add_row(
        f"heaps of {result.num_local_ranks} ranks{' of a node' if is_across_nodes else ''}",
        "",
        "",
        f"{result.machine_bytes / 1e6:,.1f}",
    )
    if is_across_nodes:
        region = f"{result.rail_region_bytes / 1e6:,.1f}"
        table.add_row("memory between nodes of one rank, on GPUs", "", "", region)
    return FoldedTable(table)

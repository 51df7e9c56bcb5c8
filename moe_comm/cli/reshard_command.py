"""`moe-comm reshard`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console
from rich.progress import Progress

from moe_comm.cli.bench.case import DTYPES
from moe_comm.cli.command_rules import example, in_a_sentence, sectioned, wide_console
from moe_comm.cli.options import DtypeName, parse_bytes
from moe_comm.cli.plots import PLOT_HELP, check_plot, write_matrix
from moe_comm.cli.reshard.explanation import Explanation, differing_shapes, kinds_of
from moe_comm.cli.reshard.model_sides import ModelSide, describe_both, rosters_of
from moe_comm.cli.reshard.report import WorldReport, size_text
from moe_comm.cli.reshard.shapes import ModelName, shape_from_options
from moe_comm.cli.reshard.traffic import Links, Traffic
from moe_comm.cli.reshard.world import Planner, PlanningCase
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.resharding.plan.name_matching import told_apart
from moe_comm.resharding.plan.plan_check import format_plan, verify_plans
from moe_comm.resharding.plan.unmatched_names import unmatched_names

# Up to so many ranks the plans of all are held at once, and both ends of every piece compared.
NUM_MAX_COMPARED_RANKS = 32
# A rank of a model of a trillion parameters takes most of a second.
NUM_MAX_RANKS = 64
NUM_SAMPLED_RANKS = 16

SourceRanks: TypeAlias = Annotated[int, typer.Option(min=1, help="Ranks of the source.")]
DestinationRanks: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, help="Ranks of the destination [default: as many as the source]."),
]
Disjoint: TypeAlias = Annotated[
    bool, typer.Option(help="The destination has ranks of its own, after the source's.")
]

Plot: TypeAlias = Annotated[
    Path | None,
    typer.Option(help=f"{PLOT_HELP} Bytes: a source rank a row, a destination rank a column."),
]

reshard_app = typer.Typer(
    help="Plan how weights move between two layouts.",
    epilog=example("moe-comm reshard plan --from tp2.ep4 --to tp4"),
    rich_markup_mode=None,
)


@reshard_app.callback()
def reshard() -> None:
    """Plan how weights move between two layouts."""


@reshard_app.command(
    "plan",
    cls=sectioned(
        {
            "Sizes of the model": "layers dense_layers hidden heads query_groups experts expert_ffn "
            "shared_expert_ffn ffn vocab fused_experts dtype destination_dtype",
            "Machines": "slot_bytes ranks_per_node intranode_gbs internode_gbs memory_gbs",
        }
    ),
    epilog=example("moe-comm reshard plan --from tp4.ep4 --to tp8 --model deepseek-v3 --json"),
)
def plan(
    source: Annotated[
        str, typer.Option("--from", help="Layout of the source: tpN, ppN, epN, etpN with dots.")
    ],
    destination: Annotated[str, typer.Option("--to", help="Layout of the destination.")],
    source_ranks: SourceRanks = 8,
    destination_ranks: DestinationRanks = None,
    disjoint: Disjoint = False,
    model: Annotated[ModelName, typer.Option(help="Sizes to start from.")] = "deepseek-v3",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers.")] = None,
    dense_layers: Annotated[
        int | None, typer.Option(min=0, help="Layers without experts, from the first on.")
    ] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Elements per row.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads.")] = None,
    query_groups: Annotated[int | None, typer.Option(min=1, help="Key and value heads.")] = None,
    experts: Annotated[int | None, typer.Option(min=0, help="Routed experts of a layer.")] = None,
    expert_ffn: Annotated[int | None, typer.Option(min=1, help="Inner width of an expert.")] = None,
    shared_expert_ffn: Annotated[
        int | None, typer.Option(min=0, help="Inner width of the shared expert; 0 for none.")
    ] = None,
    ffn: Annotated[int | None, typer.Option(min=1, help="Inner width of a dense layer.")] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="Rows of the embedding.")] = None,
    fused_experts: Annotated[
        bool | None, typer.Option(help="A rank's experts lie in one tensor.")
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Dtype of the source's parameters.")] = "bf16",
    destination_dtype: Annotated[
        DtypeName | None, typer.Option(help="Dtype of the destination's [default: the source's].")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Plan this rank alone and list its pieces.")
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Destination ranks to plan, spread evenly; 0 for all "
            f"[default: all, or {NUM_SAMPLED_RANKS} of more than {NUM_MAX_RANKS}].",
        ),
    ] = None,
    slot_bytes: Annotated[
        str, typer.Option(help="Most bytes that a pair of ranks moves in a step.")
    ] = "256MiB",
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks that share a node.")] = 8,
    intranode_gbs: Annotated[
        float, typer.Option(help="GB/s of a rank within its node, each way.")
    ] = Links.intranode_gbs,
    internode_gbs: Annotated[
        float, typer.Option(help="GB/s of a rank to other nodes, each way.")
    ] = Links.internode_gbs,
    memory_gbs: Annotated[float, typer.Option(help="GB/s of a rank's memory.")] = Links.memory_gbs,
    plot: Plot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what a reshard moves, between whom, and how long that takes.

    Metadata of every rank is made, no tensor is; every plan is verified.
    """
    console = wide_console()
    with in_a_sentence("reshard"):
        _check_plot(plot, rank)
        case = PlanningCase(
            shape=shape_from_options(
                model,
                num_layers=layers,
                num_dense_layers=dense_layers,
                hidden=hidden,
                num_heads=heads,
                num_query_groups=query_groups,
                num_experts=experts,
                expert_ffn=expert_ffn,
                shared_expert_ffn=shared_expert_ffn,
                ffn=ffn,
                vocab=vocab,
                has_fused_experts=fused_experts,
            ),
            source=Parallelism.parse(source, source_ranks),
            destination=Parallelism.parse(destination, destination_ranks or source_ranks),
            is_disjoint=disjoint,
            source_dtype=DTYPES[dtype],
            destination_dtype=DTYPES[destination_dtype or dtype],
        )
        links = Links(
            ranks_per_node=ranks_per_node,
            intranode_gbs=intranode_gbs,
            internode_gbs=internode_gbs,
            memory_gbs=memory_gbs,
        )
        num_slot_bytes = parse_bytes(slot_bytes)
        if rank is not None:
            _print_rank(console, Planner.of_case(case), rank, as_json=as_json)
            return
        start = time.perf_counter()
        if sample is None and case.destination.num_ranks > NUM_MAX_RANKS:
            sample = NUM_SAMPLED_RANKS
        planned_ranks = _spread(case.destination_ranks, sample or 0)
        traffic, are_pairs_verified = _plan_ranks(
            console, lambda: Planner.of_case(case), planned_ranks, case.destination.num_ranks
        )
        report = WorldReport(
            case=case,
            traffic=traffic,
            planned_ranks=planned_ranks,
            are_pairs_verified=are_pairs_verified,
            links=links,
            slot_bytes=num_slot_bytes,
            plan_s=time.perf_counter() - start,
        )
        if as_json:
            typer.echo(json.dumps(report.to_dict(), indent=1))
        else:
            console.print(report.render())
        _write_plot(plot, traffic)


@reshard_app.command(
    "explain",
    epilog=example(
        "moe-comm reshard explain ./Qwen3-30B-A3B my_engine:rank_part --from ep4 \\",
        "    --source-ranks 8 --destination-ranks 2 --disjoint",
    ),
)
def explain(
    source: Annotated[
        str,
        typer.Argument(help="Model that is read: a folder, name or class, or module:name."),
    ],
    destination: Annotated[str, typer.Argument(help="Model that is written, likewise.")],
    source_layout: Annotated[
        str | None, typer.Option("--from", help="Layout of the source: tpN, fsdpN, epN with dots.")
    ] = None,
    destination_layout: Annotated[
        str | None, typer.Option("--to", help="Layout of the destination.")
    ] = None,
    source_ranks: SourceRanks = 1,
    destination_ranks: DestinationRanks = None,
    disjoint: Disjoint = False,
    dtype: Annotated[
        DtypeName | None,
        typer.Option(help="Dtype of the source's weights [default: its configuration's]."),
    ] = None,
    destination_dtype: Annotated[
        DtypeName | None, typer.Option(help="Dtype of the destination's, likewise.")
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="Tensors that no destination takes are an error, too.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Plan this rank alone and list its pieces.")
    ] = None,
    plot: Plot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say which tensors of two models match, and which are missing.

    Both are made on the meta device, rank by rank in this process: no weights are
    loaded and no other process is started. A model is a folder with a configuration
    of transformers, its owner/name on the hub, or a class of transformers; or module:name of
    yours, called with a rank and the number of ranks, which returns CheckpointViews, a
    module, or an engine whose load_weights then says where everything goes.
    """
    console = wide_console()
    with in_a_sentence("reshard"):
        _check_plot(plot, rank)
        sides = (
            ModelSide(
                source, source_layout, source_ranks, None if dtype is None else DTYPES[dtype]
            ),
            ModelSide(
                destination,
                destination_layout,
                destination_ranks or source_ranks,
                None if destination_dtype is None else DTYPES[destination_dtype],
            ),
        )
        offset = source_ranks if disjoint else 0
        parts = describe_both(*sides, offset)
        by_rank = rosters_of(*parts, offset)
        missing, extra = unmatched_names(told_apart(by_rank))
        planner = Planner(by_rank, strict=strict and not extra)
        differing = differing_shapes(*parts)
        traffic, are_pairs_verified = None, False
        if not missing and not differing:
            if rank is not None:
                _print_rank(console, planner, rank, as_json=as_json)
                return
            ranks = range(offset, offset + sides[1].num_ranks)
            traffic, are_pairs_verified = _plan_ranks(console, lambda: planner, ranks, len(ranks))
        explanation = Explanation(
            source=sides[0],
            destination=sides[1],
            is_disjoint=disjoint,
            kinds=kinds_of(*parts, offset),
            missing=missing,
            extra=extra,
            differing=differing,
            traffic=traffic,
            are_pairs_verified=are_pairs_verified,
        )
        if as_json:
            typer.echo(json.dumps(explanation.to_dict(), indent=1))
        else:
            console.print(explanation.render(), highlight=False)
        if traffic is not None:
            _write_plot(plot, traffic)
        if traffic is None or (strict and extra):
            raise typer.Exit(1)


def _spread(ranks: range, count: int) -> list[int]:
    """`count` of the ranks, evenly; all of them for 0."""
    if not 0 < count < len(ranks):
        return list(ranks)
    return [ranks[i * len(ranks) // count] for i in range(count)]


def _plan_ranks(
    console: Console,
    make_planner: Callable[[], Planner],
    planned_ranks: Sequence[int],
    num_destinations: int,
) -> tuple[Traffic, bool]:
    """Plan and verify; what moves, and whether both ends of every piece were compared."""
    # Printed to standard error: what is on standard output may be read by a program.
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("metadata", total=len(planned_ranks))
        planner = make_planner()
        traffic = Traffic(planner.num_ranks)
        is_whole = len(planned_ranks) == num_destinations
        if planner.num_ranks <= NUM_MAX_COMPARED_RANKS and is_whole:
            plans = {each: planner.plan(each) for each in range(planner.num_ranks)}
            verify_plans(plans)
            for each in planned_ranks:
                traffic.add_received(plans[each])
            return traffic, True
        for each in planned_ranks:
            traffic.add_received(planner.plan(each))
            progress.update(task, description=f"rank {each}", advance=1)
    return traffic, False


def _print_rank(console: Console, planner: Planner, rank: int, *, as_json: bool) -> None:
    """One rank's plan, verified."""
    planned = planner.plan(rank)
    if not as_json:
        console.print(format_plan(planned), highlight=False, markup=False, soft_wrap=True)
        return
    pieces = [
        {
            "parameter": op.param_name,
            "peer": op.peer_rank,
            "is_send": op.is_send,
            "mine": [[part.start, part.stop] for part in op.my_slice],
            "peers": [[part.start, part.stop] for part in op.peer_slice],
            "view": op.my_view,
            "wire_dtype": str(op.wire_dtype).removeprefix("torch."),
            "task_id": op.task_id,
        }
        for op in (*planned.send_ops, *planned.recv_ops)
    ]
    typer.echo(
        json.dumps({"rank": rank, "num_ranks": planner.num_ranks, "pieces": pieces}, indent=1)
    )


def _check_plot(plot: Path | None, rank: int | None) -> None:
    check_plot(plot)
    if plot is not None and rank is not None:
        raise ValueError(
            f"--plot shows all ranks, and --rank {rank} plans one alone: give one of both"
        )


def _write_plot(plot: Path | None, traffic: Traffic) -> None:
    if plot is not None:
        write_matrix(
            plot,
            {pair: num_bytes / 1e6 for pair, num_bytes in traffic.bytes_per_pair.items()},
            title=f"{size_text(traffic.total_bytes)} written to destinations",
            row_label="source rank",
            column_label="destination rank",
            unit="MB",
        )

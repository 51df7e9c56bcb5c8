"""`moe-comm reshard`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from moe_comm.cli.bench.case import DTYPES
from moe_comm.cli.command_rules import example, in_a_sentence, wide_console
from moe_comm.cli.options import DtypeName, parse_bytes
from moe_comm.cli.reshard.report import WorldReport
from moe_comm.cli.reshard.shapes import ModelName, shape_from_options
from moe_comm.cli.reshard.traffic import Links, Traffic
from moe_comm.cli.reshard.world import Planner, PlanningCase
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.resharding.plan.plan_check import format_plan, verify_plans

__all__ = ["reshard_app"]

# Up to so many ranks the plans of all are held at once, and both ends of every piece compared.
NUM_MAX_COMPARED_RANKS = 32
# A rank of a model of a trillion parameters takes most of a second.
NUM_MAX_RANKS = 64
NUM_SAMPLED_RANKS = 16

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
    epilog=example("moe-comm reshard plan --from tp4.ep4 --to tp8 --model deepseek-v3 --json"),
)
def plan(
    source: Annotated[
        str, typer.Option("--from", help="Layout of the source: tpN, ppN, epN, etpN with dots.")
    ],
    destination: Annotated[str, typer.Option("--to", help="Layout of the destination.")],
    source_ranks: Annotated[int, typer.Option(min=1, help="Ranks of the source.")] = 8,
    destination_ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks of the destination [default: as many as the source]."),
    ] = None,
    disjoint: Annotated[
        bool, typer.Option(help="The destination has ranks of its own, after the source's.")
    ] = False,
    model: Annotated[ModelName, typer.Option(help="Sizes to start from.")] = ModelName.DEEPSEEK_V3,
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
    dtype: Annotated[DtypeName, typer.Option(help="Of the source's parameters.")] = DtypeName.BF16,
    destination_dtype: Annotated[
        DtypeName | None, typer.Option(help="Of the destination's [default: the source's].")
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what a reshard moves between whom, in how many steps, and how long that must take.

    Metadata of every rank is made, no tensor is; every plan is verified.
    """
    console = wide_console()
    with in_a_sentence("reshard"):
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
            source_dtype=DTYPES[dtype.value],
            destination_dtype=DTYPES[(destination_dtype or dtype).value],
        )
        links = Links(
            ranks_per_node=ranks_per_node,
            intranode_gbs=intranode_gbs,
            internode_gbs=internode_gbs,
            memory_gbs=memory_gbs,
        )
        num_slot_bytes = parse_bytes(slot_bytes)
        if rank is not None:
            _print_rank(console, case, rank, as_json=as_json)
            return
        start = time.perf_counter()
        if sample is None and case.destination.num_ranks > NUM_MAX_RANKS:
            sample = NUM_SAMPLED_RANKS
        planned_ranks = _spread(case.destination_ranks, sample or 0)
        traffic, are_pairs_verified = _plan_ranks(console, case, planned_ranks)
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


def _spread(ranks: range, count: int) -> list[int]:
    """`count` of the ranks, evenly; all of them for 0."""
    if not 0 < count < len(ranks):
        return list(ranks)
    return [ranks[i * len(ranks) // count] for i in range(count)]


def _plan_ranks(
    console: Console, case: PlanningCase, planned_ranks: Iterable[int]
) -> tuple[Traffic, bool]:
    """Plan and verify; what moves, and whether both ends of every piece were compared."""
    traffic = Traffic(case.num_ranks)
    ranks = list(planned_ranks)
    # Printed to standard error: what is on standard output may be read by a program.
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("metadata", total=len(ranks))
        planner = Planner(case)
        if case.num_ranks <= NUM_MAX_COMPARED_RANKS and len(ranks) == len(case.destination_ranks):
            plans = {each: planner.plan(each) for each in range(case.num_ranks)}
            verify_plans(plans)
            for each in ranks:
                traffic.add_received(plans[each])
            return traffic, True
        for each in ranks:
            traffic.add_received(planner.plan(each))
            progress.update(task, description=f"rank {each}", advance=1)
    return traffic, False


def _print_rank(console: Console, case: PlanningCase, rank: int, *, as_json: bool) -> None:
    """One rank's plan, verified."""
    planned = Planner(case).plan(rank)
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
    typer.echo(json.dumps({"rank": rank, "num_ranks": case.num_ranks, "pieces": pieces}, indent=1))

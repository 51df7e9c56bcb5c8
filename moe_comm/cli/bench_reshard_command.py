"""`moe-comm bench reshard`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from moe_comm.cli.bench.case import DTYPES
from moe_comm.cli.bench.environment import collect_environment
from moe_comm.cli.bench.report import header_line
from moe_comm.cli.bench.reshard.case import (
    FULL_TENSORS,
    MEMORIES,
    NUM_EXPERTS,
    RESHARD_PEERS,
    ReshardCase,
    ReshardOptions,
    TransportName,
    shape_of_bytes,
)
from moe_comm.cli.bench.reshard.engine_storage import check_uncut
from moe_comm.cli.bench.reshard.report import reshard_table, write_reshard_plot
from moe_comm.cli.bench.reshard.run import run_case
from moe_comm.cli.bench.result import to_json
from moe_comm.cli.command_rules import in_a_sentence, wide_console
from moe_comm.cli.options import DtypeName, parse_bytes, split_list
from moe_comm.cli.plots import PLOT_HELP, check_plot
from moe_comm.cli.progress import telling, write_json
from moe_comm.cli.reshard.model_shapes import MoEShape, TensorList
from moe_comm.cli.reshard.world import PlanningCase
from moe_comm.output_files import check_output
from moe_comm.resharding.describe.parallelism import Parallelism


def bench_reshard(
    ranks: Annotated[
        int, typer.Option(min=1, help="Processes, each with a part of both models.")
    ] = 4,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Layout of the source [default: tp2.ep2, with --tensors ep of all ranks].",
        ),
    ] = None,
    destination: Annotated[
        str | None,
        typer.Option(
            "--to", help="Layout of the destination [default: tp4, with --tensors single]."
        ),
    ] = None,
    source_ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Processes of the source alone, in place of --ranks."),
    ] = None,
    destination_ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Processes of the destination alone, in place of --ranks."),
    ] = None,
    size: Annotated[str, typer.Option("--bytes", help="Size of a model; see --dtype.")] = "2GiB",
    experts: Annotated[
        int, typer.Option(min=1, help="Experts of each of the model's layers.")
    ] = NUM_EXPERTS,
    tensors: Annotated[
        int | None, typer.Option(min=1, help="Move so many equal tensors instead of a model.")
    ] = None,
    tensor_bytes: Annotated[str, typer.Option(help="Size of each of --tensors.")] = "4KiB",
    dtype: Annotated[DtypeName, typer.Option(help="Dtype of the source's weights.")] = "bf16",
    destination_dtype: Annotated[
        DtypeName | None, typer.Option(help="Dtype of the destination's [default: the source's].")
    ] = None,
    memory: Annotated[
        str,
        typer.Option(
            "--destination",
            help=f"Where destinations lie, one after the other, of {','.join(MEMORIES)}; both: heap,outside.",
        ),
    ] = "both",
    stacked_experts: Annotated[
        bool,
        typer.Option(
            "--stacked-experts",
            help="Destinations hold a layer's experts in one tensor, as engines do, and describe them by "
            "views.",
        ),
    ] = False,
    transport: Annotated[
        TransportName, typer.Option(help="Copy service to measure.")
    ] = "symmetric",
    peers: Annotated[
        str,
        typer.Option(help=f"Ways to compare, of {', '.join(RESHARD_PEERS)}; empty for none."),
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Pairs with agreeing roofs to collect.")] = 9,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of every rank [default: cores / ranks].")
    ] = None,
    huge_pages: Annotated[bool, typer.Option(help="Ask for 2 MiB pages in the heap.")] = True,
    pin: Annotated[
        bool, typer.Option(help="Bind rank r to core r modulo the number of cores.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights.")] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the results here.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help=PLOT_HELP)] = None,
) -> None:
    """Move weights from one layout to another on this machine.

    What is timed is a refit after the first one of the same models, as `swap_model_weights` does it.
    """
    with in_a_sentence("bench"):
        check_output("--json", json_path)
        check_plot(plot)
        layouts = _layouts(
            (ranks, source_ranks, destination_ranks),
            source,
            destination,
            _shape(size, experts, tensors, tensor_bytes, DTYPES[dtype]),
            (DTYPES[dtype], DTYPES[destination_dtype or dtype]),
        )
        cases = [
            ReshardCase(
                layouts=layouts,
                memory=each,
                transport=transport,
                is_stacked=stacked_experts,
                seed=seed,
            )
            for each in (split_list(memory.replace("both", "heap,outside")) or (memory,))
        ]
        options = ReshardOptions(
            peers=split_list(peers),
            num_repeats=repeats,
            num_threads=threads,
            with_huge_pages=huge_pages,
            is_pinned=pin,
        )
        if FULL_TENSORS in options.peers:
            check_uncut(layouts)
        environment = collect_environment()
        console = wide_console()
        console.print(header_line(environment), soft_wrap=True)
        with telling(console) as tell:
            rows = [run_case(case, options, tell) for case in cases]
        console.print(reshard_table(rows))
        environment["pinned"] = pin
        write_json(json_path, to_json(environment, rows, {}))
        if plot is not None:
            write_reshard_plot(plot, rows, environment)


def _shape(
    size: str, experts: int, tensors: int | None, tensor_bytes: str, dtype: torch.dtype
) -> MoEShape | TensorList:
    """A model of about so many bytes, or a list of tensors."""
    if tensors is None:
        return shape_of_bytes(parse_bytes(size), dtype, experts)
    num_bytes = parse_bytes(tensor_bytes)
    if num_bytes % dtype.itemsize:
        raise ValueError(
            f"--tensor-bytes must be whole elements of {dtype.itemsize} bytes, got {num_bytes}"
        )
    return TensorList(num_tensors=tensors, size=num_bytes // dtype.itemsize)


def _layouts(
    ranks: tuple[int, int | None, int | None],
    source: str | None,
    destination: str | None,
    shape: MoEShape | TensorList,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> PlanningCase:
    """Both layouts; on the same ranks unless each side is given its own."""
    num_ranks, num_source_ranks, num_destination_ranks = ranks
    if (num_source_ranks is None) != (num_destination_ranks is None):
        raise ValueError(
            "--source-ranks and --destination-ranks belong together, got "
            f"{num_source_ranks} and {num_destination_ranks}"
        )
    is_list = isinstance(shape, TensorList)
    num_source = num_source_ranks or num_ranks
    return PlanningCase(
        shape=shape,
        source=Parallelism.parse(
            source or (f"ep{num_source}" if is_list else "tp2.ep2"), num_source
        ),
        destination=Parallelism.parse(
            destination or ("single" if is_list else "tp4"), num_destination_ranks or num_ranks
        ),
        is_disjoint=num_source_ranks is not None,
        source_dtype=dtypes[0],
        destination_dtype=dtypes[1],
    )

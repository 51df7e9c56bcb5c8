"""`moe-comm bench checkpoint`."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer

from moe_comm.cli.bench.checkpoint.case import CheckpointCase
from moe_comm.cli.bench.checkpoint.pretrained import TRANSFORMERS, run_pretrained
from moe_comm.cli.bench.checkpoint.report import checkpoint_table
from moe_comm.cli.bench.checkpoint.run import CHECKPOINT_PEERS, file_system, run_checkpoint
from moe_comm.cli.bench.environment import collect_environment
from moe_comm.cli.bench.report import header_line
from moe_comm.cli.bench.reshard.case import NUM_EXPERTS, shape_of_bytes
from moe_comm.cli.bench.result import to_json
from moe_comm.cli.command_rules import in_a_sentence, wide_console
from moe_comm.cli.options import parse_bytes, split_list
from moe_comm.cli.progress import telling, write_json
from moe_comm.output_files import check_output
from moe_comm.resharding.describe.parallelism import Parallelism


def bench_checkpoint(
    ranks: Annotated[int, typer.Option(min=1, help="Processes that save and load.")] = 4,
    source: Annotated[
        str | None,
        typer.Option("--from", help="Layout that is saved [default: ep of all ranks]."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--to", help="Layout that is loaded [default: tp2.ep of the rest]."),
    ] = None,
    size: Annotated[str, typer.Option("--bytes", help="Size of the model in bfloat16.")] = "2GiB",
    experts: Annotated[
        int, typer.Option(min=1, help="Experts of each of the model's layers.")
    ] = NUM_EXPERTS,
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="<folder>",
            help="Folder for a folder of files, made and removed [default: TMPDIR].",
        ),
    ] = None,
    peers: Annotated[
        str,
        typer.Option(help=f"Ways to compare, of {', '.join(CHECKPOINT_PEERS)}; empty for none."),
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which all ways take turns.")] = 9,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the results here.")
    ] = None,
) -> None:
    """Save a model, then load it into another layout.

    Plain files of as many bytes, by plain `write` and `read`, are timed right before and after.
    """
    with in_a_sentence("bench"):
        check_output("--json", json_path)
        chosen = split_list(peers)
        unknown = [peer for peer in chosen if peer not in CHECKPOINT_PEERS]
        if unknown:
            raise ValueError(
                f"--peers must be of {', '.join(CHECKPOINT_PEERS)}, got {', '.join(unknown)}"
            )
        if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
            found = "a file or no right to write" if folder.exists() else "nothing there"
            raise ValueError(f"--folder {folder}: expected a folder to write to, got {found}")
        shape = shape_of_bytes(parse_bytes(size), torch.bfloat16, experts)
        tensor_parallel = 2 if ranks % 2 == 0 else 1
        layouts = (
            source or f"ep{ranks}",
            target or f"tp{tensor_parallel}.ep{ranks // tensor_parallel}",
        )
        missing: dict[str, str] = {}
        if TRANSFORMERS in chosen and importlib.util.find_spec(TRANSFORMERS) is None:
            missing[TRANSFORMERS] = "pip install transformers"
        environment = collect_environment()
        console = wide_console()
        console.print(header_line(environment), soft_wrap=True)
        with (
            tempfile.TemporaryDirectory(prefix="moe-comm-checkpoint-", dir=folder) as place,
            telling(console) as tell,
        ):
            environment["file_system"] = file_system(Path(place))
            case = CheckpointCase(
                shape=shape,
                source=Parallelism.parse(layouts[0], ranks),
                target=Parallelism.parse(layouts[1], ranks),
                folder=Path(place),
            )
            rows = run_checkpoint(case, chosen, repeats, tell)
            if TRANSFORMERS in chosen and not missing:
                rows.append(run_pretrained(Path(place), shape, repeats, tell))
        environment["load_average_after"] = os.getloadavg()[0]
        console.print(checkpoint_table(case, environment, rows))
        for name, reason in missing.items():
            console.print(f"{name}: not here: {reason}")
        write_json(json_path, to_json(environment, rows, missing))

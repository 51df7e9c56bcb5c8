"""`moe-comm checkpoint`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from moe_comm.checkpoints.chains import (
    block_files_of,
    is_delta,
    open_checkpoint,
    verify_checkpoint,
)
from moe_comm.checkpoints.convert import (
    DEFAULT_QUANTIZED,
    Compaction,
    ConversionTarget,
    NewFormat,
    convert_checkpoint,
)
from moe_comm.checkpoints.stored_checkpoint import (
    StoredCheckpoint,
    checked_parts,
    find_checkpoint,
)
from moe_comm.checkpoints.tensor_file import dtype_name
from moe_comm.checkpoints.versions import read_versions
from moe_comm.cli.command_rules import FoldedTable, example, in_a_sentence, wide_console
from moe_comm.cli.options import parse_bytes

Folder: TypeAlias = Annotated[
    Path, typer.Argument(help="Folder of versions, or of one checkpoint of safetensors files.")
]
Version: TypeAlias = Annotated[
    str | None, typer.Option("--version", help="Version to read [default: the latest].")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

checkpoint_app = typer.Typer(
    help="Look at checkpoints of safetensors files, check and convert them.",
    epilog=example("moe-comm checkpoint show runs/moe"),
    no_args_is_help=True,
    rich_markup_mode=None,
)


@checkpoint_app.callback()
def checkpoint() -> None:
    """Look at checkpoints of safetensors files, check and convert them."""


@checkpoint_app.command("show", epilog=example("moe-comm checkpoint show runs/moe --tensors"))
def show(
    folder: Folder,
    version: Version = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say which versions, files, tensors and dtypes a checkpoint has.

    Reads headers, no weights.
    """
    with in_a_sentence("checkpoint"):
        found = open_checkpoint(find_checkpoint(folder, version))
        said = _summary(folder, found, with_tensors=tensors)
        if as_json:
            typer.echo(json.dumps(said, indent=1))
            return
        console = wide_console()
        console.print(_text_of(said), highlight=False, markup=False, soft_wrap=True)
        if tensors:
            table = Table()
            for heading in ("tensor", "dtype", "shape", "file"):
                table.add_column(heading)
            for each in said["tensors"]:
                table.add_row(
                    each["name"], each["dtype"], str(each["shape"]).replace(" ", ""), each["file"]
                )
            console.print(FoldedTable(table))


def _summary(folder: Path, found: StoredCheckpoint, *, with_tensors: bool) -> dict[str, Any]:
    known = read_versions(folder)
    dtypes: dict[str, dict[str, int]] = {}
    listed = []
    for name, file in found.file_of.items():
        stored = found.stored(name)
        code = dtype_name(name, stored.dtype)
        counted = dtypes.setdefault(code, {"tensors": 0, "bytes": 0})
        counted["tensors"] += 1
        counted["bytes"] += stored.stop - stored.start
        listed.append({"name": name, "dtype": code, "shape": list(stored.shape), "file": file})
    manifest = found.manifest or {}
    said: dict[str, Any] = {
        "folder": str(found.folder),
        "versions": [] if known is None else known.names,
        "latest": None if known is None else known.latest,
        "num_ranks": manifest.get("num_ranks"),
        "has_checksums": found.manifest is not None,
        "builds_on": [folder.name for folder in reversed(found.chain[:-1])],
        "files": {name: file.num_bytes for name, file in found.files.items()},
        "num_tensors": len(found.file_of),
        "dtypes": dtypes,
    }
    return said | ({"tensors": listed} if with_tensors else {})


def _text_of(said: dict[str, Any]) -> str:
    lines = [said["folder"]]
    if said["versions"]:
        lines.append(f"versions: {', '.join(said['versions'])}; the latest is {said['latest']}")
    total = sum(said["files"].values())
    whole = f"{_contents(said['num_tensors'], len(said['files']))}, {filesize.decimal(total)}"
    if said["builds_on"]:
        own = sum(size for name, size in said["files"].items() if "/" not in name)
        whole += f", of which the delta itself has {filesize.decimal(own)}"
        lines.append(f"a delta over {', over '.join(said['builds_on'])}")
    lines.append(whole)
    lines += [
        f"{code}: {_number(counted['tensors'], 'tensor')}, {filesize.decimal(counted['bytes'])}"
        for code, counted in sorted(said["dtypes"].items())
    ]
    if said["has_checksums"]:
        lines.append(f"written by {_number(said['num_ranks'], 'rank')}, with checksums")
    else:
        lines.append("without checksums: not written by save_checkpoint")
    return "\n".join(lines)


def _contents(num_tensors: int, num_files: int) -> str:
    return f"{_number(num_tensors, 'tensor')} in {_number(num_files, 'file')}"


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


@checkpoint_app.command("verify", epilog=example("moe-comm checkpoint verify runs/moe"))
def verify(folder: Folder, version: Version = None, as_json: AsJson = False) -> None:
    """Read a whole checkpoint and compare its checksums.

    Exit code 1 where something is wrong. Files, names, sizes and offsets are checked first, those of folders without
    checksums too. A delta is read through all that it builds on.
    """
    with in_a_sentence("checkpoint"):
        found = open_checkpoint(find_checkpoint(folder, version))
        num_bytes = 0
        if found.manifest is not None:
            total = sum(stored.stop - stored.start for stored in map(found.stored, found.file_of))
            num_parts = (
                sum(len(file.segments) for file in block_files_of(found).values())
                if is_delta(found)
                else sum(1 for _ in checked_parts(found))
            )
            for count in _with_progress("checksums", total, verify_checkpoint(found)):
                num_bytes += count
        said = {
            "folder": str(found.folder),
            "num_files": len(found.files),
            "num_tensors": len(found.file_of),
            "checked_bytes": num_bytes,
            "num_parts": num_parts if found.manifest is not None else 0,
        }
        if as_json:
            typer.echo(json.dumps(said, indent=1))
            return
        whole = _contents(len(found.file_of), len(found.files))
        typer.echo(
            f"{found.folder}: {whole} are whole: {filesize.decimal(num_bytes)} have their checksums"
            if found.manifest is not None
            else f"{found.folder}: {whole} fit together; there are no checksums to compare"
        )


@checkpoint_app.command(
    "convert", epilog=example("moe-comm checkpoint convert runs/moe runs/served --to fp8_block128")
)
def convert(
    folder: Folder,
    out: Annotated[
        Path, typer.Argument(help="Folder of versions: the new one is put beside what it has.")
    ],
    to: Annotated[ConversionTarget, typer.Option(help="Numbers that weights become.")] = "same",
    version: Version = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the new version [default: that of the folder read].")
    ] = None,
    quantized: Annotated[
        str, typer.Option(help="Regular expression of the weights that are quantized.")
    ] = DEFAULT_QUANTIZED,
    max_file_bytes: Annotated[str, typer.Option(help="Most bytes of tensors in a file.")] = "5GB",
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint anew in other files and numbers.

    Reads a few rows at a time. A new version is whole or not there; what is beside the tensors is taken over.
    """
    with in_a_sentence("checkpoint"):
        found = open_checkpoint(find_checkpoint(folder, version))
        new = found.folder.resolve().name if name is None else name
        total = sum(stored.stop - stored.start for stored in map(found.stored, found.file_of))
        chunks = convert_checkpoint(
            found, out, new, NewFormat(to, quantized), parse_bytes(max_file_bytes)
        )
        num_bytes = sum(_with_progress("converted", total, chunks))
        written = open_checkpoint(out / new)
        said = _summary(out, written, with_tensors=False) | {"read_bytes": num_bytes}
        typer.echo(json.dumps(said, indent=1) if as_json else _text_of(said))


@checkpoint_app.command("compact", epilog=example("moe-comm checkpoint compact runs/moe"))
def compact(
    folder: Folder,
    version: Version = None,
    name: Annotated[
        str | None, typer.Option(help='Name to write [default: the delta\'s with "-whole"].')
    ] = None,
    max_file_bytes: Annotated[str, typer.Option(help="Most bytes of tensors in a file.")] = "5GB",
    as_json: AsJson = False,
) -> None:
    """Write a delta and what it builds on as a whole version beside it.

    Nothing is removed. Where the delta is the latest version, the whole one then is.
    """
    with in_a_sentence("checkpoint"):
        compaction = Compaction(folder, version, name)
        found = compaction.source
        total = sum(stored.stop - stored.start for stored in map(found.stored, found.file_of))
        chunks = compaction.chunks(parse_bytes(max_file_bytes))
        num_bytes = sum(_with_progress("compacted", total, chunks))
        said = _summary(folder, open_checkpoint(compaction.path), with_tensors=False)
        said |= {"read_bytes": num_bytes}
        typer.echo(json.dumps(said, indent=1) if as_json else _text_of(said))


def _with_progress(what: str, total: int, counts: Iterable[int]) -> Iterable[int]:
    """Pass counts of bytes on, and show how far they are."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    # Printed to standard error: what is on standard output may be read by a program.
    console = Console(stderr=True)
    # A pipe or a log would get an empty line of it.
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=total)
        for count in counts:
            progress.update(task, advance=count)
            yield count

"""`moe-comm bench summary`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_comm.cli.bench.picture import DARK, LIGHT, draw, picture_of
from moe_comm.cli.bench.recorded import load_recorded
from moe_comm.cli.bench.tables import markdown_tables, write_between_marks

__all__ = ["bench_summary"]


def bench_summary(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Of JSON files of the benchmark.")
    ],
    page: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Write the tables between this page's marks."
        ),
    ] = None,
    pictures: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Draw measured-{light,dark}.svg in here."),
    ] = None,
) -> None:
    """Tables and a picture of recorded results; without --page the tables are printed.

    The same files always give the same bytes.
    """
    try:
        results = load_recorded(folder)
        tables = markdown_tables(results)
        drawn = (
            {palette.name: draw(picture_of(results), palette) for palette in (LIGHT, DARK)}
            if pictures is not None
            else {}
        )
        if page is not None:
            write_between_marks(page, tables)
        for name, text in drawn.items():
            assert pictures is not None
            (pictures / f"measured-{name}.svg").write_text(text, encoding="utf-8")
    except ValueError as error:
        typer.echo(f"moe-comm bench: {error}", err=True)
        raise typer.Exit(1) from error
    if page is None:
        typer.echo(tables)

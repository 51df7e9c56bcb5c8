"""Tables of docs/measured.md and the picture of the README, from recorded results.

Run from the root of the repository:

    python -m benchmarks.summary benchmarks/results --page docs/measured.md --pictures docs/pictures
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.picture import draw, picture_of
from benchmarks.recorded import load_recorded
from benchmarks.tables import markdown_tables, write_between_marks
from moe_comm.cli.bench.svg import DARK, LIGHT
from moe_comm.output_files import check_output


def summary(
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
        check_output("--page", page)
        for palette in (LIGHT, DARK) if pictures is not None else ():
            assert pictures is not None
            check_output("--pictures", pictures / f"measured-{palette.name}.svg")
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
        if page is None:
            typer.echo(tables)
    except (ValueError, OSError) as error:
        typer.echo(f"benchmarks.summary: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(summary)

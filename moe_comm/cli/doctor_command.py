"""`moe-comm doctor`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.table import Table

from moe_comm.cli.command_rules import in_a_sentence, wide_console
from moe_comm.cli.doctor import examine


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what is installed, which backend is used, what is missing and how to get it.

    Exit code 0 when the default backend works.
    """
    with in_a_sentence("doctor"):
        findings = examine()
        works = all(finding.is_present for finding in findings if finding.is_required)
        if as_json:
            document = {
                "works": works,
                "findings": [dataclasses.asdict(finding) for finding in findings],
            }
            typer.echo(json.dumps(document, indent=1))
        else:
            table = Table()
            for name in ("what", "here", "found", "if missing"):
                table.add_column(name, overflow="fold")
            for finding in findings:
                here = "yes" if finding.is_present else ("NO" if finding.is_required else "no")
                remedy = "" if finding.is_present else finding.remedy
                table.add_row(finding.name, here, finding.detail, remedy)
            wide_console().print(table)
            typer.echo(
                "the default backend works" if works else "the default backend does not work"
            )
        if not works:
            raise typer.Exit(1)

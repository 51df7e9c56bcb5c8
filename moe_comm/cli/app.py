"""Wires the commands together."""

from __future__ import annotations

import typer

from moe_comm.cli.bench_command import bench_app
from moe_comm.cli.budget_command import budget
from moe_comm.cli.doctor_command import doctor
from moe_comm.cli.model_command import model
from moe_comm.cli.reshard_command import reshard_app
from moe_comm.cli.trace_command import trace_app

__all__ = ["app"]

app = typer.Typer(
    name="moe-comm",
    help="Measure, inspect and plan expert-parallel communication.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.command()(doctor)
app.command()(budget)
app.command()(model)
app.add_typer(trace_app, name="trace")
app.add_typer(reshard_app, name="reshard")

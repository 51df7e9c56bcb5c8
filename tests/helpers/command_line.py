"""The command `moe-comm`, in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from moe_comm.cli.app import app


def output_of(*arguments: object, exit_code: int = 0) -> str:
    """Output of the command on both streams; it must end with that exit status."""
    done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == exit_code, done.output
    return done.output

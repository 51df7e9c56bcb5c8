"""The `moe-comm` command: bench, doctor, budget, trace, reshard."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the `moe-comm` script."""
    # Here, because the package that a model imports must not pay for typer and rich.
    from moe_comm.cli.app import app

    app()

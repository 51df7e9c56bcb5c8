"""The `moe-comm` command: bench, doctor, budget, model, trace, reshard.

`app` wires the commands together; every `*_command` module is the options of one and what it prints, and the
folders compute. `command_rules` is what all keep. Stands on everything, and nothing stands on it.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """The `moe-comm` command, for whoever has imported the package already."""
    # Here, because the package that a model imports must not pay for typer and rich.
    from moe_comm.cli.app import app

    app(prog_name="moe-comm")

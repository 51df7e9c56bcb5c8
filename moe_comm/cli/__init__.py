"""The `moe-comm` command: bench, doctor, budget, model, trace, reshard, checkpoint.

`commands` lists them, `app` wires them together; every `*_command` module is the options of one and what it
prints, and the folders compute. `command_rules` is what all keep. Stands on everything, and nothing stands on it.
"""

from __future__ import annotations

import sys

from moe_comm.cli.commands import help_text

__all__ = ["main"]


def main() -> None:
    """Entry point of the `moe-comm` script; help does not wait for torch."""
    if sys.argv[1:] in ([], ["--help"]):
        sys.stdout.write(help_text())
        # Without a command nothing was done, and a script should not take it for success.
        raise SystemExit(0 if sys.argv[1:] else 2)
    # Here, because it imports torch, typer and rich.
    from moe_comm.cli.app import app

    app(prog_name="moe-comm")

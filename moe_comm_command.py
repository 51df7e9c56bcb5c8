"""The `moe-comm` script: its commands, and help that does not wait for torch.

Beside the package and not in it, because `import moe_comm` imports torch.
"""

from __future__ import annotations

import sys

__all__ = ["COMMANDS", "SUMMARY", "help_text", "main"]

SUMMARY = "Measure, inspect and plan expert-parallel communication."

COMMANDS = {
    "budget": "Say how many bytes a configuration needs.",
    "doctor": "Say what is here, what is missing and how to get it.",
    "model": "Predict dispatch and combine on a cluster.",
    "bench": "Check an operation, then time it against the machine.",
    "reshard": "Plan how weights move between two layouts.",
    "trace": "Show which rank waited for which, per phase.",
}
"""What every command does, short enough for a line; in the order in which they are listed."""

EXAMPLE = "moe-comm doctor"


def help_text() -> str:
    """What `moe-comm --help` prints."""
    width = max(len(name) for name in COMMANDS) + 2
    commands = "".join(f"  {name:{width}}{what}\n" for name, what in COMMANDS.items())
    return (
        "Usage: moe-comm [OPTIONS] COMMAND [ARGS]...\n\n"
        f"  {SUMMARY}\n\n"
        "Options:\n  --help  Show this message and exit.\n\n"
        f"Commands:\n{commands}\n"
        f"  Example:\n    {EXAMPLE}\n"
    )


def main() -> None:
    """Entry point of the `moe-comm` script."""
    if sys.argv[1:] in ([], ["--help"]):
        sys.stdout.write(help_text())
        # Without a command nothing was done, and a script should not take it for success.
        raise SystemExit(0 if sys.argv[1:] else 2)
    # Here, because it imports torch.
    from moe_comm.cli.app import app

    app(prog_name="moe-comm")

"""Commands of `moe-comm` and its first page, for which nothing else is loaded."""

from __future__ import annotations

SUMMARY = "Measure, inspect and plan expert-parallel communication."

COMMANDS = {
    "doctor": "Show what is installed, what is missing and how to get it.",
    "budget": "Compute the memory that a configuration needs.",
    "model": "Predict dispatch and combine on a cluster.",
    "bench": "Check an operation, then time it against the machine.",
    "reshard": "Plan how weights move between two layouts.",
    "checkpoint": "Show, verify and convert checkpoints of safetensors files.",
    "trace": "Show which rank waited for which, per phase.",
}
"""Purpose of every command, short enough for a line; in the order in which they are listed."""

EXAMPLE = "moe-comm doctor"


def help_text() -> str:
    """Return the text that `moe-comm --help` prints."""
    width = max(len(name) for name in COMMANDS) + 2
    commands = "".join(f"  {name:{width}}{what}\n" for name, what in COMMANDS.items())
    return (
        "Usage: moe-comm [OPTIONS] COMMAND [ARGS]...\n\n"
        f"  {SUMMARY}\n\n"
        "Options:\n  --help  Show this message and exit.\n\n"
        f"Commands:\n{commands}\n"
        f"  Example:\n    {EXAMPLE}\n"
    )

"""Every fault that `MOE_MUTANT` can switch on, and what finds it; see docs/emulator.md."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: As in `MOE_MUTANT(name)`.
        files: Of csrc, where it can be switched on.
        rule: What holds without it.
        scenarios: Of the program `schedules`; each of them finds it.
        kinds: What it is found as, one of them.
        programs: Of tests/cpp; each of them finds it.
    """

    name: str
    files: tuple[str, ...]
    rule: str
    scenarios: tuple[str, ...]
    kinds: tuple[str, ...]
    programs: tuple[str, ...] = ()


def _read_catalogue() -> tuple[Mutant, ...]:
    entries = json.loads(Path(__file__).with_suffix(".json").read_text())
    return tuple(
        Mutant(
            entry["name"],
            tuple(entry["files"]),
            entry["rule"],
            tuple(entry["scenarios"]),
            tuple(entry["kinds"]),
            tuple(entry.get("programs", ())),
        )
        for entry in entries
    )


CATALOGUE = _read_catalogue()

"""Results that `--json` wrote, read again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
    """One file of results.

    Args:
        name: Of the file, without its ending.
        environment: Where and with what it was recorded.
        cases: As `BenchRow.to_dict` and `ReshardRow.to_dict` give them.
    """

    name: str
    environment: dict[str, Any]
    cases: tuple[dict[str, Any], ...]

    def case(self, op: str, **values: object) -> dict[str, Any]:
        """The one case of this operation that has these values.

        Raises:
            ValueError: None has, or several have.
        """
        wanted = {"op": op, **values}
        found = [case for case in self.cases if wanted.items() <= case.items()]
        if len(found) != 1:
            raise ValueError(
                f"{self.name}.json: expected one case with {wanted}, found {len(found)}"
            )
        return found[0]


def load_recorded(folder: Path) -> dict[str, Recorded]:
    """Every `.json` file of a folder by name, in order of names.

    Raises:
        ValueError: There is none, one was not written by the benchmark, or a result in one was wrong.
    """
    results = {}
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            cases = tuple(document["cases"])
            wrong = [f"{case['op']}: {case['check']}" for case in cases if case["check"] != "ok"]
            environment = document["environment"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no results of `moe-comm bench`: {error!r}") from error
        if wrong:
            raise ValueError(f"{path} holds wrong results: expected ok, found {', '.join(wrong)}")
        results[path.stem] = Recorded(name=path.stem, environment=environment, cases=cases)
    if not results:
        raise ValueError(f"{folder} holds no .json file of `moe-comm bench --json`")
    return results


def mpi_names(results: Iterable[Recorded]) -> str:
    """Which MPI was the peer "mpi", with commas where files differ; files that do not say had Open MPI."""
    found = {
        str(recorded.environment.get("mpi", "Open MPI"))
        for recorded in results
        if any("mpi" in case["speedup"] for case in recorded.cases if "speedup" in case)
    }
    return ", ".join(sorted(found)) or "MPI"


def machine_line(results: Iterable[Recorded]) -> str:
    """Processor, cores and instruction set, which all files share.

    Raises:
        ValueError: Two files come from different machines.
    """
    first, line = "", ""
    for recorded in results:
        found = recorded.environment
        here = f"{found['cpu']}, {found['cores']} cores, {found['isa']}"
        if line and here != line:
            raise ValueError(
                f"results of two machines: {first}.json of {line}, {recorded.name}.json of {here}"
            )
        first, line = first or recorded.name, here
    return line

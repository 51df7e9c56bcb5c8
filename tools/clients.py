"""The page of clients: which releases of which frameworks ran over this package, from what pytest recorded.

python tools/clients.py add build/clients.xml     # of `pytest --junitxml`, into benchmarks/results/clients
python tools/clients.py page                      # docs/clients.md, from all that was recorded
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/clients"
PAGE = ROOT / "docs/clients.md"
KEYS = ("framework", "release", "way", "ran", "test")
# What sets a framework up and runs its tests; by itself `TEST` runs one row.
COMMANDS = {
    "transformers": "make test-transformers TEST_ARGS='-k {name}'",
    "TRL": "make test-refit-clients TEST_ARGS='-k {name}'",
    "SGLang": "make test-refit-clients TEST_ARGS='-k {name}'",
    "miles": "PYTHONPATH=<checkout of {release}> python -m pytest {test}",
    "verl": "make test-refit-clients TEST_ARGS='-k {name}'",
    "Megatron-Core": "make test-megatron TEST_ARGS='-k {name}'",
    "vLLM": "make test-vllm TEST_ARGS='-k {name}'",
    "torchtitan": "python -m pytest {test}",
    "DeepEP": "DEEP_EP_SOURCE=<checkout of {release}> python -m pytest {test}",
}
HEAD = """\
# What ran over this package

```
python -m pytest tests/multiprocess/test_torchtitan.py --junitxml build/clients.xml
python tools/clients.py add build/clients.xml     # what passed, into benchmarks/results/clients
python tools/clients.py page                      # this page, from there
```

Releases of frameworks, unchanged but for the ways that a row names, and the command that runs its test again, against the release that the Makefile
names today (Megatron-Core's: two). `make` sets up what its targets need. Dates are of the newest run. No row is of a GPU. No release of SGLang
generates where these tests run ([sglang.md](sglang.md)): its rows are its loading of weights, with other needs stood in for, and its tables of experts.

"""


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Rows of one run of pytest, a row for all cases of a test that say the same of themselves.

    Raises:
        ValueError: A test failed, or the file has none of a client that ran.
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for suite in ET.parse(path).getroot().iter("testsuite"):
        for case in suite.iter("testcase"):
            said = {each.get("name"): each.get("value") for each in case.iter("property")}
            for kind in ("failure", "error"):
                if case.find(kind) is not None:
                    # One that ends before it begins says nothing of itself.
                    test = f"{case.get('classname')}.{case.get('name')}"
                    raise ValueError(f"{path}: {test} ended in {kind}")
            if "framework" not in said or case.find("skipped") is not None:
                continue
            key = tuple(str(said[name]) for name in KEYS)
            row = found.setdefault(
                key, {**said, "cases": 0, "when": str(suite.get("timestamp"))[:10]}
            )
            row["cases"] += 1
    if not found:
        raise ValueError(f"{path}: no test of a client ran")
    return list(found.values())


def add(path: Path, results: Path = RESULTS) -> list[Path]:
    """Put the rows of a run beside those recorded, in the place of earlier ones of the same tests."""
    by_release: dict[tuple[str, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for row in rows_of(path):
        by_release[row["framework"], row["release"]].append(row)
    written = []
    results.mkdir(parents=True, exist_ok=True)
    for (framework, release), rows in sorted(by_release.items()):
        target = results / f"{framework}_{release}.json".lower().replace("/", "-")
        ran_now = {row["test"] for row in rows}
        kept = [row for row in _recorded([target]) if row["test"] not in ran_now]
        text = json.dumps(sorted(kept + rows, key=_order), indent=1, sort_keys=True)
        target.write_text(text + "\n", encoding="utf-8")
        written.append(target)
    return written


def _recorded(files: Iterable[Path]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for file in files:
        if file.exists():
            rows += json.loads(file.read_text(encoding="utf-8"))
    return rows


def _order(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[name].lower() for name in KEYS)


def _joined(texts: Iterable[str]) -> str:
    """All texts once; those that say the same behind a colon say it together."""
    heads: dict[str, list[str]] = collections.defaultdict(list)
    for text in dict.fromkeys(texts):
        head, _, tail = text.partition(": ")
        heads[tail].append(head)
    return "; ".join(
        "; ".join(some) + (f": {tail}" if tail else "") for tail, some in heads.items()
    )


def page(results: Path = RESULTS) -> str:
    """Return the page for what was recorded: a row for all that one command runs, newest date."""
    lines = ["| framework | release | way | what was run | cases | when, with | on | again |"]
    lines.append("|---|---|---|---|---:|---|---|---|")
    places: dict[str, int] = {}
    of_releases: dict[tuple[str, ...], list[dict[str, Any]]] = collections.defaultdict(list)
    for row in sorted(_recorded(sorted(results.glob("*.json"))), key=_order):
        command = COMMANDS[row["framework"]].format(name=row["test"].partition("::")[2], **row)
        of_releases[row["framework"], f"`{command}`", row["release"]].append(row)
    # Releases in which a command ran the same share a row.
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = collections.defaultdict(list)
    for (framework, command, _), rows in of_releases.items():
        ways = "; ".join(dict.fromkeys(row["way"] for row in rows))
        alike[framework, ways, command, _joined(row["ran"] for row in rows)] += rows
    for (framework, ways, command, ran), rows in alike.items():
        on = [f"({places.setdefault(row['on'], len(places) + 1)})" for row in rows]
        told_on = ", ".join(dict.fromkeys(on))
        releases = ", ".join(dict.fromkeys(row["release"] for row in rows))
        when = max(f"{row['when']}, {row['version']}" for row in rows)
        cases = str(sum(row["cases"] for row in rows))
        cells = [framework, releases, ways, ran, cases, when, told_on, command]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    machines = [f"({place}) {on}" for on, place in places.items()]
    return HEAD + "\n".join(lines) + "\n\n" + "\n".join(machines) + "\n"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="The page of clients.")
    actions = parser.add_subparsers(dest="action", required=True)
    adding = actions.add_parser("add", help="record a run of pytest")
    adding.add_argument("xml", type=Path)
    actions.add_parser("page", help="write docs/clients.md")
    given = parser.parse_args()
    if given.action == "page":
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    try:
        written = add(given.xml)
    except (OSError, ValueError, ET.ParseError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())

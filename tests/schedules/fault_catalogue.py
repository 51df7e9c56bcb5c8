"""Faults that the checks must find: the list of them, and the program that puts them into copies of the sources.

`faults/*.txt` has entries, with an empty line between two. An entry names one fault or several that change
the same lines, and then shows the places. A line that begins with `#` outside of an entry is a comment.

    fault: no_ring_after_row
    rule: who waits for a row is woken
    scenarios: host_dispatches
    kinds: deadlock
    @@ ops/exchange.cpp
       sync::store_release(row.epoch, epoch_);
    +if (!MOE_FAULT(no_ring_after_row))
       sync::ring(group_.doorbell(peer_rank));

Behind `@@` stands a file of csrc; then, as in a patch, successive lines of it: those that stay begin with a
space, those that go with `-`, those that come with `+`. Indentation does not count. Lines that stay or go
must occur once in the file.

`MOE_FAULT(name)` (fault.h) is whether the fault is switched on, so that one program has all faults.

`python fault_catalogue.py CSRC COPIES` writes a copy of every file that has a fault. It ends with status 1,
and names the faults and the files, where a text is not there or not unique.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).with_name("faults")
SWITCH = re.compile(r"MOE_FAULT\((\w+)\)")
KEYS = ("rule", "scenarios", "kinds", "programs")


class CatalogueError(Exception):
    """Problems, an entry a line."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: As in `MOE_FAULT(name)`.
        rule: What holds without it.
        scenarios: Of the program `schedules`; each of them finds it.
        kinds: What it is found as, one of them.
        programs: Of tests/cpp; each of them finds it.
    """

    name: str
    rule: str
    scenarios: tuple[str, ...]
    kinds: tuple[str, ...]
    programs: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Successive lines of a file and what becomes of them.

    Attributes:
        file: Of csrc.
        lines: ' ', '-' or '+', and the text behind it.
        faults: Names of those whose entry this is of.
        source: Of the catalogue, relative to the repository.
        line_number: Of `lines[0]` there, from 1.
    """

    file: str
    lines: tuple[tuple[str, str], ...]
    faults: tuple[str, ...]
    source: str
    line_number: int

    def __str__(self) -> str:
        names = ", ".join(self.faults)
        return f"{self.source}:{self.line_number}: csrc/{self.file}, fault {names}"


@dataclass(frozen=True)
class Edit:
    """Lines [`begin`, `end`) of a file become `lines`, which stand in the catalogue from `line_number` on."""

    begin: int
    end: int
    lines: tuple[str, ...]
    place: Place
    line_number: int


def read_entry(source: str, numbered: Sequence[tuple[int, str]]) -> tuple[list[Fault], list[Place]]:
    """The faults and places of one entry, whose lines are `numbered` from 1."""
    fields: dict[str, dict[str, str]] = {}
    places: list[tuple[str, int, list[tuple[str, str]]]] = []
    for number, line in numbered:
        key, _, value = line.partition(": ")
        if line.startswith("@@ "):
            places.append((line[3:], number + 1, []))
        elif places and line[0] in " -+":
            places[-1][2].append((line[0], line[1:]))
        elif not places and key == "fault" and value not in fields:
            fields[value] = dict.fromkeys(KEYS, "")
        elif not places and fields and key in KEYS:
            fields[next(reversed(fields))][key] = value
        else:
            raise CatalogueError(f"{source}:{number}: not understood: {line}")
    names = tuple(fields)
    faults = [
        Fault(name, of["rule"], *(tuple(filter(None, of[key].split(", "))) for key in KEYS[1:]))
        for name, of in fields.items()
    ]
    switched = {
        name
        for _, _, lines in places
        for mark, text in lines
        if mark == "+"
        for name in SWITCH.findall(text)
    }
    if switched != set(names):
        raise CatalogueError(
            f"{source}:{numbered[0][0]}: the entry of {sorted(names)} switches {sorted(switched)}"
        )
    return faults, [
        Place(file, tuple(lines), names, source, number) for file, number, lines in places
    ]


def read_text(source: str, text: str) -> tuple[list[Fault], list[Place]]:
    """Everything in a text of the catalogue; `source` is what errors call it."""
    faults: list[Fault] = []
    places: list[Place] = []
    entry: list[tuple[int, str]] = []
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line and (entry or not line.startswith("#")):
            entry.append((number, line))
        elif entry:
            more_faults, more_places = read_entry(source, entry)
            faults += more_faults
            places += more_places
            entry = []
    return faults, places


def read_catalogue() -> tuple[tuple[Fault, ...], tuple[Place, ...]]:
    faults: list[Fault] = []
    places: list[Place] = []
    for path in sorted(FOLDER.glob("*.txt")):
        more_faults, more_places = read_text(path.relative_to(ROOT).as_posix(), path.read_text())
        faults += more_faults
        places += more_places
    return tuple(faults), tuple(places)


def names_found_by(program: str) -> list[str]:
    """The faults that a program of tests/cpp finds."""
    return [fault.name for fault in read_catalogue()[0] if program in fault.programs]


def positions_of(place: Place, lines: Sequence[str]) -> list[int]:
    """Begin of the lines of a place that are there without its faults, in a file of stripped `lines`."""
    wanted = [text.strip() for mark, text in place.lines if mark != "+"]
    num = len(wanted)
    return [i for i in range(len(lines) - num + 1) if num and lines[i : i + num] == wanted]


def edits_of(place: Place, first: int) -> Iterator[Edit]:
    """Changes of a place whose lines begin at `first`."""
    at = begin = first
    added: list[str] = []
    number = place.line_number
    for line_number, (mark, text) in enumerate((*place.lines, (" ", "")), start=place.line_number):
        if mark == " ":
            if at > begin or added:
                yield Edit(begin, at, tuple(added), place, number)
            at += 1
            begin, added = at, []
            continue
        if mark == "-":
            at += 1
        elif added:
            added.append(text)
        else:
            added, number = [text], line_number


def find_edits(text: str, places: Iterable[Place]) -> tuple[list[Edit], list[str]]:
    """Changes of the `places` of a file of that text, from its begin to its end; and what keeps them from it."""
    lines = [line.strip() for line in text.splitlines()]
    edits: list[Edit] = []
    problems: list[str] = []
    for place in places:
        found = positions_of(place, lines)
        if len(found) == 1:
            edits += edits_of(place, found[0])
        else:
            problem = f"is there {len(found)} times" if found else "is not there"
            wanted = "".join(f"\n  {text.strip()}" for mark, text in place.lines if mark != "+")
            problems.append(f"{place}: this text {problem}:{wanted}")
    edits.sort(key=lambda edit: (edit.begin, edit.end))
    problems += [
        f"{after.place}: changes the same line as {before.place}"
        for before, after in itertools.pairwise(edits)
        if after.begin < before.end or (after.begin, after.end) == (before.begin, before.end)
    ]
    return edits, problems


def with_faults(file: str, text: str, edits: Iterable[Edit]) -> str:
    """The text of a file of csrc with the changes that `find_edits` has found.

    Compilers are told where each line comes from: from the file itself or from the catalogue.
    """
    lines = text.splitlines()
    copied = ['#include "schedules/fault.h"', f'#line 1 "csrc/{file}"']
    position = 0
    for edit in edits:
        copied += lines[position : edit.begin]
        copied.append(f'#line {edit.line_number} "{edit.place.source}"')
        copied += edit.lines
        copied.append(f'#line {edit.end + 1} "csrc/{file}"')
        position = edit.end
    return "\n".join([*copied, *lines[position:]]) + "\n"


def write_copies(csrc: Path, copies: Path, places: Iterable[Place]) -> None:
    """Writes to `copies` what has changed since last time, and removes what has no fault any more."""
    of_file: dict[str, list[Place]] = {}
    for place in places:
        of_file.setdefault(place.file, []).append(place)
    texts: dict[Path, str] = {}
    problems: list[str] = []
    for file, its_places in of_file.items():
        if not (csrc / file).is_file():
            problems += [f"{place}: there is no such file" for place in its_places]
            continue
        text = (csrc / file).read_text()
        edits, more_problems = find_edits(text, its_places)
        problems += more_problems
        texts[copies / file] = with_faults(file, text, edits)
    if problems:
        raise CatalogueError("\n".join(problems))
    for path in copies.rglob("*"):
        if path.is_file() and path not in texts:
            path.unlink()
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    try:
        write_copies(Path(sys.argv[1]), Path(sys.argv[2]), read_catalogue()[1])
    except CatalogueError as error:
        sys.exit(str(error))

"""The list of faults that the checks must find is whole, and one that fits no source is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.schedules.fault_catalogue import (
    ROOT,
    CatalogueError,
    read_catalogue,
    read_text,
    write_copies,
)

SOURCE = """#pragma once

void send() {
  if (is_first)
    wait();
  write();
  ring();
}

void end() {
  wait();
}
"""
TWO_FAULTS = """# Of a file.

fault: no_ring
rule: who waits is woken
scenarios: one, two
kinds: race
@@ host/file.h
     write();
+    if (!MOE_FAULT(no_ring))
       ring();

fault: no_wait
rule: what is read has come
programs: some
@@ host/file.h
-  if (is_first)
+  if (is_first && !MOE_FAULT(no_wait))
"""
COPY = """#include "schedules/fault.h"
#line 1 "csrc/host/file.h"
#pragma once

void send() {
#line 17 "list.txt"
  if (is_first && !MOE_FAULT(no_wait))
#line 5 "csrc/host/file.h"
    wait();
  write();
#line 9 "list.txt"
    if (!MOE_FAULT(no_ring))
#line 7 "csrc/host/file.h"
  ring();
}

void end() {
  wait();
}
"""


def copy(folder: Path, catalogue: str) -> str:
    """Outcome for SOURCE."""
    (folder / "csrc/host").mkdir(parents=True)
    (folder / "csrc/host/file.h").write_text(SOURCE)
    write_copies(folder / "csrc", folder / "copies", read_text("list.txt", catalogue)[1])
    return (folder / "copies/host/file.h").read_text()


def test_the_catalogue_fits_the_sources(tmp_path: Path) -> None:
    """Every fault says what finds it and has a place; no source has one of its own."""
    faults, places = read_catalogue()
    names = [fault.name for fault in faults]
    assert len(names) == len(set(names)) >= 170
    for fault in faults:
        assert fault.rule, fault
        assert bool(fault.scenarios) == bool(fault.kinds), fault
        assert fault.scenarios or fault.programs, fault
    programs = {program for fault in faults for program in fault.programs}
    assert programs == {"dispatch_kernel", "kernel_rows", "stream_callers"}
    write_copies(ROOT / "csrc", tmp_path, places)
    copies = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    assert copies == {place.file for place in places}
    for path in (ROOT / "csrc").rglob("*.*"):
        assert "MOE_FAULT" not in path.read_text(), path


def test_a_copy_has_the_faults_of_its_file(tmp_path: Path) -> None:
    faults, _ = read_text("list.txt", TWO_FAULTS)
    assert [(fault.name, fault.rule) for fault in faults] == [
        ("no_ring", "who waits is woken"),
        ("no_wait", "what is read has come"),
    ]
    assert [(fault.scenarios, fault.kinds, fault.programs) for fault in faults] == [
        (("one", "two"), ("race",), ()),
        ((), (), ("some",)),
    ]
    assert copy(tmp_path, TWO_FAULTS) == COPY


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "     write();",
            "     read();",
            "csrc/host/file.h, fault no_ring: this text is not there",
        ),
        ("-  if (is_first)", "-  wait();", "fault no_wait: this text is there 2 times"),
        ("       ring();", "-  if (is_first)", "list.txt:8: csrc/host/file.h, fault no_ring"),
        (
            "     write();",
            "     if (is_first)",
            "this text is not there:\n  if (is_first)\n  ring();",
        ),
        ("rule: what", "role: what", "list.txt:13: not understood: role: what"),
        ("fault: no_wait", "fault: no_weight", "['no_weight'] switches ['no_wait']"),
    ],
)
def test_a_place_that_is_not_in_the_source_is_refused(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    assert TWO_FAULTS.count(old) == 1
    with pytest.raises(CatalogueError) as raised:
        copy(tmp_path, TWO_FAULTS.replace(old, new))
    assert problem in str(raised.value)
    assert not (tmp_path / "copies").exists()


def test_two_faults_of_one_line_are_refused(tmp_path: Path) -> None:
    again = TWO_FAULTS[TWO_FAULTS.index("\nfault: no_wait") :].replace("no_wait", "no")
    with pytest.raises(CatalogueError, match=r"fault no: changes the same line as .*fault no_wait"):
        copy(tmp_path, TWO_FAULTS + again)


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    csrc, copies = tmp_path / "csrc", tmp_path / "copies"
    copy(tmp_path, TWO_FAULTS)
    (csrc / "host/other.h").write_text("int one;\n")
    other = "\nfault: two\nrule: one\n@@ host/other.h\n-int one;\n+int one = MOE_FAULT(two);\n"
    write_copies(csrc, copies, read_text("list.txt", TWO_FAULTS + other)[1])
    (copies / "host/file.h").touch()
    stamps = {path: path.stat().st_mtime_ns for path in (copies / "host").iterdir()}
    assert {path.name for path in stamps} == {"file.h", "other.h"}
    (csrc / "host/other.h").write_text("long two;\nint one;\n")
    write_copies(csrc, copies, read_text("list.txt", TWO_FAULTS + other)[1])
    assert (copies / "host/file.h").stat().st_mtime_ns == stamps[copies / "host/file.h"]
    assert "long two;" in (copies / "host/other.h").read_text()
    write_copies(csrc, copies, read_text("list.txt", TWO_FAULTS)[1])
    assert [path.name for path in (copies / "host").iterdir()] == ["file.h"]


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match=r"csrc/host/file\.h, fault no_ring: there is no such"):
        write_copies(tmp_path, tmp_path / "copies", read_text("list.txt", TWO_FAULTS)[1])

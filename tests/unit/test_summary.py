"""`python -m benchmarks.summary`: what is checked in is what the recorded results give."""

from __future__ import annotations

import copy
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.picture import draw, picture_of
from benchmarks.recorded import Recorded, load_recorded
from benchmarks.summary import summary as make_summary
from benchmarks.tables import BEGIN, END, markdown_tables, write_between_marks
from moe_comm.cli.bench.svg import DARK, LIGHT, Palette

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
COMMAND = typer.Typer()
COMMAND.command()(make_summary)
SVG = "{http://www.w3.org/2000/svg}"
AGAIN = "python -m benchmarks.summary benchmarks/results --page docs/measured.md --pictures docs/pictures"

Document = dict[str, Any]


def write_results(folder: Path, change: Callable[[str, Document], None]) -> Path:
    """A copy of the recorded results in which `change` has edited every document, by name."""
    folder.mkdir()
    for path in RESULTS.glob("*.json"):
        document = json.loads(path.read_text())
        change(path.stem, document)
        (folder / path.name).write_text(json.dumps(document))
    return folder


def summary(*arguments: object) -> tuple[int, str]:
    outcome = CliRunner().invoke(COMMAND, [*map(str, arguments)])
    return outcome.exit_code, outcome.output


def bars(svg: str, color: str) -> list[float]:
    rects = ET.fromstring(svg).iter(f"{SVG}rect")
    return [float(rect.attrib["width"]) for rect in rects if rect.attrib["fill"] == color]


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=lambda palette: palette.name)
def test_checked_in_picture_is_what_the_results_give(palette: Palette) -> None:
    drawn = draw(picture_of(load_recorded(RESULTS)), palette)
    stored = (ROOT / f"docs/pictures/measured-{palette.name}.svg").read_text()
    assert drawn == stored, f"the results have changed: {AGAIN}"


def test_checked_in_tables_are_what_the_results_give() -> None:
    page = (ROOT / "docs/measured.md").read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    stored = page.split(BEGIN)[1].split(END)[0].strip()
    assert markdown_tables(load_recorded(RESULTS)) == stored, f"the results have changed: {AGAIN}"


def test_the_command_writes_both(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    assert summary(RESULTS, "--page", page, "--pictures", tmp_path) == (0, "")
    tables = markdown_tables(load_recorded(RESULTS))
    assert page.read_text() == f"above\n{BEGIN}\n{tables}\n{END}\nbelow\n"
    for palette in (LIGHT, DARK):
        name = f"measured-{palette.name}.svg"
        assert (tmp_path / name).read_text() == (ROOT / "docs/pictures" / name).read_text()
    assert summary(RESULTS) == (0, tables + "\n")


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=lambda palette: palette.name)
def test_numbers_of_the_picture_come_from_the_files(tmp_path: Path, palette: Palette) -> None:
    """Every label and every length of made-up results is as it must be."""
    ratios = {"dispatch": 8.0, "combine": 2.0, "combine_copy_in": 0.5, "heap": 4.0, "outside": 1.0}
    shares = {
        "dispatch": 0.5,
        "combine": 0.25,
        "combine_copy_in": 1.0,
        "heap": 0.1,
        "outside": 0.75,
    }

    def change(name: str, document: Document) -> None:
        for case in document["cases"]:
            key = case["destination"] if case["op"] == "reshard" else case["op"]
            if name in ("train_4_ranks", "reshard_tp2_ep2_to_tp4") and key in ratios:
                case["speedup"] = {"gloo": ratios[key], "mpi": ratios[key] / 2}
                case["fraction_of_roof"] = shares[key]
        document["environment"]["cpu"] = "Abacus & Sons"

    svg = draw(picture_of(load_recorded(write_results(tmp_path / "made_up", change))), palette)
    shown = texts(svg)
    for ratio, share in zip(ratios.values(), shares.values(), strict=True):
        assert f"{ratio:.1f} x Gloo" in shown
        assert f"{ratio / 2:.1f} x MPI" in shown
        assert f"{share:.0%}".replace("%", " %") in shown
    # A unit is what the bars share; the axis says how long 2 of them are.
    unit = bars(svg, palette.peers["gloo"])[0] / ratios["dispatch"]
    marks = {t.text: float(t.attrib["x"]) for t in ET.fromstring(svg).iter(f"{SVG}text")}
    assert marks["2"] - marks["0"] == pytest.approx(2 * unit, abs=0.2)
    assert bars(svg, palette.peers["gloo"]) == pytest.approx(
        [unit * r for r in ratios.values()], abs=0.1
    )
    assert bars(svg, palette.peers["mpi"]) == pytest.approx(
        [unit * r / 2 for r in ratios.values()], abs=0.1
    )
    tracks = bars(svg, palette.track)
    assert bars(svg, palette.roof) == pytest.approx(
        [tracks[0] * s for s in shares.values()], abs=0.1
    )
    assert any("Abacus & Sons" in text for text in shown)


@pytest.mark.parametrize("ratio", [0.4, 1.0, 11.0, 59.3, 1234.0])
def test_every_ratio_fits_the_picture(tmp_path: Path, ratio: float) -> None:
    def change(name: str, document: Document) -> None:
        for case in document["cases"]:
            case["speedup"] = dict.fromkeys(case["speedup"], ratio)

    svg = draw(picture_of(load_recorded(write_results(tmp_path / "scaled", change))), LIGHT)
    root = ET.fromstring(svg)
    names = [t for t in root.iter(f"{SVG}text") if (t.text or "").endswith((" Gloo", " MPI"))]
    roof = next(t for t in root.iter(f"{SVG}text") if t.text == "share of the memory roof")
    assert len(names) == 8
    # 8 pixels a character is more than common fonts need at this size.
    ends = [float(t.attrib["x"]) + 8 * len(t.text or "") for t in names]
    assert max(ends) <= float(roof.attrib["x"])
    assert max(bars(svg, LIGHT.peers["gloo"])) >= 40


def test_every_case_has_a_row() -> None:
    """Rows of a table are what its files hold, less what the text says has none."""
    results = load_recorded(RESULTS)
    has_row = [
        case
        for recorded in results.values()
        for case in recorded.cases
        if case["op"] not in ("memory", "differentiable_overhead", "fixed_cost")
        and (case["op"] != "sweep" or case["tokens"] in (1, 8, 64, 512, 4096))
        and (
            not case["op"].startswith(("megatron", "transformers", "vllm"))
            or (case["op"].endswith(("_forward", "_layer")) and case["speedup"])
        )
    ]
    tables = markdown_tables(results)
    assert len(re.findall(r"^\| (?!ranks|weights)", tables, re.MULTILINE)) == len(has_row) > 30
    assert all(f"`{name}`" in tables for name in results)


def test_which_mpi_was_the_peer_is_told(tmp_path: Path) -> None:
    def change(name: str, document: Document) -> None:
        if name in ("train_2_ranks", "train_4_ranks"):
            document["environment"]["mpi"] = "MPICH 5.0.2"

    results = load_recorded(write_results(tmp_path / "named", change))
    tables = markdown_tables(results)
    assert (
        "of the roof | against Gloo | against MPICH 5.0.2, Open MPI |" in tables
    )  # that of 8 ranks
    assert "from Python, p50 | against Gloo | against Open MPI |" in tables
    notes = " ".join(picture_of(results).notes)
    assert "over torch.distributed (Gloo) and over MPICH 5.0.2 (MPI) that deliver" in notes


def test_an_unknown_operation_is_an_error() -> None:
    results = dict(load_recorded(RESULTS))
    one = results["train_2_ranks"]
    cases = copy.deepcopy(one.cases)
    cases[0]["op"] = "teleport"
    results["train_2_ranks"] = Recorded(name=one.name, environment=one.environment, cases=cases)
    with pytest.raises(
        ValueError, match=r"train_2_ranks\.json: no table shows the operation 'teleport'"
    ):
        markdown_tables(results)


def break_check(name: str, document: Document) -> None:
    if name == "fp8_2_ranks":
        document["cases"][0]["check"] = "row 3 differs"


def break_machine(name: str, document: Document) -> None:
    if name == "decode_4_ranks":
        document["environment"]["cores"] = 64


def break_form(name: str, document: Document) -> None:
    if name == "decode_2_ranks":
        del document["cases"]


def break_roof(name: str, document: Document) -> None:
    for case in document["cases"]:
        case["fraction_of_roof"] = None


def break_cases(name: str, document: Document) -> None:
    if name == "train_4_ranks":
        document["cases"] = document["cases"][1:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (break_check, r"fp8_2_ranks\.json holds wrong results: expected ok, found .*row 3 differs"),
        (break_machine, r"decode_2_ranks\.json of .* 2 cores.*decode_4_ranks\.json of .* 64 cores"),
        (break_form, r"decode_2_ranks\.json holds no results"),
        (break_roof, "needs the roof of dispatch"),
        (break_cases, r"train_4_ranks\.json: expected one case with .*dispatch.*, found 0"),
    ],
)
def test_bad_results_write_nothing(
    tmp_path: Path, change: Callable[[str, Document], None], message: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\nold\n{END}\n")
    folder = write_results(tmp_path / "broken", change)
    code, output = summary(folder, "--page", page, "--pictures", tmp_path)
    assert code == 1
    assert re.search(message, " ".join(output.split())), output
    assert page.read_text() == f"{BEGIN}\nold\n{END}\n"
    assert list(tmp_path.glob("*.svg")) == []


def test_an_empty_folder_and_a_missing_file_are_named(tmp_path: Path) -> None:
    code, output = summary(tmp_path)
    assert (code, "holds no .json file" in output) == (1, True)
    (tmp_path / "other.json").write_text((RESULTS / "train_2_ranks.json").read_text())
    code, output = summary(tmp_path, "--pictures", tmp_path)
    assert (code, "needs train_4_ranks.json; there are other" in output) == (1, True)
    assert summary(tmp_path)[0] == 0


@pytest.mark.parametrize(
    "text", ["no marks\n", f"{BEGIN}\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n"]
)
def test_a_page_needs_both_marks(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="must have"):
        write_between_marks(page, "tables")
    assert page.read_text() == text

"""Texts of commands before and instead of their work: help, refusals, widths."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from moe_comm import cli
from moe_comm.cli.app import app
from moe_comm.cli.bench import serve
from moe_comm.cli.bench.run import CaseRun
from moe_comm.cli.command_rules import FoldedTable
from moe_comm.cli.commands import help_text
from moe_comm.ep.limits import NUM_MAX_EXPERTS
from tests.helpers.source_tree import captured

ROOT = Path(__file__).resolve().parents[2]
NARROW = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group, with the words that call it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


COMMANDS = list(commands(typer.main.get_command(app)))
COMMAND_IDS = ["-".join(path) or "all" for path, _ in COMMANDS]


def run(*arguments: str, **options: Any) -> Any:
    return CliRunner().invoke(app, arguments, prog_name="moe-comm", **options)


def test_help_of_the_script_imports_no_torch() -> None:
    program = (
        "import sys; sys.argv = ['moe-comm', '--help']\n"
        "from moe_comm import cli\n"
        "try:\n    cli.main()\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "print([name for name in ('torch', 'typer', 'rich', 'moe_comm.cli.app') if name in sys.modules])\n"
    )
    done = captured([sys.executable, "-c", program], check=True, cwd=ROOT)
    text, _, loaded = done.stdout.rstrip("\n").rpartition("\n")
    assert loaded == "[]"
    assert text + "\n" == help_text()


def test_the_script_is_the_entry_of_the_commands() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'moe-comm = "moe_comm.cli:main"' in text
    assert callable(cli.main)


def test_help_of_the_script_is_that_of_the_commands() -> None:
    done = run("--help", env=NARROW)
    assert done.output == help_text()


@pytest.mark.parametrize("num_columns", [80, 120])
@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=COMMAND_IDS)
def test_help_is_whole(path: tuple[str, ...], command: Any, num_columns: int) -> None:
    done = run(*path, "--help", terminal_width=num_columns - 2)  # as on a terminal
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= num_columns
    assert not [line for line in lines if line.endswith("-")], "a word is cut"
    assert "…" not in done.output
    assert not re.search(r"\w\.\.\.$", done.output, re.MULTILINE), "a summary is cut"
    for parameter in command.params:
        told = str(getattr(parameter, "help", None) or "").split()
        assert {word for word in told if "-" not in word} <= set(done.output.split())
        for name in (*parameter.opts, *parameter.secondary_opts):
            assert parameter.param_type_name == "argument" or name in re.findall(
                r"--?[a-z0-9-]+", done.output
            ), name


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=COMMAND_IDS)
def test_no_section_of_a_help_text_is_long(path: tuple[str, ...], command: Any) -> None:
    sections = re.split(r"^(\S.*):$", run(*path, "--help").output, flags=re.MULTILINE)[1:]
    lengths = {
        heading: len(re.findall(r"^  -", text, flags=re.MULTILINE))
        for heading, text in zip(sections[::2], sections[1::2], strict=True)
    }
    num_listed = sum(each.param_type_name == "option" for each in command.params)
    assert sum(lengths.values()) == num_listed + 1, lengths  # and --help
    assert max(lengths.values()) <= 20, lengths
    assert all(
        lengths[heading] for heading in lengths if heading not in ("Commands", "Arguments")
    ), lengths


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=COMMAND_IDS)
def test_the_example_of_every_command_names_real_options(
    path: tuple[str, ...], command: Any
) -> None:
    text = run(*path, "--help", env=NARROW).output.partition("Example:")[2]
    words = text.replace("\\\n", " ").split()
    assert words[: len(path) + 1] == ["moe-comm", *path], words
    of = dict(COMMANDS)
    called: tuple[str, ...] = ()
    for word in words[1:]:
        if word.startswith("-") or (*called, word) not in of:
            break
        called = (*called, word)
    known = {name for each in of[called].params for name in each.opts}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (("bench", "summary", "results"), "python -m benchmarks.summary"),
        (("bench", "summary"), "python -m benchmarks.summary"),
        (("model", "--published"), "python -m benchmarks.published"),
        (("model", "--nodes", "2", "--published", "--json"), "python -m benchmarks.published"),
    ],
)
def test_what_is_no_more_says_what_to_write(arguments: tuple[str, ...], instead: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    said = " ".join(re.sub("[^ -~]", " ", done.output).split())
    assert f"is no part of the package: in a checkout write {instead}" in said
    assert run("bench", "--help").exit_code == 0
    assert "--publish" not in run("model", "--help").output
    module = instead.removeprefix("python -m ").replace(".", "/")
    assert '__name__ == "__main__"' in (ROOT / f"{module}.py").read_text()


OUTPUTS = [
    ("bench", "checkpoint", "--json"),
    ("bench", "dispatch-combine", "--json"),
    ("bench", "dispatch-combine", "--plot"),
    ("bench", "reshard", "--json"),
    ("bench", "reshard", "--plot"),
    ("reshard", "plan", "--from", "tp2", "--to", "tp1", "--plot"),
    ("reshard", "explain", "a", "b", "--plot"),
    ("trace", "run", "--out"),
    ("trace", "run", "--plot"),
]


def test_every_command_that_writes_a_file_is_in_the_list() -> None:
    writes = [
        (*path, name)
        for path, _ in COMMANDS
        for name in re.findall(r"(--[a-z-]+) <path>", run(*path, "--help", env=NARROW).output)
    ]
    refused = [(*arguments[:2], arguments[-1]) for arguments in OUTPUTS]
    converted = [("trace", "convert", name) for name in ("--out", "--plot")]
    assert sorted(writes) == sorted([*refused, *converted])


@pytest.mark.parametrize("arguments", OUTPUTS, ids="-".join)
@pytest.mark.parametrize("kind", ["missing folder", "folder", "read-only"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    arguments: tuple[str, ...], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("the work has begun")

    for name in (
        "moe_comm.cli.bench.processes.WorkerProcesses.__init__",
        "moe_comm.cli.bench_checkpoint_command.run_checkpoint",
        "moe_comm.cli.bench_reshard_command.run_case",
        "moe_comm.cli.reshard_command.Parallelism.parse",
        "moe_comm.cli.reshard_command.describe_both",
    ):
        monkeypatch.setattr(name, work)
    path = tmp_path / "missing" / "file"
    if kind == "folder":
        path = tmp_path
    elif kind == "read-only":
        monkeypatch.setattr("moe_comm.output_files.os.access", lambda *_: False)
        path = tmp_path / "file"
    done = run(*arguments, str(path))
    assert done.exit_code == 1
    assert done.output.startswith(f"moe-comm {arguments[0]}: {arguments[-1]}")
    assert str(path) in done.output
    assert len(done.output.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [path for path in OUTPUTS if path[-1] == "--plot"], ids="-".join
)
def test_a_plot_of_another_kind_is_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*arguments, str(tmp_path / "plot.jpeg"))
    assert done.exit_code == 1
    assert "--plot must end in one of .pdf, .png, .svg, got " in done.output


def test_a_plot_of_all_ranks_is_none_of_one(tmp_path: Path) -> None:
    done = run(
        *("reshard", "plan", "--from", "tp2", "--to", "tp1", "--rank", "1"),
        *("--plot", str(tmp_path / "plan.svg")),
    )
    assert (done.exit_code, "--rank 1 plans one alone" in done.output) == (1, True)


def test_a_converted_trace_is_refused_before_traces_are_read(tmp_path: Path) -> None:
    records = tmp_path / "trace.rank0.json"
    records.write_text("not a record\n")
    done = run("trace", "convert", str(records), "--out", str(tmp_path / "missing" / "file"))
    assert (done.exit_code, "there is no folder" in done.output) == (1, True)


def test_bench_of_a_gpu_that_is_missing_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = run("bench", "dispatch-combine", "--backend", "cuda")
    assert done.exit_code == 1
    assert "the cuda backend needs a GPU" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("command", ["bench dispatch-combine", "budget", "model", "trace run"])
def test_too_many_experts_are_refused_by_their_own_limit(command: str) -> None:
    done = run(*command.split(), "--experts", str(10**6))
    assert done.exit_code == 1
    assert f"num_experts must be <= {NUM_MAX_EXPERTS}, got 1000000" in done.output


REFUSED = [
    ("--topk", "9", "--experts", "8"),
    ("--hidden", "7"),
    ("--ranks", "3", "--local-ranks", "2"),
    ("--node-reduction",),
    ("--ranks", "4", "--local-ranks", "2", "--node-reduction", "--rank-reduction"),
    ("--ranks", "4", "--local-ranks", "2", "--rank-reduction"),
    ("--layout", "low-latency", "--alignment", "16"),
    ("--quantization", "fp8_block128", "--dtype", "fp64"),
    ("--quantization", "mxfp8", "--scale-format", "float32"),
    ("--column-major-scales",),
    ("--experts", "70000"),
    ("--alignment", str(2**31)),
]
TAKEN = [
    ("--ranks", "4", "--local-ranks", "2", "--node-reduction"),
    ("--ranks", "4", "--rank-reduction"),
    ("--layout", "low-latency"),
    ("--quantization", "fp8_block128"),
    ("--tokens", "0"),
    ("--ranks", "3", "--experts", "2", "--topk", "2"),
]


@pytest.mark.parametrize("arguments", [*REFUSED, *TAKEN], ids=" ".join)
def test_budget_refuses_what_bench_refuses(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class BegunError(RuntimeError):
        """The case was taken."""

    def begin(*_: object, **__: object) -> None:
        raise BegunError("begun")

    monkeypatch.setattr("moe_comm.cli.bench.run.RankProcesses", begin)
    budget = run("budget", *arguments)
    bench = run("bench", "dispatch-combine", *arguments)
    if arguments in TAKEN:
        assert (budget.exit_code, bench.output.splitlines()[-1]) == (0, "moe-comm bench: begun")
        return
    assert (budget.exit_code, bench.exit_code) == (1, 1)
    said = bench.output.splitlines()[-1].removeprefix("moe-comm bench: ")
    assert budget.output == f"moe-comm budget: {said}\n"
    assert said != "begun"


@pytest.mark.parametrize("width", [80, 120, 300])
def test_piped_tables_have_the_width_that_is_asked_for(width: int) -> None:
    done = run("model", "--nodes", "1", "--tokens", "8", env={"COLUMNS": str(width)})
    assert done.exit_code == 0
    widths = [len(line) for line in done.output.splitlines() if line[:1] in "┏┡└┃│─"]
    assert 0 < max(widths) <= width
    assert "…" not in done.output


@pytest.mark.parametrize(("width", "has_grid"), [(40, False), (60, True), (80, True)])
def test_a_narrow_terminal_cuts_no_number(width: int, has_grid: bool) -> None:
    table = Table()
    for name in ("operation", "p50 us", "p95 us", "of roof", "check"):
        table.add_column(name)
    table.add_row("combine, ordinary tensor", "41,190.1", "127,123.1", "0.632", "ok")
    terminal = io.StringIO()
    Console(file=terminal, width=width).print(FoldedTable(table))
    shown = terminal.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert {"operation", "combine,", "ordinary", "41,190.1", "127,123.1"} <= set(shown.split())
    assert ("┃" in shown) == has_grid


def test_an_expected_error_of_a_rank_has_no_stack() -> None:
    class Pipe:
        def __init__(self) -> None:
            self.sent: list[tuple[str, Any]] = []

        def send(self, message: tuple[str, Any]) -> None:
            self.sent.append(message)

    for error, text in ((ValueError("no such thing"), "no such thing"), (KeyError("x"), "Trace")):

        def make_worker(error: Exception = error) -> None:
            raise error

        pipe = Pipe()
        with pytest.raises(SystemExit):
            serve.serve_worker(make_worker, pipe)  # type: ignore[arg-type]
        status, said = pipe.sent[-1]
        assert status == "error"
        assert said.strip().startswith(text)


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "results.json")

    monkeypatch.setattr(CaseRun, "__init__", full)
    done = run("bench", "dispatch-combine", "--json", str(tmp_path / "results.json"))
    assert done.exit_code == 1
    assert done.output.splitlines()[-1].startswith("moe-comm bench: [Errno 28] No space left")

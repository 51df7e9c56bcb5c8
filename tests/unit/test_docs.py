"""All that the documents name exists, and what exists is documented."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import moe_comm
import moe_comm.resharding
from moe_comm.cli.app import app
from moe_comm.resharding import Parallelism
from tests.helpers.fresh_python import run_python

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "third_party/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)[^)]*\)")
LINKED_PAGE = re.compile(r"\[([\w.]+)\]\([^)]*\1[^)]*\)")
CODE_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TABLE_ROW = re.compile(r"^\| `(\w+)` \| `([\w.]+)` \|", re.MULTILINE)


def code_blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text()
    return [block for name, block in CODE_BLOCK.findall(text) if name == language]


def environment_variables(source: str) -> dict[str, str]:
    """Variables that a source reads, each with the function that does; "" outside a function."""
    found = {}
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in ast.walk(tree):
        is_read = isinstance(node, ast.Call) and ast.unparse(node.func) == "os.environ.get"
        if is_read and isinstance(node.args[0], ast.Constant):
            around = [f.name for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
            found[str(node.args[0].value)] = around[-1] if around else ""
    return found


def test_environment_table_is_complete() -> None:
    documented = dict(TABLE_ROW.findall((ROOT / "docs/environment.md").read_text()))
    read = environment_variables((ROOT / "moe_comm/env.py").read_text())
    assert len(read) >= 4
    expected = {variable: f"env.{function}" for variable, function in read.items()}
    setup = (ROOT / "setup.py").read_text()
    built_with = re.findall(r'(?:enabled|environ\.get)\("(\w+)"', setup)
    expected |= dict.fromkeys(built_with, "setup.py")
    assert documented == expected


def test_env_functions_are_all_exported() -> None:
    read = environment_variables((ROOT / "moe_comm/env.py").read_text())
    assert sorted(set(read.values())) == sorted(moe_comm.env.__all__)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    links = LINK.findall((ROOT / document).read_text())
    local = [link for link in links if not link.startswith(("http:", "https:"))]
    folder = (ROOT / document).parent
    assert [link for link in local if not (folder / link).exists()] == []


NOT_RUN_ON_GPUS = "Tensors may be on GPUs too, by the rules of gpu.md; no GPU has run this."
FACES = ("deep_ep", "dispatcher", "megatron", "sglang", "torchtitan", "transformers", "vllm")


@pytest.mark.parametrize("document", ["README.md", *(f"docs/{face}.md" for face in FACES)])
def test_pages_say_alike_what_no_gpu_has_run(document: str) -> None:
    text = LINKED_PAGE.sub(r"\1", (ROOT / document).read_text())
    assert " ".join(text.split()).count(NOT_RUN_ON_GPUS) == 1


def test_index_lists_every_page() -> None:
    listed = set(LINK.findall((ROOT / "docs/index.md").read_text()))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"} - listed == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "lint"} <= targets
    named = re.findall(r"(?:`|^)make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE)
    assert [name for name in named if name not in targets] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_cli_commands_exist(document: str) -> None:
    blocks = "\n".join(code_blocks(document, ""))
    commands = set(re.findall(r"^moe-comm ((?:[a-z][a-z-]* ?)+)", blocks, re.MULTILINE))
    for command in sorted(commands):
        outcome = CliRunner().invoke(app, [*command.split(), "--help"])
        assert outcome.exit_code == 0, f"moe-comm {command}: {outcome.output}"


def test_places_named_to_contributors_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:moe_comm|csrc|tests|docs|tools|benchmarks)[\w/]*(?:/|\.\w+))`", text)
    assert len(set(named)) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_readme_example_runs() -> None:
    """On one rank, as printed, then the pages on options with its names; results are as its experts give them."""
    (example,) = code_blocks("README.md", "python")
    assert len(example.strip().splitlines()) <= 20
    check = (
        "w = topk_weights.sum(dim=1, keepdim=True)\n"
        "assert torch.allclose(y.float(), 2 * w * x.float(), rtol=2e-2, atol=2e-2)\n"
        "assert torch.allclose(x.grad.float(), (2 * w).expand(100, 64), rtol=2e-2, atol=2e-2)\n"
        "x = x.detach()\n"
    )
    (quantization,) = code_blocks("docs/quantization.md", "python")
    check_quantization = (
        "assert result.x.dtype is torch.float8_e4m3fn and result.x.shape == (200, 64)\n"
        "assert result.x_sf.dtype is torch.float32 and result.x_sf.shape == (200, 1)\n"
        "assert torch.allclose(rows.float().sum(0), 2 * x.float().sum(0), atol=4.0)\n"
    )
    (capacity,) = code_blocks("docs/capacity.md", "python")
    check_capacity = (
        "assert result.x.shape == (8192, 64) and not result.has_overflow\n"
        "assert result.handle.dropped_choices().shape == (100, 2)\n"
        "buffer.destroy(); comm.destroy(); print('done')\n"
    )
    parts = (example, check, quantization, check_quantization, capacity, check_capacity)
    run = run_python("-c", "\n".join(parts))
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["done"]


def test_example_of_replicas_runs() -> None:
    example, *_ = code_blocks("docs/replicas.md", "python")
    run = run_python("-c", example + "print(balancer.last_report.step)")
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["20"]


def test_examples_of_deep_ep_run() -> None:
    """On one rank, as printed; what callers have is made before."""
    first, second = code_blocks("docs/deep_ep.md", "python")
    made = (
        "import torch\n"
        "group, num_experts, num_ranks, loss = None, 4, 1, torch.full((1,), 2.0)\n"
        "topk_idx, topk_weights = torch.tensor([[0, 1], [2, -1]]), torch.rand(2, 2)\n"
        "x = torch.randn(2, 64, dtype=torch.bfloat16)\n"
    )
    combine = "y, weights, event"
    assert combine in first
    first = first.replace(combine, f"expert_out = recv_x * 2\n{combine}")
    check = "assert torch.equal(y, x * 2) and mine.shape == (4096,) and total.item() == 2\nprint('done')\n"
    run = run_python("-c", made + first + second + check)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["done"]


CALLED = {
    "moe_comm": "moe_comm",
    "comm": "moe_comm.Communicator",
    "deep_ep": "moe_comm.compat.deep_ep",
}


def object_named(name: str) -> Any:
    """The module, class or function of a dotted name; attributes of instances are of their class."""
    module, *attributes = name.split(".")
    found: Any = importlib.import_module(module)
    for attribute in attributes:
        if not hasattr(found, attribute) and inspect.ismodule(found):
            importlib.import_module(f"{found.__name__}.{attribute}")
        found = getattr(found, attribute)
    return found


def test_calls_in_examples_have_their_arguments() -> None:
    """What examples of Python call of the package exists, and takes the keywords given."""
    num_keywords = 0
    for document in DOCUMENTS:
        for block in code_blocks(document, "python"):
            for node in ast.walk(ast.parse(block)):
                if not isinstance(node, ast.Call):
                    continue
                root, _, rest = ast.unparse(node.func).partition(".")
                if root not in CALLED or not re.fullmatch(r"[\w.]+", rest):
                    continue
                called = object_named(f"{CALLED[root]}.{rest}")
                taken = inspect.signature(called).parameters
                if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
                    continue
                given = {str(keyword.arg) for keyword in node.keywords if keyword.arg}
                assert given <= set(taken), (document, ast.unparse(node))
                num_keywords += len(given)
    assert num_keywords > 30


def test_names_in_the_readme_exist() -> None:
    """All that the table tells a reader to write can be imported."""
    text = (ROOT / "README.md").read_text()
    names = set(re.findall(r"\bmoe_comm(?:\.\w+)+", text))
    for module, imported in re.findall(r"\bfrom (moe_comm[\w.]*) import (\w+(?:, \w+)*)", text):
        names |= {f"{module}.{name}" for name in imported.split(", ")}
    assert len(names) >= 15
    if importlib.util.find_spec("torchtitan") is None:
        names.remove(
            "moe_comm.dispatcher.torchtitan.moe_comm_dispatcher"
        )  # registered with torchtitan
    assert [name for name in sorted(names) if not is_importable(name)] == []


def is_importable(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), attribute) or bool(
            importlib.util.find_spec(name)
        )
    except ModuleNotFoundError:
        return False


NAMED_ATTRIBUTE = re.compile(r"`(communicator|comm|buffer|result)\.(\w+)")


def test_attributes_that_pages_name_exist() -> None:
    """Attributes of what examples call so, made by one rank."""
    with moe_comm.Communicator() as communicator:
        config = moe_comm.EpConfig(num_experts=2, num_topk=1, hidden=8, num_max_tokens_per_rank=4)
        buffer = moe_comm.EpBuffer(communicator, config)
        x = torch.zeros(2, 8, dtype=torch.bfloat16)
        result = buffer.dispatch(x, torch.zeros(2, 1, dtype=torch.int64))
        things: dict[str, Any] = {"communicator": communicator, "comm": communicator}
        things |= {"buffer": buffer, "result": result}
        named = [
            (document, *found)
            for document in DOCUMENTS
            for found in NAMED_ATTRIBUTE.findall((ROOT / document).read_text())
        ]
        assert len(named) > 15
        assert [each for each in named if not hasattr(things[each[1]], each[2])] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_pictures_exist_in_both_versions(document: str) -> None:
    shown = re.findall(r'(?:src|srcset)="([^"]+)"', (ROOT / document).read_text())
    assert [path for path in shown if not ((ROOT / document).parent / path).is_file()] == []
    assert len(shown) % 2 == 0, "a picture has a light and a dark version"


@pytest.mark.parametrize(("folder", "opening"), [("moe_comm", '"""'), ("csrc", "/// ")])
def test_comments_begin_with_a_verb_or_a_noun(folder: str, opening: str) -> None:
    """But for few: one begins with a conjunction or a pronoun where no noun is at hand."""
    begun = re.compile(
        rf"{re.escape(opening)}(?=[A-Z])(What|Of|Who|Where|As|Which|How|Whose|Whether)?\b"
    )
    words = [
        found[1]
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh"}
        for found in begun.finditer(path.read_text())
    ]
    assert len(words) > 1000
    assert len([word for word in words if word]) < 0.02 * len(words)


@pytest.mark.parametrize("name", moe_comm.__all__)
def test_public_names_have_docstrings(name: str) -> None:
    value = getattr(moe_comm, name)
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return
    assert inspect.getdoc(value)
    members = vars(value).items() if inspect.isclass(value) else []
    public = [(key, item) for key, item in members if not key.startswith("_")]
    assert [
        key for key, item in public if inspect.isroutine(item) and not inspect.getdoc(item)
    ] == []


@pytest.mark.parametrize("name", moe_comm.__all__)
def test_public_names_are_in_the_api_page(name: str) -> None:
    section = (ROOT / "docs/api.md").read_text().split("\n## Of `moe_comm`\n")[1].split("\n## ")[0]
    assert f"`{name}`" in section


def test_names_of_resharding_are_in_the_api_page() -> None:
    section = (ROOT / "docs/api.md").read_text().split("\n## Resharding\n")[1].split("\n## ")[0]
    shown = set(re.findall(r"`(?:resharding\.)?(\w+)", section))
    assert set(moe_comm.resharding.__all__) - shown == set()


def test_version_is_in_the_changelog_and_the_readme() -> None:
    from moe_comm._version import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"Version {__version__}." in (ROOT / "README.md").read_text()


def test_the_table_of_groups_is_what_groups_gives() -> None:
    _, header, rest = (inspect.getdoc(Parallelism) or "").partition(
        "rank | tp   | dp   | expt_tp | ep   | expt_dp | pp\n"
    )
    assert header
    rows = [line.split("|") for line in rest.splitlines() if line]
    parallelism = Parallelism.parse("tp2.pp2.ep2.etp1", 8)
    for rank, row in enumerate(rows):
        groups = parallelism.groups(rank)
        ranks = [
            getattr(groups, name).ranks for name in ("tp", "dp", "expt_tp", "ep", "expt_dp", "pp")
        ]
        assert [cell.strip() for cell in row] == [str(rank)] + [
            ", ".join(map(str, r)) for r in ranks
        ]
    assert len(rows) == 8

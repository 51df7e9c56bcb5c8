"""The fixtures for the tests of frameworks, in sessions of pytest of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.pages import python_blocks
from tests.helpers.source_tree import captured

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/testing.md"

pytest_plugins = "pytester"

USES = """
import importlib.util
import sys

import pytest
import torch
import torch.distributed as dist

from moe_comm import compat
from moe_comm.testing import RankError


def count(context, factor):
    assert dist.get_world_size() == context.num_ranks
    return context.rank_idx * factor


def is_there(context):
    return importlib.util.find_spec("deep_ep") is not None


def test_processes(moe_comm_ranks):
    assert moe_comm_ranks(count, 2, 10) == [0, 10]
    assert moe_comm_ranks(is_there, 2) == [False, False]


def test_threads(moe_comm_ranks):
    here = []
    assert moe_comm_ranks(lambda context: here.append(context.rank_idx), 3, mode="threads")
    assert sorted(here) == [0, 1, 2]


def test_an_error_names_its_rank(moe_comm_ranks):
    with pytest.raises(RankError, match="rank 0 raised .*KeyError"):
        moe_comm_ranks(lambda context: {}[3], 1, mode="threads")


def test_deep_ep_is_here_and_in_the_ranks(moe_comm_ranks, moe_comm_deep_ep):
    import deep_ep

    assert moe_comm_deep_ep is deep_ep
    assert deep_ep.__name__ == "moe_comm.compat.deep_ep"
    assert moe_comm_ranks(is_there, 2) == [True, True]
    import uses_deep_ep  # which imports deep_ep at its top

    assert moe_comm_ranks(uses_deep_ep.rank_of_buffer, 2) == [0, 1]


def test_and_gone_after_it(moe_comm_ranks):
    assert compat.installed() == ()
    assert "deep_ep" not in sys.modules
    assert moe_comm_ranks(is_there, 2) == [False, False]


def test_another_deep_ep_is_put_aside(request, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", sys)
    provided = request.getfixturevalue("moe_comm_deep_ep")
    import deep_ep

    assert deep_ep is provided is not sys
"""
USES_DEEP_EP = """
import deep_ep


def rank_of_buffer(context):
    return deep_ep.Buffer(context.group).rank
"""


def test_fixtures(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_uses=USES, uses_deep_ep=USES_DEEP_EP)
    pytester.syspathinsert()
    result = pytester.runpytest("-p", "moe_comm_pytest", "-p", "no:xdist", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=6)


def test_the_page(pytester: pytest.Pytester) -> None:
    block, _ = python_blocks(PAGE)
    pytester.makepyfile(test_page=f"import torch\n\n{block}")
    result = pytester.runpytest("-p", "moe_comm_pytest", "-p", "no:xdist", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)


@pytest.mark.full
def test_the_variable_reaches_imports_at_the_top(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_top=f"{USES_DEEP_EP}\n\ndef test_it():\n    assert deep_ep.Buffer")
    monkeypatch.setenv("MOE_COMM_COMPAT", "deep_ep")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    result = pytester.runpytest_subprocess("-p", "moe_comm_pytest", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)


def test_the_plugin_alone_imports_no_torch() -> None:
    code = "import moe_comm_pytest, sys; print('torch' in sys.modules, 'moe_comm' in sys.modules)"
    done = captured([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert done.stdout == "False False\n"


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    # The name is that of the module, by which `-p` loads it too: pytest takes it once.
    assert '[project.entry-points.pytest11]\nmoe_comm_pytest = "moe_comm_pytest"\n' in text
    assert 'pytest = ["pytest' in text

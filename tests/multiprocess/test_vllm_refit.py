"""Whole versions of weights into vLLM's CPU engine. `make test-vllm` installs vLLM and runs this."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", minversion="0.32")

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
LIMIT_S = 900
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(
            mode,
            marks=pytest.mark.client(
                "vLLM",
                way="`VllmCpuModel`",
                ran=f"refits from a trainer's process, {mode}: greedy tokens, failures",
            ),
        )
        for mode in ("eager", "compiled")
    ],
)
def test_whole_versions_are_served(tmp_path: Path, mode: str) -> None:
    run("vllm_refit", str(tmp_path), mode)


@pytest.mark.parametrize(
    ("processes", "workers", "mode"),
    [
        pytest.param(
            *case,
            marks=pytest.mark.client(
                "vLLM",
                way='`WeightTransferConfig(backend="moe_comm")`',
                ran=f"refits from two expert-parallel trainers by {ran}: greedy tokens, failures",
            ),
        )
        for *case, ran in (
            ("0", "1", "eager", "`LLM`'s own calls"),
            ("1", "2", "compiled", "`collective_rpc`, into two tensor-parallel workers, compiled"),
        )
    ],
)
def test_trainers_refit_by_vllms_own_calls(
    tmp_path: Path, processes: str, workers: str, mode: str
) -> None:
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": processes}
    if workers == "2":
        # Else vLLM wants a NUMA node for each.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|0"
    run("vllm_transfer", str(tmp_path), "engine", workers, mode, **environment)


@pytest.mark.client(
    "vLLM",
    way='`WeightTransferConfig(backend="moe_comm")`',
    ran="refits of two data-parallel ranks over HTTP: greedy tokens, a trainer that is killed",
)
def test_trainers_refit_a_server(tmp_path: Path) -> None:
    run("vllm_http_transfer", str(tmp_path))


@pytest.mark.client(
    "vLLM",
    way="the example",
    ran="post-training: a refit every few steps; both trainers and the engine killed in the middle of one",
)
def test_the_example_goes_on_after_deaths() -> None:
    """The engine's tokens are compared with the trainers' after every refit, and after every death."""
    arguments = ["--steps", "12", "--learning-rate", "3e-3", "--kill", "8:engine"]
    said = run("killed_post_training", *arguments)
    kinds = r"version \d+: [\d.]+ MB in|trainer|the engine|better"
    lines = re.findall(rf"^(?:{kinds}).*\n", said, re.MULTILINE)
    expected = [
        r"version 0: .*\nversion 2: .*\n",
        r"trainer 1 was killed\ntrainer 0: PeerFailedError: .*\(rank 1 is trainer 1\)\n",
        r"the engine serves version 2, whole\nversion 4: .*\n",
        r"trainer 0 was killed\ntrainer 1: PeerFailedError: .*\(rank 0 is trainer 0\)\n",
        r"the engine serves version 4, whole\nversion 6: .*\n",
        # It may also have died behind the refit: that is killed at a random moment.
        r"(trainer 1: .*\n)?(version 8: .*\n)?(trainer [01]: .*\n)+",
        r"the engine does not answer .*: it is started anew\n",
        r"version 8: .*\nversion 10: .*\nversion 12: .*\n",
        r"better: the reward rose from 0\.\d+ to [01]\.\d+\n",
    ]
    assert re.fullmatch("".join(expected), "".join(lines)), said


def run(program: str, *arguments: str, **environment: str) -> str:
    """Output of it; in a process of its own: an engine leaves a process group behind."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.helpers.{program}", *arguments],
        env=dict(os.environ) | ENVIRONMENT | environment,  # noqa: TID251
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout

"""Whole versions of weights into vLLM's CPU engine. `make test-vllm` installs vLLM and runs this."""

from __future__ import annotations

import os
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


def run(program: str, *arguments: str, **environment: str) -> str:
    """What it says; in a process of its own: an engine leaves a process group behind."""
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

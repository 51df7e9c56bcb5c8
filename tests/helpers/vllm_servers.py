"""vLLM's API server over a small random Qwen3-MoE, on one or more data-parallel ranks of this machine."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = 96
NUM_EXPERTS = 7
# Its processes load torch one after the other, and may compile.
START_S = 900.0
SAY_S = 120.0
ANSWER_S = 300.0


def save_model(folder: Path, num_experts: int = NUM_EXPERTS) -> str:
    """A checkpoint with a tokenizer of one word per id; its experts are not a multiple of two ranks, unless asked for."""
    words = {f"w{idx}": idx for idx in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=num_experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,  # large enough that tokens choose different experts
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return str(folder)


class Server:
    """A running server.

    Args:
        process: Process that leads a process group of its own.
        port: Port that it listens on.
        log: File with what all its processes say.

    Attributes:
        url: Address that it listens on.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self._process = process
        self.url = f"http://127.0.0.1:{port}"
        self._log = log

    def said(self) -> str:
        """All that its processes have said so far."""
        return self._log.read_text(errors="replace")

    def hears(self, text: str) -> bool:
        """Return whether its processes say this; they write their errors after the server has answered."""
        until = time.monotonic() + SAY_S
        while text not in self.said():
            if time.monotonic() > until or self._process.poll() is not None:
                return text in self.said()
            time.sleep(0.1)
        return True

    def wait(self) -> None:
        """Until it takes requests."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            if self._process.poll() is not None:
                raise RuntimeError(f"the server has ended:\n{self.said()[-8000:]}")
            time.sleep(0.5)
        raise TimeoutError(f"the server has not come up in {START_S:.0f} s:\n{self.said()[-8000:]}")

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Greedy tokens of every prompt; all are asked for at once."""
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            answers = pool.map(lambda prompt: self._complete(prompt, num_tokens), prompts)
            return [answer["choices"][0]["token_ids"] for answer in answers]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No data-parallel rank is in a step, nor waits for others that are, while this is open."""
        self._post("/pause?mode=wait", b"", {})
        try:
            yield
        finally:
            self._post("/resume", b"", {})

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> Any:
        request = urllib.request.Request(self.url + path, body, headers)
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return json.load(answer)

    def _complete(self, prompt: list[int], num_tokens: int) -> Any:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {"Content-Type": "application/json"}
        return self._post("/v1/completions", json.dumps(body).encode(), headers)


@contextlib.contextmanager
def serving(
    checkpoint: str, log: Path, *arguments: str, environment: Mapping[str, str]
) -> Iterator[Server]:
    """A server that takes requests, with these arguments and environment variables besides.

    `PYTHONPATH` is put before that of this process. float32, so that the order of additions decides
    about no token.
    """
    own = dict(os.environ)  # noqa: TID251
    paths = [values["PYTHONPATH"] for values in (environment, own) if "PYTHONPATH" in values]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "8"),
    ]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            env=own | settings | dict(environment) | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        server = Server(process, port, log)
        server.wait()
        yield server
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        # Those of its processes that outlive it are of its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

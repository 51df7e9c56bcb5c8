"""Weights from trainers to vLLM by vLLM's own calls: tokens are those of the trainers.

python -m tests.helpers.vllm_transfer FOLDER engine WORKERS eager|compiled

The engine is in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0) or in others, and does what trainer 0
says: by `LLM`'s own calls, or with several tensor-parallel workers by `collective_rpc`. Trainers are in
two others, which this one starts (FOLDER RANK INFO).
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3MoeForCausalLM

from moe_comm.resharding import RefitWorld
from moe_comm.testing import RankContext
from tests.helpers.transformers_models import Layout, load
from tests.helpers.vllm_refit import NUM_TOKENS, PROMPTS, tokens_of_transformers
from tests.helpers.vllm_servers import save_model

NUM_TRAINERS = 2
NUM_EXPERTS = 8
LIMIT_S = 60
KEY = "model.layers.1.self_attn.k_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


class EngineClient:
    """vLLM's weight calls, said to the engine's process."""

    def __init__(self, folder: Path, num_workers: int) -> None:
        self._peer = Client(str(folder / "engine"))
        self._num_workers = num_workers
        self.refuses = False

    def say(self, call: str, *arguments: Any) -> Any:
        self._peer.send((call, arguments))
        is_error, answer = self._peer.recv()
        if is_error:
            raise RuntimeError(answer)
        return answer

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        if self.refuses:
            raise ConnectionError("no server")
        self.say("init_weight_transfer_engine", {"init_info": json.loads(json.dumps(init_info))})

    def start_weight_update(self) -> None:
        self.say("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # A list has one for every worker of all data-parallel ranks.
        self.say("update_weights", {"update_info": [update_info] * self._num_workers})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.say("finish_weight_update", weight_version)


class Source:
    """Full tensors in the form of vLLM 0.32."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.left_out, self.wrong = model, "", ""

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [
            ParamMeta(name, each.dtype, tuple(each.shape))
            for name, each in self.model.named_parameters()
            if name != self.left_out
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, each in self.model.named_parameters():
            if name != self.left_out:
                yield name, each.t() if name == self.wrong else each


class NewSource:
    """Full tensors in the form of vLLM 0.33."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._source = Source(model)

    @functools.cached_property
    def metadata(self) -> list[Any]:
        return self._source.metadata()

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._source)


def change(model: torch.nn.Module, step: int) -> None:
    """Other weights, elementwise, so that every rank has its part of the same."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.sin(31 * parameter + step) * 0.3)


def train(folder: Path, rank: int, info: dict[str, Any]) -> None:
    """One trainer rank; rank 0 asks the engine, and compares."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from moe_comm.resharding.clients.vllm import MoeCommTrainerInitInfo

    store = dist.FileStore(str(folder / "trainers"), NUM_TRAINERS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_TRAINERS)
    client: Any = EngineClient(folder, info["num_engines"]) if rank == 0 else None
    wish = MoeCommTrainerInitInfo(info, rank=rank, timeout_s=LIMIT_S, arrival_timeout_s=LIMIT_S)

    def start(source: Any) -> Any:
        return WeightTransferTrainerFactory.trainer_init(wish, client=client, source=source)

    def served() -> Any:
        return client.say("generate") if rank == 0 else None

    def check(engine: Any, model: Any, step: int, version: int | None = None) -> None:
        """Tokens change to those of the trainer's weights with a version."""
        change(model, step)
        expected, before = tokens_of_transformers(model), served()
        sent = engine.send_weights(version)
        if rank == 0:
            assert before != expected
            assert served() == expected
            assert client.say("get_weight_version") == str(sent)

    whole = Qwen3MoeForCausalLM.from_pretrained(folder / "first", dtype=torch.float32).eval()
    context = RankContext(rank, NUM_TRAINERS, dist.group.WORLD)
    parts = load(str(folder / "first"), "all_to_all", context, Layout(NUM_TRAINERS)).eval()
    engine = start(parts)
    for step in range(3):
        check(engine, parts, step, version=None if step else 5)
    engine.shutdown()

    source, rows = Source(whole), 128 // info["num_engines"]
    engine = start(source)
    check(engine, whole, 10)
    before = served()
    source.left_out = QUERY
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"self_attn\.qkv_proj\.weight\[0:{rows}, "):
            engine.send_weights()
    source.left_out, source.wrong = "", KEY
    with pytest.raises(ValueError, match=rf"{KEY}: .* of shape \(128, 64\) came, .* \(64, 128\)"):
        engine.send_weights()
    source.wrong = ""
    assert served() == before
    if rank == 0 and info["num_engines"] == 1:  # vLLM has other answers of several after an error
        with pytest.raises(RuntimeError, match="no version has come"):
            client.say("start_weight_update")
            client.finish_weight_update("nothing")
        assert client.say("get_weight_version") != "nothing"
    for step in range(11, 15):
        check(engine, whole, step)
    engine.shutdown()

    if rank == 0:
        client.refuses = True
    with pytest.raises(ValueError, match=r"trainer 0 was refused: vLLM was not .* no server$"):
        start(NewSource(whole))
    if rank == 0:
        client.refuses = False
    engine = start(NewSource(whole))
    check(engine, whole, 15)
    engine.shutdown()
    if rank == 0:
        client.say("end")


def main(folder: Path, *, num_workers: int = 1, is_eager: bool = True) -> None:
    """The engine, and what hosts the world."""
    import vllm
    from vllm.config import WeightTransferConfig

    checkpoint = save_model(folder / "first", NUM_EXPERTS)
    llm = vllm.LLM(
        checkpoint,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        enforce_eager=is_eager,
        tensor_parallel_size=num_workers,
        enable_prefix_caching=False,
        weight_transfer_config=WeightTransferConfig(backend="moe_comm"),
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

    def serve() -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def by_rpc(call: str, *arguments: Any) -> None:
        has_info = call in ("init_weight_transfer_engine", "update_weights")
        llm.collective_rpc(call, kwargs=arguments[0] if has_info else {})
        if call == "finish_weight_update":
            llm.update_weight_version(*arguments)

    def do(call: str, *arguments: Any) -> Any:
        if call == "generate":
            return serve()
        if num_workers > 1 and call != "get_weight_version":
            return by_rpc(call, *arguments)
        return getattr(llm, call)(*arguments)

    with (
        Listener(str(folder / "engine")) as listener,
        RefitWorld.host("127.0.0.1:0", num_trainers=NUM_TRAINERS, num_engines=num_workers) as host,
    ):
        command = [sys.executable, "-m", "tests.helpers.vllm_transfer", str(folder)]
        trainers = [
            subprocess.Popen([*command, str(rank), json.dumps(host.info)])
            for rank in range(NUM_TRAINERS)
        ]
        try:
            with listener.accept() as peer:
                while (said := peer.recv())[0] != "end":
                    call, arguments = said
                    try:
                        answer = do(call, *arguments)
                    except Exception as error:  # noqa: BLE001 - the trainer looks at it
                        peer.send((True, str(error)))
                    else:
                        peer.send((False, answer))
                peer.send((False, None))
            assert [trainer.wait(LIMIT_S) for trainer in trainers] == [0] * NUM_TRAINERS
        finally:
            for trainer in trainers:
                trainer.kill()


if __name__ == "__main__":
    if sys.argv[2] == "engine":
        main(Path(sys.argv[1]), num_workers=int(sys.argv[3]), is_eager=sys.argv[4] == "eager")
    else:
        train(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))

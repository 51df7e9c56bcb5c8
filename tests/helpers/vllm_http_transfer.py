"""Weights from trainers to a server of vLLM over its HTTP routes; one trainer is killed and comes back.

python -m tests.helpers.vllm_http_transfer FOLDER

The server has two data-parallel ranks, and experts over both. Trainers are two processes (CHECKPOINT RANK
INFO URL) that do what they are told.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeForCausalLM

from moe_comm.resharding import RefitWorld
from tests.helpers.vllm_refit import LIMIT_S, NUM_TOKENS, PROMPTS, tokens_of_transformers
from tests.helpers.vllm_servers import save_model, serving
from tests.helpers.vllm_transfer import NUM_EXPERTS, QUERY, Source

ARGUMENTS = (
    *("--data-parallel-size", "2", "--enable-expert-parallel", "--enforce-eager"),
    *("--no-enable-prefix-caching", "--weight-transfer-config", '{"backend": "moe_comm"}'),
)


def train(checkpoint: str, rank: int, info: dict[str, Any], url: str) -> None:
    """One trainer rank: for every line, the weights of a step, and what came of sending them."""
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from moe_comm.resharding.clients.vllm import MoeCommTrainerInitInfo

    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    first = [parameter.clone() for parameter in model.parameters()]
    source = Source(model)
    wish = MoeCommTrainerInitInfo(info, rank=rank, timeout_s=LIMIT_S, arrival_timeout_s=LIMIT_S)
    engine = WeightTransferTrainerFactory.trainer_init(
        wish, client=HTTPVLLMWeightSyncClient(url), source=source
    )
    for line in sys.stdin:
        step, source.left_out = json.loads(line)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), first, strict=True):
                parameter.copy_(torch.sin(31 * value + step) * 0.3)
        try:
            said = engine.send_weights()
        except Exception as error:  # noqa: BLE001 - the other end looks at it
            said = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps([said, tokens_of_transformers(model)]) + "\n")
        sys.stdout.flush()


def main(folder: Path) -> None:
    """The host of the world, and what starts, tells and kills all others."""
    checkpoint = save_model(folder / "first", NUM_EXPERTS)
    environment = {"MOE_COMM_VLLM": "1", "VLLM_SERVER_DEV_MODE": "1"}
    trainers: list[subprocess.Popen[str]] = []
    with (
        RefitWorld.host("127.0.0.1:0", num_trainers=2, num_engines=2) as host,
        serving(checkpoint, folder / "log", *ARGUMENTS, environment=environment) as server,
    ):

        def start(rank: int) -> subprocess.Popen[str]:
            program = [sys.executable, "-m", "tests.helpers.vllm_http_transfer", checkpoint]
            return subprocess.Popen(
                [*program, str(rank), json.dumps(host.info), server.url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

        def refit(step: int, left_out: str = "", ranks: tuple[int, ...] = (0, 1)) -> list[Any]:
            with server.paused():
                for rank in ranks:
                    told: Any = trainers[rank].stdin
                    told.write(json.dumps([step, left_out]) + "\n")
                    told.flush()
                heard: list[Any] = [trainers[rank].stdout for rank in ranks]
                return [json.loads(each.readline()) for each in heard]

        def served() -> list[list[int]]:
            return server.generate(PROMPTS, NUM_TOKENS)

        try:
            trainers += [start(rank) for rank in range(2)]
            for step in (1, 2):
                (first, tokens), (second, _) = refit(step)
                assert (first, second) == (step, step), (first, second)
                assert served() == tokens
            for said, _ in refit(3, QUERY):
                what = "ValueError: rank 2: model.layers.0.self_attn.qkv_proj.weight["
                assert said.startswith(what), said
            assert served() == tokens
            trainers[1].kill()
            trainers[1].wait()
            ((said, _),) = refit(4, ranks=(0,))
            assert "PeerFailedError" in said, said
            assert "rank 1 is trainer 1" in said
            assert served() == tokens
            trainers[1] = start(1)
            (first, tokens), (second, _) = refit(5)
            assert (first, second) == (3, 3), (first, second)
            assert served() == tokens
        finally:
            for trainer in trainers:
                trainer.kill()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4])
    else:
        main(Path(sys.argv[1]))

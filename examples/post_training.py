"""Trains a small Qwen3-MoE on what a vLLM engine writes with it, by a refit every few steps.

    python examples/post_training.py [--steps 24] [--refit-every 2] [--kill 4:1 8:engine]

Two trainers hold the model by transformers' expert parallelism, over moe_comm. A server of vLLM on CPUs,
of processes of its own, begins with random weights and writes texts; the trainers' weights come to it by
vLLM's own weight transfer, "moe_comm". Vowels are rewarded, and become more. After every refit the
engine's greedy tokens and their log-probabilities must be those of the trainers.

Where a trainer or the engine dies, in the middle of a refit too, the others end with an error that names
it; an engine that lives serves a whole version meanwhile. Trainers start anew from what they saved before
the last refit, an engine with random weights, and the loop goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import json
import multiprocessing
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.resharding import RefitWorld

NUM_TRAINERS = 2
LETTERS = "abcdefghijklmnopqrstuvwxyz "
VOWELS = torch.tensor([letter in "aeiou" for letter in LETTERS])
PROMPT_LETTERS = 8
NUM_CHECKED = 4
"""Prompts that are continued greedily after every refit."""
MOST_DIFFERENCE = 1e-3
"""Of log-probabilities that two programs compute of the same weights, in float32."""
LIMIT_S = 120.0
"""For a death to be heard of, and for each answer of the engine."""
START_S = 600.0
"""For an engine to start."""
PRELOADED = [
    *("__main__", "torch._dynamo", "torch.distributed.checkpoint.state_dict"),
    *("transformers.models.qwen3_moe.modeling_qwen3_moe", "moe_comm.resharding.clients.vllm"),
    "vllm.distributed.weight_transfer.clients",
]
"""What a trainer takes long to load."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Of one run.

    Args:
        folder: For checkpoints and what the server says.
        url: Of the server.
        steps: Of the optimizer.
        refit_every: Steps from one refit to the next.
        prompts: Per trainer and step.
        samples: Of each prompt.
        tokens: Of each sample.
        hidden: Width of the model and of an expert; a multiple of 32.
        experts: Of each layer.
        learning_rate: Of AdamW.
        seed: Of everything random.
    """

    folder: Path
    url: str
    steps: int
    refit_every: int
    prompts: int
    samples: int
    tokens: int
    hidden: int
    experts: int
    learning_rate: float
    seed: int

    def prompts_of(self, step: int, rank: int, num: int) -> torch.Tensor:
        """Random letters, int64 `[num, PROMPT_LETTERS]`."""
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + step * 101 + rank)
        return torch.randint(len(LETTERS), (num, PROMPT_LETTERS), generator=draw)

    def checked_prompts(self) -> torch.Tensor:
        """Those that are continued greedily, int64 `[NUM_CHECKED, PROMPT_LETTERS]`."""
        return self.prompts_of(0, 100, NUM_CHECKED)

    def checkpoint(self, step: int) -> Path:
        """Where the state before a step is."""
        return self.folder / f"step{step}"


@dataclasses.dataclass(frozen=True)
class Written:
    """What a model wrote; no tensors, which a process could not take from one that has died.

    Args:
        tokens: Of each text.
        logprobs: Of these tokens.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]

    def differs_from(self, other: Written) -> str:
        """Say what is different; "" where nothing is."""
        if self.tokens != other.tokens:
            return f"tokens {self.tokens} and {other.tokens}"
        most = float((torch.tensor(self.logprobs) - torch.tensor(other.logprobs)).abs().max())
        return "" if most <= MOST_DIFFERENCE else f"log-probabilities by {most:.4f}"


# --- The engine ------------------------------------------------------------------------------------


class Engine:
    """A server of vLLM in a process group of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, with random weights, and wait until it answers."""
        self.end()
        folder = self._settings.folder
        port = self._settings.url.rpartition(":")[2]
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *(
                "--model",
                str(self._settings.checkpoint(0) / "model"),
                "--served-model-name",
                "policy",
            ),
            *("--host", "127.0.0.1", "--port", port, "--load-format", "dummy"),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "128"),
            *("--weight-transfer-config", '{"backend": "moe_comm"}'),
        ]
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",  # for its routes of weights
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        log = folder / "engine.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=dict(os.environ) | environment,  # noqa: TID251
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until = time.monotonic() + START_S
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > until:
                said = log.read_text(errors="replace")[-4000:]
                raise RuntimeError(f"the engine did not start in {START_S:.0f} s:\n{said}")
            time.sleep(0.3)

    def answers(self) -> bool:
        """Whether it is well."""
        with contextlib.suppress(OSError):
            request = f"{self._settings.url}/health"
            with urllib.request.urlopen(request, timeout=LIMIT_S):
                return self._process is not None and self._process.poll() is None
        return False

    def kill(self) -> None:
        """Kill all its processes."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def end(self) -> None:
        """Have it end; kill what is left."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LIMIT_S)
            self.kill()


def post(url: str, body: dict[str, Any]) -> Any:
    """Answer of a route of the server.

    Raises:
        OSError: It does not answer, or with an error.
    """
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.loads(answer.read() or b"null")


def write(settings: Settings, prompts: torch.Tensor, **options: Any) -> Written:
    """Have the engine continue prompts."""
    body = {
        "model": "policy",
        "prompt": prompts.tolist(),
        "max_tokens": settings.tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 0,
        **options,
    }
    choices = post(f"{settings.url}/v1/completions", body)["choices"]
    choices.sort(key=lambda choice: choice["index"])
    return Written(
        [choice["token_ids"] for choice in choices],
        [choice["logprobs"]["token_logprobs"] for choice in choices],
    )


def write_greedily(settings: Settings) -> Written:
    """Have the engine continue the prompts that are checked."""
    return write(settings, settings.checked_prompts(), temperature=0)


# --- The trainers ----------------------------------------------------------------------------------


class Trainer:
    """One rank of the training."""

    def __init__(self, settings: Settings, rank: int, first_step: int) -> None:
        from transformers import AutoModelForCausalLM, DistributedConfig

        self.settings, self.rank = settings, rank
        self.model = AutoModelForCausalLM.from_pretrained(
            settings.checkpoint(0) / "model",
            dtype=torch.float32,
            distributed_config=DistributedConfig(
                fsdp_size=NUM_TRAINERS, ep_size=NUM_TRAINERS, ep_implementation="moe_comm"
            ),
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, weight_decay=0.0, foreach=False
        )
        if first_step:
            self.load(first_step)

    def train_step(self, step: int) -> float:
        """Learn from the engine's texts; the reward of this rank's. Collective."""
        settings = self.settings
        prompts = settings.prompts_of(step, self.rank, settings.prompts)
        options = {
            "n": settings.samples,
            "temperature": 1.0,
            "seed": step * NUM_TRAINERS + self.rank,
        }
        sampled = torch.tensor(write(settings, prompts, **options).tokens)
        reward = VOWELS[sampled].float()
        advantage = (reward - reward.mean()) / (reward.std() + 1e-3)
        texts = torch.cat([prompts.repeat_interleave(settings.samples, 0), sampled], dim=1)
        self.model.train()
        logits = self.model(input_ids=texts, use_cache=False).logits[:, PROMPT_LETTERS - 1 : -1]
        logprobs = logprobs_of(logits, sampled)
        self.optimizer.zero_grad()
        (-(advantage * logprobs).mean()).backward()
        self.optimizer.step()
        return float(reward.mean())

    @torch.no_grad()
    def write_greedily(self) -> Written:
        """Continue the prompts that are checked. Collective."""
        self.model.eval()
        prompts = self.settings.checked_prompts()
        done = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=self.settings.tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = done.sequences[:, PROMPT_LETTERS:]
        logprobs = logprobs_of(torch.stack(done.logits, dim=1), tokens)
        return Written(tokens.tolist(), logprobs.tolist())

    def state(self) -> dict[str, Any]:
        """Parameters and what the optimizer knows, as `torch.distributed.checkpoint` takes them."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, step: int) -> None:
        """Save the state before a step, whole or not at all. Collective."""
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state(), checkpoint_id=self.settings.checkpoint(step))

    def load(self, step: int) -> None:
        """Go on from what was saved. Collective."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.state()
        dcp.load(state, checkpoint_id=self.settings.checkpoint(step))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of tokens, float `[texts, tokens]`."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def train(
    settings: Settings, trainer: Trainer, info: dict[str, Any], first: int, tell: Any
) -> None:
    """Train from a step on, and refit. Collective over trainers, and the engine in refits.

    Args:
        settings: Of the run.
        trainer: Of this rank.
        info: Of the host of the world.
        first: The step.
        tell: Called with what happens.
    """
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from moe_comm.resharding.clients.vllm import MoeCommTrainerInitInfo

    limits = {"timeout_s": LIMIT_S, "arrival_timeout_s": LIMIT_S}
    transfer = WeightTransferTrainerFactory.trainer_init(
        MoeCommTrainerInitInfo(info, rank=trainer.rank, **limits),
        client=HTTPVLLMWeightSyncClient(settings.url, timeout=LIMIT_S),
        source=trainer.model,
    )
    num_bytes = sum(each.numel() * each.element_size() for each in trainer.model.parameters())
    for step in range(first, settings.steps + 1):
        if step % settings.refit_every == 0 or step == settings.steps:
            if step > first:
                trainer.save(step)
            expected = trainer.write_greedily()
            tell("refit", step, expected)
            began = time.perf_counter()
            transfer.send_weights(step)
            seconds = time.perf_counter() - began
            if trainer.rank == 0:
                post(f"{settings.url}/reset_prefix_cache", {})
                if wrong := write_greedily(settings).differs_from(expected):
                    raise RuntimeError(f"the engine does not serve version {step}: {wrong}")
                tell("served", step, seconds, num_bytes)
        if step < settings.steps:
            tell("step", step, trainer.train_step(step))
    transfer.shutdown()


def run_trainer(
    settings: Settings,
    rank: int,
    info: dict[str, Any],
    first: int,
    attempt: int,
    report: Connection,
) -> None:
    """One trainer process."""
    from moe_comm.dispatcher import transformers as moe_comm_transformers

    torch.set_num_threads(1)

    def tell(*what: Any) -> None:
        report.send(what)

    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(settings.folder / f"trainers{attempt}"), NUM_TRAINERS),
            rank=rank,
            world_size=NUM_TRAINERS,
            timeout=dt.timedelta(seconds=LIMIT_S),
        )
        moe_comm_transformers.register()
        train(settings, Trainer(settings, rank, first), info, first, tell)
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - the first process says it
        tell("failed", f"{type(error).__name__}: {error}")
        report.close()
        os._exit(1)  # without waiting for peers that are gone
    tell("done")
    report.close()


# --- The first process -----------------------------------------------------------------------------


class Loop:
    """What starts the engine and the trainers, and starts them anew.

    Args:
        settings: Of the run.
        kills: By version, what is killed in the middle of its refit: a trainer or "engine".
        bar: A `tqdm`, which shows how far it is.

    Attributes:
        rewards: By step, of each trainer.
        refits: Seconds of the pause of each.
        num_ended: Trainers and engines that did not live to the end.
    """

    def __init__(self, settings: Settings, kills: dict[int, str], bar: Any) -> None:
        self.settings, self.kills, self.bar = settings, dict(kills), bar
        self.engine = Engine(settings)
        self.rewards: dict[int, dict[int, float]] = {}
        self.refits: list[float] = []
        self.num_ended = 0
        self._most_starts = len(kills) + 3
        self._written: dict[int, Written] = {}
        self._is_served = False
        self._draw = random.Random(settings.seed)
        self._context = multiprocessing.get_context("forkserver")
        # What trainers are forked from loads this once, while the engine starts.
        self._context.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()

    def run(self) -> None:
        """Train until the last step.

        Raises:
            RuntimeError: The engine serves no whole version, or it was started too often.
        """
        world = RefitWorld.host("127.0.0.1:0", num_trainers=NUM_TRAINERS, num_engines=1)
        with world:
            try:
                self.engine.start()
                for attempt in range(self._most_starts):
                    if self._train(attempt, world.info):
                        return
                    self._look_after_engine()
            finally:
                self.engine.end()
        raise RuntimeError(f"gave up after {self._most_starts} starts")

    def _train(self, attempt: int, info: dict[str, Any]) -> bool:
        """Run trainers until all have ended; whether they are done."""
        first = self._newest_checkpoint()
        living: dict[Connection, tuple[int, Any]] = {}
        for rank in range(NUM_TRAINERS):
            mine, theirs = self._context.Pipe(duplex=False)
            process = self._context.Process(
                target=run_trainer,
                args=(self.settings, rank, info, first, attempt, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            living[mine] = rank, process
        num_done, until = 0, float("inf")
        try:
            while living:
                for connection in wait(list(living), timeout=1.0):
                    assert isinstance(connection, Connection)
                    rank, process = living[connection]
                    try:
                        what, *values = connection.recv()
                    except (EOFError, OSError):  # the second in the middle of a word
                        del living[connection]
                        process.join()
                        if process.exitcode == -signal.SIGKILL:
                            self.bar.write(f"trainer {rank} was killed")
                    else:
                        self._hear(rank, process, what, values)
                        num_done += what == "done"
                if num_done < NUM_TRAINERS - len(living) and until == float("inf"):
                    until = time.monotonic() + 2 * LIMIT_S  # for the others to hear of it
                if time.monotonic() > until:
                    for _, process in living.values():
                        process.kill()
        finally:
            for _, process in living.values():
                process.kill()
        self.num_ended += NUM_TRAINERS - num_done
        return num_done == NUM_TRAINERS

    def _hear(self, rank: int, process: Any, what: str, values: list[Any]) -> None:
        if what == "failed":
            self.bar.write(f"trainer {rank}: {values[0]}")
        elif what == "step":
            step, reward = values
            self.rewards.setdefault(step, {})[rank] = reward
            self.bar.n = step + 1
            self.bar.set_postfix(reward=f"{reward:.2f}")
        elif what == "refit":
            version, written = values
            self._written[version] = written
            victim = self.kills.get(version)
            if victim == str(rank) or (victim == "engine" and rank == 0):
                del self.kills[version]
                time.sleep(self._draw.uniform(0, self.refits[-1] if self.refits else 0.2))
                (self.engine if victim == "engine" else process).kill()
        elif what == "served":
            version, seconds, num_bytes = values
            self.refits.append(seconds)
            self._written, self._is_served = {version: self._written[version]}, True
            text = "".join(LETTERS[letter] for letter in self._written[version].tokens[0])
            self.bar.write(
                f"version {version}: {num_bytes / 1e6:.1f} MB in {seconds * 1e3:.1f} ms, "
                f"{num_bytes / seconds / 1e9:.2f} GB/s; it writes {text!r}"
            )

    def _newest_checkpoint(self) -> int:
        """The step before which all trainers have saved what they have; 0 for the beginning."""
        found = self.settings.folder.glob("step*/.metadata")  # comes when all is there
        return max((int(path.parent.name.removeprefix("step")) for path in found), default=0)

    def _look_after_engine(self) -> None:
        """Hold what an engine serves that lives against what trainers had; start one that does not.

        Raises:
            RuntimeError: It serves something else than a version.
        """
        try:
            served = write_greedily(self.settings)
        except OSError as error:
            self._is_served = False
            self.num_ended += 1
            self.bar.write(f"the engine does not answer ({error}): it is started anew")
            self.engine.start()
        if not self._is_served:
            return  # it has its random weights
        differences = {
            version: served.differs_from(written) for version, written in self._written.items()
        }
        whole = [version for version, difference in differences.items() if not difference]
        if not whole:
            raise RuntimeError(f"the engine serves a MIXTURE: {differences}")
        self.bar.write(f"the engine serves version {whole[-1]}, whole")


def save_model(settings: Settings) -> None:
    """Save the model with which training begins, and a tokenizer, which vLLM asks for."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = settings.checkpoint(0) / "model"
    words = {letter: idx for idx, letter in enumerate(LETTERS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=" "))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=" ").save_pretrained(folder)
    torch.manual_seed(settings.seed)
    config = Qwen3MoeConfig(
        vocab_size=len(LETTERS),
        hidden_size=settings.hidden,
        intermediate_size=2 * settings.hidden,
        moe_intermediate_size=settings.hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=settings.experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return what the user asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--refit-every", type=int, default=2, help="steps")
    parser.add_argument("--prompts", type=int, default=16, help="per trainer and step")
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=16, help="of each sample")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--kill",
        nargs="*",
        default=[],
        metavar="VERSION:WHO",
        help="trainer 0, 1 or the engine, at a random moment of the refit to a version: 4:1 8:engine",
    )
    parsed = parser.parse_args(arguments)
    for name in ("steps", "refit_every", "prompts", "samples", "tokens"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, got {getattr(parsed, name)}")
    for name, divisor in (("hidden", 32), ("experts", NUM_TRAINERS)):
        if getattr(parsed, name) < 1 or getattr(parsed, name) % divisor:
            parser.error(f"--{name} must be a multiple of {divisor}, got {getattr(parsed, name)}")
    if PROMPT_LETTERS + parsed.tokens > 128:
        parser.error(f"--tokens must be <= {128 - PROMPT_LETTERS}, got {parsed.tokens}")
    versions = {*range(0, parsed.steps, parsed.refit_every), parsed.steps}
    kills: dict[int, str] = {}
    for each in parsed.kill:
        version, _, who = each.partition(":")
        if who not in ("0", "1", "engine") or not version.isdigit() or int(version) not in versions:
            parser.error(
                f"--kill wants a version of {sorted(versions)}, :, and 0, 1 or engine, got {each}"
            )
        kills[int(version)] = who
    parsed.kill = kills
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Train; 0 where the reward rose."""
    parsed = vars(parse_arguments(arguments))
    from tqdm import tqdm

    kills = parsed.pop("kill")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder, tqdm(total=parsed["steps"], unit="step") as bar:
        settings = Settings(folder=Path(folder), url=url, **parsed)
        save_model(settings)
        loop = Loop(settings, kills, bar)
        loop.run()
    rewards = [sum(of_step.values()) / NUM_TRAINERS for _, of_step in sorted(loop.rewards.items())]
    some = max(1, len(rewards) // 6)
    before, after = sum(rewards[:some]) / some, sum(rewards[-some:]) / some
    pause = statistics.median(loop.refits)
    print(
        f"{len(loop.refits)} refits, each served with the trainers' tokens; median pause "
        f"{pause * 1e3:.1f} ms; {loop.num_ended} processes ended early"
    )
    if not after > before + 0.1:
        print(f"NO BETTER: the reward was {before:.3f}, and is {after:.3f}")
        return 1
    print(f"better: the reward rose from {before:.3f} to {after:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

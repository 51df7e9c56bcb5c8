"""`from_pretrained` into 2 expert parallel ranks: by transformers, and by `load_checkpoint`."""

from __future__ import annotations

import functools
import importlib
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.checkpoints import load_checkpoint
from moe_comm.checkpoints.tensor_file import crc32c
from moe_comm.cli.bench.barrier import SpinBarrier
from moe_comm.cli.bench.checkpoint.run import CheckpointRow
from moe_comm.cli.bench.checkpoint.worker import FILES
from moe_comm.cli.bench.memory import PeakMemory
from moe_comm.cli.bench.processes import WorkerError, WorkerProcesses
from moe_comm.cli.bench.reshard.case import shape_of_bytes
from moe_comm.cli.bench.statistics import Interval, makespan_us, percentile, wall_times_us
from moe_comm.cli.reshard.model_shapes import MoEShape
from moe_comm.resharding import transformers_views
from moe_comm.resharding.describe.module_tensors import local_tensor
from moe_comm.tensors.memory import bytes_of

__all__ = ["TRANSFORMERS", "run_pretrained"]

TRANSFORMERS = "transformers"
NUM_RANKS = 2
SMALL = shape_of_bytes(16 << 20, torch.bfloat16)


class PretrainedWorker:
    """One rank, which loads once: what a process took at its peak is never given back whole.

    Args:
        place: The checkpoint.
        way: `TRANSFORMERS` or `FILES`.
        folder: Files for rendezvous and barrier.
        rank_idx: This rank.
    """

    def __init__(self, place: Path, way: str, folder: Path, rank_idx: int) -> None:
        transformers: Any = importlib.import_module(TRANSFORMERS)

        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        warnings.filterwarnings("ignore")
        self.place = place
        self.way = way
        self.model: Any = None
        if way == "write":
            return
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank_idx,
            world_size=NUM_RANKS,
        )
        self.barrier = SpinBarrier(folder / "barrier", rank_idx, NUM_RANKS)
        self.config = transformers.DistributedConfig(
            tp_size=1, fsdp_size=NUM_RANKS, ep_size=NUM_RANKS, ep_implementation="all_to_all"
        )
        # Modules are imported when they are first used, which is no part of reading files.
        self._empty(_config(SMALL))

    def write(self, shape: MoEShape) -> int:
        """Write a checkpoint of random bits as `save_pretrained` does; return its bytes."""
        transformers: Any = importlib.import_module(TRANSFORMERS)

        config = _config(shape)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.detach().view(torch.int16).random_(-(1 << 15), 1 << 15)
        model.save_pretrained(self.place)
        return sum(parameter.nbytes for parameter in model.parameters())

    def load(self) -> tuple[Interval, int]:
        """Load once; return when, and the memory that it took at its peak."""
        call = self._by_transformers if self.way == TRANSFORMERS else self._by_files
        self.barrier.wait()
        with PeakMemory(None) as peak:
            start = time.perf_counter_ns()
            self.model = call()
            stop = time.perf_counter_ns()
        return (start, stop), peak.private_bytes

    def checksums(self) -> dict[str, int]:
        """Checksums of all that this rank holds, by name."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {
            name: crc32c(bytes_of(local_tensor(tensor).detach().contiguous()).numpy())
            for name, tensor in named
        }

    def _by_transformers(self) -> Any:
        transformers: Any = importlib.import_module(TRANSFORMERS)

        return transformers.AutoModelForCausalLM.from_pretrained(
            self.place, dtype=torch.bfloat16, distributed_config=self.config
        )

    def _by_files(self) -> Any:
        transformers: Any = importlib.import_module(TRANSFORMERS)

        model = self._empty(transformers.AutoConfig.from_pretrained(self.place))
        load_checkpoint(transformers_views(model), self.place)
        return model.eval()

    def _empty(self, config: Any) -> Any:
        """A model as transformers spreads it, without values."""
        transformers: Any = importlib.import_module(TRANSFORMERS)

        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        kind = type(model)
        distributed, _, mesh = kind.prepare_distribute_model(self.config)
        model = kind.maybe_distribute_model(model, distributed, mesh)
        model.to_empty(device="cpu")
        # Buffers that are in no checkpoint.
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        return model

    def close(self) -> None:
        """Leave in good order."""
        self.model = None
        if dist.is_initialized():
            dist.destroy_process_group()


def _config(shape: MoEShape) -> Any:
    """The configuration of a Qwen3-MoE model of these sizes."""
    transformers: Any = importlib.import_module(TRANSFORMERS)

    return transformers.Qwen3MoeConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_query_groups,
        head_dim=shape.hidden // shape.num_heads,
        intermediate_size=shape.expert_ffn,
        moe_intermediate_size=shape.expert_ffn,
        num_experts=shape.num_experts,
        num_experts_per_tok=min(2, shape.num_experts),
        bos_token_id=None,
        eos_token_id=None,
    )


def run_pretrained(
    folder: Path,
    shape: MoEShape,
    num_repeats: int,
    on_progress: Callable[[str], None] = lambda _: None,
) -> CheckpointRow:
    """Check both ways against each other, then time them in turns, in new processes each time.

    Args:
        folder: Where the checkpoint is written.
        shape: Sizes of the model.
        num_repeats: Rounds.
        on_progress: Called with a short text after every step.

    Raises:
        WorkerError: A rank failed, or both ways differ in an element.
    """
    place = folder / "pretrained"
    place.mkdir()
    make = functools.partial(PretrainedWorker, place)
    on_progress("write a checkpoint by transformers")
    with WorkerProcesses(1, functools.partial(make, "write")) as writer:
        (num_bytes,) = writer.call("write", shape)
    ways = (FILES, TRANSFORMERS)
    times: dict[str, list[list[Interval]]] = defaultdict(list)
    peaks: dict[str, list[int]] = defaultdict(list)
    sums: dict[str, list[dict[str, int]]] = {}
    for number in range(num_repeats + 1):
        for way in ways if number % 2 else reversed(ways):
            on_progress(f"from_pretrained {number}/{num_repeats}: {way}")
            with WorkerProcesses(NUM_RANKS, functools.partial(make, way)) as ranks:
                answers = ranks.call("load")
                if number == 0:
                    sums[way] = ranks.call("checksums")
                    continue
            times[way].append([its for its, _ in answers])
            peaks[way].append(max(peak for _, peak in answers))
        if number == 0:
            _compare(sums)
    ours, theirs = (list(map(makespan_us, times[way])) for way in ways)
    walls = {way: [us for each in times[way] for us in wall_times_us(each)] for way in ways}
    op_us = percentile(ours, 0.5)
    return CheckpointRow(
        op="from_pretrained",
        way=FILES,
        case={"ranks": NUM_RANKS, "to": f"ep{NUM_RANKS}", "dtype": "bfloat16"},
        p50_us=percentile(walls[FILES], 0.5),
        p95_us=percentile(walls[FILES], 0.95),
        op_us=op_us,
        bytes=num_bytes,
        gbs=num_bytes / op_us / 1e3,
        speedup={TRANSFORMERS: percentile([b / a for a, b in zip(ours, theirs, strict=True)], 0.5)},
        peer_p50_us={TRANSFORMERS: percentile(walls[TRANSFORMERS], 0.5)},
        peak_bytes={way: int(percentile(peaks[way], 0.5)) for way in ways},
    )


def _compare(sums: dict[str, list[dict[str, int]]]) -> None:
    for rank, (ours, theirs) in enumerate(zip(sums[FILES], sums[TRANSFORMERS], strict=True)):
        differing = sorted(
            name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
        )
        if differing:
            raise WorkerError(
                f"the check of from_pretrained failed: rank {rank}: {differing[0]} is not what "
                "transformers loads"
            )

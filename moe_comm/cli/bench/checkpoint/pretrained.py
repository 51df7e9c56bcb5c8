"""`from_pretrained` into 2 expert parallel ranks: by transformers, and by `load_pretrained`."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_comm.checkpoints import load_pretrained
from moe_comm.checkpoints.tensor_file import crc32c
from moe_comm.cli.bench.checkpoint.run import CheckpointRow
from moe_comm.cli.bench.checkpoint.worker import FILES
from moe_comm.cli.bench.memory import PeakMemory
from moe_comm.cli.bench.processes import WorkerError, WorkerProcesses
from moe_comm.cli.bench.rank import RankWorker
from moe_comm.cli.bench.reshard.case import shape_of_bytes
from moe_comm.cli.bench.statistics import (
    Interval,
    all_wall_times_us,
    makespan_us,
    median_ratio,
    medians,
    percentile,
    time_columns,
)
from moe_comm.cli.reshard.model_shapes import MoEShape
from moe_comm.resharding.describe.module_tensors import local_tensor
from moe_comm.resharding.describe.transformers_views import empty_model
from moe_comm.tensors.memory import bytes_of

TRANSFORMERS = "transformers"
NUM_RANKS = 2
SMALL = shape_of_bytes(16 << 20, torch.bfloat16)


class PretrainedWorker(RankWorker):
    """One rank, which loads once: what a process took at its peak is never given back whole.

    Args:
        place: The checkpoint.
        way: `TRANSFORMERS` or `FILES`.
        folder: Files for rendezvous and barrier.
        rank_idx: This rank.
    """

    def __init__(self, place: Path, way: str, folder: Path, rank_idx: int) -> None:
        transformers = _transformers()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        warnings.filterwarnings("ignore")
        self.place = place
        self.way = way
        self.model: Any = None
        if way == "write":
            return
        super().__init__(NUM_RANKS, folder, rank_idx)
        self.config = transformers.DistributedConfig(
            tp_size=1, fsdp_size=NUM_RANKS, ep_size=NUM_RANKS, ep_implementation="all_to_all"
        )
        # Modules are imported when they are first used, which is no part of reading files.
        auto_class = transformers.AutoModelForCausalLM
        empty_model(auto_class, _config(SMALL), torch.bfloat16, self.config)

    def write(self, shape: MoEShape) -> int:
        """Write a checkpoint of random bits as `save_pretrained` does; return its bytes."""
        transformers = _transformers()
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

        def load() -> None:
            self.model = call()

        with PeakMemory(None) as peak:
            interval = self._timed(load)
        return interval, peak.private_bytes

    def checksums(self) -> dict[str, int]:
        """Checksums of all that this rank holds, by name."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {
            name: crc32c(bytes_of(local_tensor(tensor).detach().contiguous()).numpy())
            for name, tensor in named
        }

    def _by_transformers(self) -> Any:
        return _transformers().AutoModelForCausalLM.from_pretrained(
            self.place, dtype=torch.bfloat16, distributed_config=self.config
        )

    def _by_files(self) -> Any:
        return load_pretrained(
            _transformers().AutoModelForCausalLM,
            self.place,
            dtype=torch.bfloat16,
            distributed_config=self.config,
        )

    def close(self) -> None:
        """Leave in good order."""
        self.model = None
        if self.way != "write":
            super().close()


def _transformers() -> Any:
    return importlib.import_module(TRANSFORMERS)


def _config(shape: MoEShape) -> Any:
    """The configuration of a Qwen3-MoE model of these sizes."""
    return _transformers().Qwen3MoeConfig(
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
        folder: Folder that the checkpoint is written to.
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
    walls = {way: all_wall_times_us(times[way]) for way in ways}
    return CheckpointRow(
        op="from_pretrained",
        way=FILES,
        case={"ranks": NUM_RANKS, "to": f"ep{NUM_RANKS}", "dtype": "bfloat16"},
        **time_columns(walls[FILES], percentile(ours, 0.5), num_bytes),
        speedup={TRANSFORMERS: median_ratio(theirs, ours)},
        peer_p50_us=medians({TRANSFORMERS: walls[TRANSFORMERS]}),
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

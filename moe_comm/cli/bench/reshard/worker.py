"""One rank of the benchmark: builds its parts of both models, checks, times and measures."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any, Literal

import torch

from moe_comm.cli.bench.memory import PeakMemory
from moe_comm.cli.bench.rank import RankWorker, Sample
from moe_comm.cli.bench.reshard.case import (
    CHECKSUM,
    DELTA,
    DELTA_MASK,
    FULL_TENSORS,
    ReshardCase,
    ReshardOptions,
)
from moe_comm.cli.bench.reshard.engine_storage import FullTensorsByName, stack_experts, views_of
from moe_comm.cli.bench.statistics import Interval
from moe_comm.cli.reshard.model_shapes import ShapedModel, build_module, fill, find_differences
from moe_comm.peers.communicator import Communicator
from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.copy_services.changed_blocks import BLOCK_BYTES
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.resharding.describe.checkpoint_views import CheckpointViews
from moe_comm.resharding.describe.module_tensors import named_refit_tensors
from moe_comm.resharding.hold.heap_parameters import (
    SharedWeights,
    place_in_heap,
    share_in_place,
)
from moe_comm.resharding.hold.refit import Refit, clear_all_caches, swap_model_weights
from moe_comm.resharding.hold.refit_services import SERVICES

LINE_BYTES = 64
# Larger than any cache: what lies there is not there any more when it is read again.
MAX_SCRATCH_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class RefitSample(Sample):
    """One refit on one rank.

    Args:
        copy_ns: Time that the transport spent copying; None where it does not say.
    """

    copy_ns: int | None = None


class ReshardWorker(RankWorker):
    """One rank that refits.

    Args:
        case: The case.
        options: Options of the run.
        folder: Files for rendezvous and barrier.
        rank_idx: This rank.
    """

    def __init__(
        self, case: ReshardCase, options: ReshardOptions, folder: Path, rank_idx: int
    ) -> None:
        super().__init__(case.num_ranks, folder, rank_idx, is_pinned=options.is_pinned)
        self.case = case
        self.communicator = Communicator(
            num_threads=options.num_threads, with_huge_pages=options.with_huge_pages
        )
        # This rank's part of the bytes that are written, as if all ranks wrote equally many. Worked
        # out here: the roof is timed.
        written_bytes = case.num_elements() * case.layouts.destination_dtype.itemsize
        self.share_bytes = written_bytes // case.num_ranks // LINE_BYTES * LINE_BYTES
        self.services: dict[str, CopyService] = {}
        self.roof: tuple[Any, Any] | None = None
        self.source = self._build_source()
        self.target = self._build_target()
        self.target_side: ShapedModel | CheckpointViews | None = self.target
        if case.is_stacked and self.target is not None:
            self.target_side = CheckpointViews(views_of(self.target), self.target)
        self.shared: SharedWeights | None = None
        if case.memory == "shared" and self.target_side is not None:
            self.shared = share_in_place(self.target_side, self.communicator)
        self.full_tensors: FullTensorsByName | None = None
        self.deltas: Refit | None = None
        self.touched = {} if self.source is None else _touched(self.source)

    def check(self, transport: str) -> tuple[str | None, dict[str, int]]:
        """Refit into poisoned weights, twice, and compare every element with what it must be.

        Returns:
            None or what is wrong; and the bytes each refit took besides both models at its peak:
            `heap` in this rank's heap, `private` in its other memory; of the second refit with
            prefix `second_`.
        """
        problems: list[str] = []
        memory: dict[str, int] = {}
        # The second refit runs what the first one prepared.
        for prefix in ("", "second_"):
            if self.target is not None:
                _poison(self.target)
            gc.collect()
            self.barrier.wait()
            with PeakMemory(self.communicator) as peak:
                self._refit(transport)
            memory[f"{prefix}heap"] = peak.heap_bytes
            memory[f"{prefix}private"] = peak.private_bytes
            if self.target is not None:
                found = find_differences(self.target, self.case.seed)
                problems += [f"rank {self.rank_idx}: {text}" for text in found]
            if transport in (DELTA, DELTA_MASK):
                problems += self._check_delta(transport)
        return (problems[0] if problems else None), memory

    def _check_delta(self, transport: str) -> list[str]:
        """Change weights and change them back."""
        problems = []
        for _ in range(2):
            self._touch()
            self._refit(transport)
            report = None if self.deltas is None else self.deltas.last_delta
            if report is None or report.whole or not 0 < report.sent_bytes < report.total_bytes:
                problems.append(f"rank {self.rank_idx}: not what changed has travelled: {report}")
        if self.target is not None:
            found = find_differences(self.target, self.case.seed)
            problems += [f"rank {self.rank_idx}: {text}" for text in found]
        return problems

    def prepare_roof(self) -> bool:
        """Make what the roof copies between; returns whether there is a roof here."""
        try:
            from moe_comm import _host  # noqa: F401 - without it there is no roof
        except ImportError:
            return False
        num_bytes = min(self.share_bytes, MAX_SCRATCH_BYTES)
        if num_bytes == 0:
            return False
        # Memory of the operation's own kinds, with data as random as weights are.
        src = torch.empty(num_bytes, dtype=torch.uint8)
        words = src.view(torch.int16)
        draw = torch.Generator().manual_seed(self.rank_idx)
        for first in range(0, words.numel(), 1 << 22):
            block = words[first : first + (1 << 22)]
            block.copy_(torch.randint(-(1 << 15), 1 << 15, block.shape, generator=draw))
        if self.case.memory == "heap":
            dst = self.communicator.empty(num_bytes, dtype=torch.uint8)
        else:
            dst = torch.empty(num_bytes, dtype=torch.uint8)
        dst.fill_(1)
        self.roof = (src.numpy(), dst.numpy())
        return True

    def release_roof(self) -> None:
        """Give the memory of the roof back."""
        self.roof = None

    def roof_bytes(self) -> int:
        """Bytes that the roof reads and writes on this rank."""
        return 0 if self.roof is None else 2 * self.share_bytes

    def sample(self, transport: str) -> RefitSample:
        """Time a refit once, between two roofs."""
        before = self._timed(self._run_roof) if self.roof is not None else None
        op = self._timed(lambda: self._refit(transport))
        after = self._timed(self._run_roof) if self.roof is not None else None
        stats = getattr(self.services[transport], "last_stats", None)
        return RefitSample(
            op=op,
            roof_before=before,
            roof_after=after,
            copy_ns=None if stats is None else stats.copy_ns,
        )

    def time_peer(self, transport: str) -> Interval:
        """Time a refit over another transport once."""
        if transport in (DELTA, DELTA_MASK):
            self._refit(transport)  # the refit before was another one, which it knows nothing of
            self._touch()
        return self._timed(lambda: self._refit(transport))

    def describe(self) -> dict[str, Any]:
        """Describe the tensors that this rank holds."""
        return {
            "source_bytes": _num_bytes(self.source),
            "target_bytes": _num_bytes(self.target),
            "num_target_tensors": 0
            if self.target is None
            else sum(1 for _ in named_refit_tensors(self.target)),
        }

    def close(self) -> None:
        """Leave in good order."""
        self.release_roof()
        for service in self.services.values():
            service.close()
        clear_all_caches()
        if self.shared is not None:
            self.shared.close()
        self.source = self.target = self.target_side = self.deltas = None
        self.touched.clear()
        self.communicator.destroy()
        super().close()

    def _build_source(self) -> ShapedModel | None:
        layouts = self.case.layouts
        if self.rank_idx >= layouts.source.num_ranks:
            return None
        module = build_module(
            layouts.shape, layouts.source, self.rank_idx, dtype=layouts.source_dtype
        )
        fill(module, self.case.seed)
        return module

    def _build_target(self) -> ShapedModel | None:
        layouts = self.case.layouts
        if self.rank_idx not in layouts.destination_ranks:
            return None
        offset = layouts.destination_offset
        module = build_module(
            layouts.shape,
            layouts.destination,
            self.rank_idx - offset,
            dtype=layouts.destination_dtype,
            rank_offset=offset,
        )
        if self.case.is_stacked:
            stack_experts(module)
        _poison(module)
        if self.case.memory == "heap":
            place_in_heap(module, self.communicator)
        return module

    def _refit(self, transport: str) -> None:
        """Run the measured operation: a refit as a user calls it."""
        if transport == FULL_TENSORS:
            if self.full_tensors is None:
                self.full_tensors = FullTensorsByName(self.case.layouts, self.rank_idx)
            self.full_tensors.run(self.source, self.target)
            return
        if transport in (DELTA, DELTA_MASK):
            self._refit_changes(with_mask=transport == DELTA_MASK)
            return
        verify: Literal["checksum"] | None = "checksum" if transport == CHECKSUM else None
        if verify is not None:
            transport = self.case.transport
        service = self._service(transport)
        swap_model_weights(self.source, self.target_side, service, verify=verify)

    def _refit_changes(self, *, with_mask: bool) -> None:
        if self.deltas is None:
            service = self._service(self.case.transport)
            self.deltas = Refit(self.source, self.target_side, service, deltas="blocks")
        masks = {name: rows for name, (_, rows) in self.touched.items()}
        self.deltas.run(changed=masks if with_mask else None)

    def _touch(self) -> None:
        """Flip a bit in every hundredth block of the source; the next call flips it back."""
        for data, _ in self.touched.values():
            data ^= 1

    def _service(self, transport: str) -> CopyService:
        if transport not in self.services:
            self.services[transport] = self._make_service(transport)
        return self.services[transport]

    def _make_service(self, transport: str) -> CopyService:
        if transport == "symmetric":
            return SymmetricCopyService(communicator=self.communicator)
        make: Any = SERVICES[transport]
        service: CopyService = make()
        return service

    def _run_roof(self) -> None:
        from moe_comm import _host

        assert self.roof is not None
        src, dst = self.roof
        left = self.share_bytes
        while left:
            num_bytes = min(left, src.size)
            _host.kernels.roof_copy(src[:num_bytes], dst[:num_bytes])
            left -= num_bytes


def _touched(module: ShapedModel) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A byte of every hundredth block of a source, and the rows that these bytes are in, by name."""
    touched = {}
    next_byte = 0
    for name, tensor in named_refit_tensors(module):
        data = tensor.detach().view(-1).view(torch.uint8)
        if next_byte < data.numel():
            step = 100 * BLOCK_BYTES
            at = torch.arange(next_byte, data.numel(), step)
            rows = torch.zeros((tensor.shape[0], *[1] * (tensor.dim() - 1)), dtype=torch.bool)
            rows[at // (data.numel() // tensor.shape[0])] = True
            touched[name] = data[next_byte::step], rows
            next_byte = int(at[-1]) + step
        next_byte -= data.numel()
    return touched


def _poison(module: ShapedModel) -> None:
    """Fill with bytes that are NaN in every format."""
    for _, tensor in named_refit_tensors(module):
        tensor.detach().view(torch.uint8).fill_(0xFF)


def _num_bytes(module: ShapedModel | None) -> int:
    return 0 if module is None else sum(t.nbytes for _, t in named_refit_tensors(module))

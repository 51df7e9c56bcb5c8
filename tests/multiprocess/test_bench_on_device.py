"""Copies and allocations of a rank of the benchmark on a device that ranks share as threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_comm.cli.bench.barrier import SpinBarrier
from moe_comm.cli.bench.case import BenchCase, make_x
from moe_comm.cli.bench.measured_calls import NativeExchange, Received
from moe_comm.cli.bench.side import Side
from moe_comm.tensors.quantization import FP8_BLOCK128
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.pretended_device import (
    DEVICE,
    PretendedCommunicator,
    on_pretended_device,
    pretend,
)


class Watch(TorchDispatchMode):
    """Fails where a rank has the device wait while kernels of any rank may be under way, or the other way.

    Copies of pageable memory and allocations may wait for the kernels of all ranks, which wait for each
    other: between the two every rank is at a barrier.

    Args:
        exchange: Calls of this rank.
        barrier: Of the ranks.
    """

    def __init__(self, exchange: NativeExchange, barrier: SpinBarrier) -> None:
        super().__init__()
        self._exchange = exchange
        self._barrier = barrier
        self._since_barrier = ""
        self._is_in_call = False
        self.met: list[str] = []

    def wait(self) -> None:
        """Stand-in for the barrier."""
        self._barrier.wait(60.0)
        self._since_barrier = ""

    def dispatch(self) -> Received:
        """Send the tokens of this rank."""
        return self._call("kernels", "dispatch")

    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        """Sums of rows."""
        return self._call("kernels", "combine", rows, handle)

    def empty_expert_output(self, handle: Any) -> torch.Tensor:
        """A window, for which the heap may grow."""
        return self._call("the device waits", "empty_expert_output", handle)

    def _note(self, kind: str, name: str) -> None:
        assert self._since_barrier in ("", kind), f"{name} since {self._since_barrier}"
        self._since_barrier = kind
        self.met.append(name)

    def _call(self, kind: str, name: str, *arguments: Any) -> Any:
        self._note(kind, name)
        self._is_in_call = True  # what the package itself asks for is no affair of the benchmark
        try:
            return getattr(self._exchange, name)(*arguments)
        finally:
            self._is_in_call = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name
        on_device = {
            each.device == DEVICE for each in (*args, made) if isinstance(each, torch.Tensor)
        }
        is_allocation = name.startswith("aten::empty") and True in on_device
        if not self._is_in_call and (is_allocation or len(on_device) == 2):
            self._note("the device waits", name)
        return made


@pytest.mark.parametrize("quantization", [None, FP8_BLOCK128])
def test_a_check_asks_nothing_of_the_device_beside_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quantization: Any
) -> None:
    pretend(monkeypatch)
    case = BenchCase(
        num_ranks=2,
        num_tokens=16,
        hidden=512,
        num_topk=3,
        num_experts=4,
        quantization=quantization,
        with_weights=True,
    )
    shared = tmp_path / "barrier"
    shared.write_bytes(bytes(SpinBarrier.file_bytes(case.num_ranks)))

    def check(context: RankContext) -> list[str]:
        rank_idx = context.rank_idx
        with (
            on_pretended_device(),
            PretendedCommunicator(context.group, DEVICE) as communicator,
        ):
            x = make_x(case, rank_idx).to(DEVICE)
            exchange = NativeExchange(communicator, case, rank_idx, x)
            watch: Any = Watch(exchange, SpinBarrier(shared, rank_idx, case.num_ranks))
            side, again = (Side(case, rank_idx, watch, x) for _ in range(2))
            with watch:
                assert side.check(None, watch) is None
                assert again.check(side, watch) is None
            exchange.buffer.destroy()
            met: list[str] = watch.met
        return met

    for met in run_ranks(check, case.num_ranks, mode="threads"):
        assert met.count("dispatch") == 2
        assert met.count("combine") == 4
        assert met.count("empty_expert_output") == 1
        assert "aten::empty_like" in met
        assert "aten::_to_copy" in met
        assert "aten::copy_" in met

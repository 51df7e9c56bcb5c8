"""Copies through page-locked memory, on CPU memory that claims another device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.pretended_device import DEVICE, on_pretended_device
from tests.helpers.staging import Staging

TENSORS = {
    "rows": torch.arange(60, dtype=torch.float64).view(5, 12),
    "columns": torch.arange(60, dtype=torch.float32).view(12, 5).t(),
    "gaps": torch.arange(60, dtype=torch.int16).view(5, 12)[1:, 2:7],
    "one of a kind": torch.arange(5).expand(3, 5),
    "scalar": torch.tensor(7),
    "nothing": torch.empty(0, 4),
    "flags": torch.arange(40) % 3 == 0,
    "complex": torch.arange(9).to(torch.complex128),
}


class Crossings(TorchDispatchMode):
    """Fails where a copy from one side to the other could wait for whoever else uses the device.

    Args:
        page_locked: What may take part on the host.
    """

    def __init__(self, page_locked: torch.Tensor) -> None:
        super().__init__()
        self._page_locked = page_locked.untyped_storage().data_ptr()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        devices = {each.device for each in args if isinstance(each, torch.Tensor)}
        assert name != "aten::_to_copy"
        if name == "aten::copy_" and len(devices) == 2:
            on_host = next(each for each in args[:2] if each.device != DEVICE)
            assert on_host.untyped_storage().data_ptr() == self._page_locked
            is_non_blocking = args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking")
            assert is_non_blocking
            self.sizes.append(on_host.numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_bytes", [16, 48, 1 << 12])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_cross_as_they_are(name: str, num_bytes: int) -> None:
    given = TENSORS[name]
    staging = Staging(DEVICE, num_bytes)
    with on_pretended_device():
        there = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=DEVICE)
        with Crossings(staging._memory) as crossings:
            assert staging.put(there, given) is there
            back = staging.fetch(there)
        assert torch.equal(there.cpu(), given)
    assert back.device.type == "cpu"
    assert back.stride() == given.stride()
    assert torch.equal(back, given)
    assert len(crossings.sizes) % 2 == 0
    assert all(size <= num_bytes for size in crossings.sizes)
    assert bool(crossings.sizes) == bool(given.numel())


def test_rows_go_into_a_tensor_of_other_strides() -> None:
    rows = TENSORS["columns"]
    with on_pretended_device():
        window = torch.empty(rows.shape, dtype=rows.dtype, device=DEVICE)
        staging = Staging(DEVICE, 48)
        assert torch.equal(staging.fetch(staging.put(window, rows)), rows)


def test_what_follows_waits_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory holds the next part only when the stream has read the one before."""
    events: list[str] = []
    staging = Staging(DEVICE, 16)
    monkeypatch.setattr(Staging, "_settle", lambda _: events.append("settled"))
    with on_pretended_device():
        there = staging.put(torch.empty(12, device=DEVICE), torch.ones(12))
        staging.fetch(there)
    assert events == ["settled"] * 6

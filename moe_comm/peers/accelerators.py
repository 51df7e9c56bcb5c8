"""Devices of torch other than the CPU, of any kind, as far as rows that pass through the host need them."""

from __future__ import annotations

import torch


def resolve_device(device: torch.device) -> torch.device:
    """A device with its number: that of the current one of this process where it has none.

    Raises:
        ValueError: Torch has no such device in this process.
    """
    try:
        module = torch.get_device_module(device)
        count = module.device_count() if module.is_available() else 0
        index = module.current_device() if count and device.index is None else device.index or 0
    except (AttributeError, RuntimeError) as error:
        raise ValueError(f"torch {torch.__version__} cannot use device {device}: {error}") from None
    if index >= count:
        raise ValueError(
            f"device {device} is not among the {count} of its kind that torch {torch.__version__} finds"
        )
    return torch.device(device.type, index)


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of this thread is captured into a graph."""
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def has_pinned_memory(device: torch.device) -> bool:
    """Return whether torch makes page-locked memory of the host for a device."""
    try:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != device.type:
            return False
        return torch.empty(1, dtype=torch.uint8, device="cpu", pin_memory=True).is_pinned()
    except RuntimeError:  # of a backend without
        return False

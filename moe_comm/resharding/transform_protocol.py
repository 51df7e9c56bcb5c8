"""What a caller may do to parameters on their way: the hooks of `execute_reshard_plan`."""

from __future__ import annotations

import torch

__all__ = ["ReshardTransform", "Slices"]

Slices = tuple[slice, ...]


class ReshardTransform:
    """Changes parameters between source and destination, for example their number format.

    Both ends of a transfer must make the same number of tensors, with equal shapes and dtypes. The
    base class transforms nothing.
    """

    def should_transform(self, param_name: str) -> bool:
        """Whether the three methods below handle `param_name` (a name in the whole model)."""
        del param_name
        return False

    def prepare_send(
        self, param_name: str, src_slice: Slices, src_param: torch.Tensor
    ) -> list[torch.Tensor]:
        """The tensors that travel for one piece of a source parameter."""
        raise NotImplementedError(f"{type(self).__name__}.prepare_send for {param_name}")

    def prepare_recv(self, param_name: str, dst_slice: Slices) -> list[torch.Tensor]:
        """Empty tensors that take what `prepare_send` of the other end made."""
        raise NotImplementedError(f"{type(self).__name__}.prepare_recv for {param_name}")

    def finalize_recv(
        self, param_name: str, dst_slice: Slices, recv_buffers: list[torch.Tensor]
    ) -> None:
        """Write what was received into the destination."""
        raise NotImplementedError(f"{type(self).__name__}.finalize_recv for {param_name}")

"""Hooks of `execute_reshard_plan`, by which a caller changes parameters on their way."""

from __future__ import annotations

from typing import Any

import torch

from moe_comm.resharding.plan.transfer_op import Slices, TransferOp


class ReshardTransform:
    """Changes parameters between source and destination, for example their number format.

    Both ends of a transfer must make the same number of tensors, with equal shapes and dtypes. The
    base class transforms nothing.

    A subclass writes the first four methods. `execute_reshard_plan` calls the others, which stand on
    those; a subclass overrides them where it needs to know the whole transfer.
    """

    def should_transform(self, param_name: str) -> bool:
        """Return whether the methods below handle `param_name`, a name in this rank's own module."""
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

    def begin(self) -> None:
        """Called before the first piece of a refit: forget what a refit that failed left behind."""
        return

    def finish(self) -> None:
        """Called after the last piece of a refit; raises where a destination is incomplete."""
        return

    def tensors_written(self) -> list[torch.Tensor]:
        """Return the tensors that `finalize_recv` writes. A plan moves none under names of their own."""
        return []

    def expected_of(self, op: TransferOp, src_param: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the tensors that the other end's `written_of` must give after the write, by the sender.

        Asked for by `verify="checksum"`, as is `written_of`. The base class says of nothing what it must
        be: its parameters are not proven.
        """
        return None

    def written_of(self, op: TransferOp) -> list[torch.Tensor] | None:
        """Return the destination's tensors of a piece, read from its storage; None where nobody can tell."""
        return None

    def prepare_send_of(self, op: TransferOp, src_param: torch.Tensor) -> list[torch.Tensor]:
        """`prepare_send` for one transfer; `src_param` is the whole tensor in its own shape."""
        viewed = src_param if op.my_view is None else src_param.view(op.my_view)
        return self.prepare_send(op.param_name, op.my_slice, viewed)

    def prepare_recv_of(self, op: TransferOp) -> list[torch.Tensor]:
        """`prepare_recv` for one transfer."""
        self._require_no_view(op)
        return self.prepare_recv(op.param_name, op.my_slice)

    def finalize_recv_of(self, op: TransferOp, recv_buffers: list[torch.Tensor]) -> None:
        """`finalize_recv` for one transfer."""
        self._require_no_view(op)
        self.finalize_recv(op.param_name, op.my_slice, recv_buffers)

    def _require_no_view(self, op: TransferOp) -> None:
        if op.my_view is not None:
            raise NotImplementedError(
                f"{type(self).__name__} writes {op.param_name} in its own shape, the plan cuts it as "
                f"{op.my_view}: override prepare_recv_of and finalize_recv_of"
            )


def as_reshard_transform(transform: Any) -> ReshardTransform:
    """`transform` itself, or a `ReshardTransform` in front of an object with its first four methods."""
    is_own = issubclass(type(transform), ReshardTransform)
    return transform if is_own else _Foreign(transform)


class _Foreign(ReshardTransform):
    """A transform of another package, called by its own four methods."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform
        for name in ("should_transform", "prepare_send", "prepare_recv", "finalize_recv"):
            if not callable(getattr(transform, name, None)):
                raise TypeError(f"a transform has a method {name}; {transform!r} has none")

    def should_transform(self, param_name: str) -> bool:
        return bool(self.transform.should_transform(param_name))

    def prepare_send(
        self, param_name: str, src_slice: Slices, src_param: torch.Tensor
    ) -> list[torch.Tensor]:
        return list(self.transform.prepare_send(param_name, src_slice, src_param))

    def prepare_recv(self, param_name: str, dst_slice: Slices) -> list[torch.Tensor]:
        return list(self.transform.prepare_recv(param_name, dst_slice))

    def finalize_recv(
        self, param_name: str, dst_slice: Slices, recv_buffers: list[torch.Tensor]
    ) -> None:
        self.transform.finalize_recv(param_name, dst_slice, recv_buffers)

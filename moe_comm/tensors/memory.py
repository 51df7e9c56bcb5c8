"""Tells whether the elements of a tensor lie in memory that it has: asked before an address of it is taken."""

from __future__ import annotations

from typing import TypeVar, cast

import torch

TensorT = TypeVar("TensorT")


def as_resolved(tensor: TensorT) -> TensorT:
    """Return the same numbers, contiguous, and none of them a lazy conjugate or negation.

    Anything but a dense tensor is returned as it is, for others to refuse.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return tensor
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return cast("TensorT", tensor.contiguous().resolve_conj().resolve_neg())


def problem_with_memory(tensor: torch.Tensor) -> str | None:
    """Return the reason, to follow a tensor's name, that native code cannot reach its elements, or None.

    A storage may be freed or cut under tensors that go on to exist (`untyped_storage().resize_(0)`, as
    whoever offloads weights does), and fake, sparse and wrapped tensors have no address.
    """
    from moe_comm import _host

    return _host.problem_with_memory(tensor)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor, as uint8."""
    # Contiguous tensors of one element may have any strides, with which they are no bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def storage_id(tensor: torch.Tensor) -> int:
    """Return what tells the storage of a tensor from all others that are alive."""
    return int(tensor.untyped_storage()._cdata)


def num_spanned(tensor: torch.Tensor) -> int:
    """Return the elements of its storage from the first to the last of a tensor, whatever lies between.

    Args:
        tensor: Strided, with one element at least.
    """
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Check that the elements of a tensor lie in its storage.

    Raises:
        ValueError: They do not.
    """
    problem = problem_with_memory(tensor)
    if problem is not None:
        raise ValueError(f"{name} {problem}")

"""Native backends whose operations belong to the caller's current stream."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from moe_comm.ep.backends.base import CombineOutput, DispatchOutput, Operation, Plan
from moe_comm.ep.backends.native import NativeBackend

ResultT = TypeVar("ResultT")


class StreamCallersBackend(NativeBackend):
    """A `NativeBackend` that is told of the stream before every call; see `Backend`."""

    @abc.abstractmethod
    def _in_stream(self, call: Callable[[], ResultT]) -> ResultT:
        """Run `call` for the stream that is current now."""

    def dispatch(self, *arguments: Any, **options: Any) -> Operation[DispatchOutput]:
        return self._in_stream(lambda: NativeBackend.dispatch(self, *arguments, **options))

    def dispatch_unchecked(self, *arguments: Any) -> Operation[DispatchOutput] | None:
        return self._in_stream(lambda: NativeBackend.dispatch_unchecked(self, *arguments))

    def dispatch_cached(self, *arguments: Any, **options: Any) -> Operation[DispatchOutput]:
        return self._in_stream(lambda: NativeBackend.dispatch_cached(self, *arguments, **options))

    def combine(self, *arguments: Any, **options: Any) -> Operation[CombineOutput]:
        return self._in_stream(lambda: NativeBackend.combine(self, *arguments, **options))

    def combine_unchecked(
        self, *arguments: Any
    ) -> Operation[CombineOutput] | tuple[torch.Tensor, int] | None:
        return self._in_stream(lambda: NativeBackend.combine_unchecked(self, *arguments))

    def weighted_gradient(
        self, gradient: torch.Tensor, expert_out: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return self._in_stream(
            lambda: NativeBackend.weighted_gradient(self, gradient, expert_out, weights)
        )

    def empty_expert_output(self, plan: Plan, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        return self._in_stream(lambda: NativeBackend.empty_expert_output(self, plan, hidden, dtype))

    def reject(self, operation: str, error: Exception) -> NoReturn:
        self._in_stream(lambda: None)
        super().reject(operation, error)

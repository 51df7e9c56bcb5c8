"""Weights of TRL's asynchronous GRPO trainer, brought to whoever generates."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from moe_comm.resharding.clients.tensor_stream import TensorStream
from moe_comm.resharding.describe.transformers_views import disk_tensors

__all__ = ["TrlWeightTransfer"]


class TrlWeightTransfer:
    """An `AsyncGRPOTrainer(weight_transfer=...)`: TRL's `WeightTransferProtocol`, by names on disk.

    TRL calls it in its main process, with full tensors by transformers' own names. They leave by the names
    that `save_pretrained` writes, which engines read.

    Args:
        model: Model that is trained, a `PreTrainedModel`.
        connect: Callable that is called once, as training begins; returns the stream on whose other ends
            `receive()` runs.
        pause: Callable that is called before a transfer, such as with what stops the engine.
        resume: Callable that is called after it.
        destroy: Callable that is called as training ends.

    Attributes:
        version: Transfers that arrived whole, which travels as the stream's version.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        connect: Callable[[], TensorStream],
        *,
        pause: Callable[[], None] | None = None,
        resume: Callable[[], None] | None = None,
        destroy: Callable[[], None] | None = None,
    ) -> None:
        self.version = 0
        self._model, self._connect = model, connect
        self._pause, self._resume, self._destroy = pause, resume, destroy
        self._stream: TensorStream | None = None

    def init_weight_transfer(self) -> None:
        """Connect."""
        if self._stream is None:
            self._stream = self._connect()

    def pause(self) -> None:
        """Stop whoever generates."""
        if self._pause is not None:
            self._pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send full tensors, by transformers' own names.

        Takes all of them, also where it fails: other ranks of the trainer take part in making each.

        Raises:
            RuntimeError: Nothing is connected.
            ValueError: A tensor that the model has not, or of another shape; or a parameter has not come.
            StreamError: The tensors did not arrive whole.
        """
        if self._stream is None:
            raise RuntimeError("send_weights before init_weight_transfer: nothing is connected")
        try:
            self._stream.send(self._on_disk(iterator), str(self.version + 1))
        except Exception:
            for _ in iterator:
                pass
            raise
        self.version += 1

    def _on_disk(
        self, named: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        missing = {name for name, _ in self._model.named_parameters()}

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in named:
                missing.discard(name)
                yield name, tensor

        yield from disk_tensors(self._model, noted())
        if missing:
            raise ValueError(
                f"{min(missing)}: this parameter has not come, nor have {len(missing) - 1} others"
            )

    def resume(self) -> None:
        """Let whoever generates go on."""
        if self._resume is not None:
            self._resume()

    def destroy(self) -> None:
        """Let go of the stream."""
        self._stream = None
        if self._destroy is not None:
            self._destroy()

"""Routing traces: what a router chose, recorded by a training run and replayed by the benchmark."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

__all__ = ["RoutingTrace", "load_routing_trace", "save_routing_trace"]

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RoutingTrace:
    """Recorded choices of a router.

    Args:
        topk_idx: int64 `[num_samples, num_tokens, num_topk]`, -1 for an unused choice. A sample is
            one MoE layer of one step; its tokens are those of all ranks, in rank order.
        num_experts: Experts the router chose from.
        num_ranks: Ranks of the recorded run.

    Raises:
        ValueError: A shape is not as above, or an id is outside `[-1, num_experts)`.
        TypeError: `topk_idx` does not hold integers.
    """

    topk_idx: torch.Tensor
    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        ids = self.topk_idx
        if ids.dtype not in (torch.int16, torch.int32, torch.int64):
            raise TypeError(f"topk_idx must be int16, int32 or int64, got {ids.dtype}")
        if ids.dim() != 3:
            raise ValueError(
                f"topk_idx must be [num_samples, num_tokens, num_topk], got shape {tuple(ids.shape)}"
            )
        if self.num_experts < 1 or self.num_ranks < 1:
            raise ValueError(
                f"num_experts and num_ranks must be >= 1, got {self.num_experts} and {self.num_ranks}"
            )
        if ids.numel() == 0:
            raise ValueError(f"a trace must hold at least one choice, got shape {tuple(ids.shape)}")
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < -1 or highest >= self.num_experts:
            raise ValueError(
                f"expert ids must be in [-1, {self.num_experts}), got [{lowest}, {highest}]"
            )
        object.__setattr__(self, "topk_idx", ids.to(dtype=torch.int64, device="cpu").contiguous())

    @property
    def num_topk(self) -> int:
        """Choices per token."""
        return int(self.topk_idx.shape[2])

    def rank_topk_idx(self, rank_idx: int, num_tokens: int) -> torch.Tensor:
        """Choices for `num_tokens` tokens of one rank.

        The samples are laid end to end; rank r takes tokens `[r * num_tokens, (r + 1) * num_tokens)`,
        starting over at the end of the trace.

        Returns:
            int64 `[num_tokens, num_topk]`.
        """
        flat = self.topk_idx.reshape(-1, self.num_topk)
        token_idx = torch.arange(rank_idx * num_tokens, (rank_idx + 1) * num_tokens)
        return flat[token_idx % flat.shape[0]]


def save_routing_trace(
    path: str | Path, topk_idx: torch.Tensor, *, num_experts: int, num_ranks: int
) -> None:
    """Write a trace as a compressed `.npz` file with exactly the name `path`.

    Keys: `topk_idx` (int16 where ids fit, else int64), `num_experts`, `num_ranks`, `version`.

    Args:
        path: File to write.
        topk_idx: Integers `[num_samples, num_tokens, num_topk]`.
        num_experts: Experts the router chose from.
        num_ranks: Ranks of the recorded run.

    Raises:
        ValueError: See `RoutingTrace`.
    """
    trace = RoutingTrace(topk_idx=topk_idx, num_experts=num_experts, num_ranks=num_ranks)
    # A file object, because numpy appends ".npz" to a name that lacks it.
    id_type = np.int16 if num_experts <= np.iinfo(np.int16).max else np.int64
    with Path(path).open("wb") as file:
        np.savez_compressed(
            file,
            topk_idx=trace.topk_idx.numpy().astype(id_type),
            num_experts=np.int64(num_experts),
            num_ranks=np.int64(num_ranks),
            version=np.int64(FORMAT_VERSION),
        )


def load_routing_trace(path: str | Path) -> RoutingTrace:
    """Read a trace that `save_routing_trace` wrote.

    Raises:
        ValueError: The file is not such a trace; names what is wrong.
        OSError: The file cannot be read.
    """
    arrays = np.load(path, allow_pickle=False)
    if isinstance(arrays, np.ndarray):
        raise ValueError(f"{path} is not a routing trace: it holds one array, not named ones")  # noqa: TRY004
    with arrays:
        missing = {"topk_idx", "num_experts", "num_ranks", "version"} - set(arrays.files)
        if missing:
            raise ValueError(
                f"{path} is not a routing trace: lacks {sorted(missing)}, has {sorted(arrays.files)}"
            )
        version = int(arrays["version"])
        if version != FORMAT_VERSION:
            raise ValueError(f"{path} has format version {version}, this reads {FORMAT_VERSION}")
        return RoutingTrace(
            topk_idx=torch.from_numpy(arrays["topk_idx"]),
            num_experts=int(arrays["num_experts"]),
            num_ranks=int(arrays["num_ranks"]),
        )

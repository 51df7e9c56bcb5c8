"""The experts that live on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

_GROUPED_ROW_BYTES = 16


def _problem_with_grouped_mm(dtype: torch.dtype, **sizes: int) -> str | None:
    """Return the reason that `torch._grouped_mm` cannot take matrices with rows of these sizes, or None."""
    if not hasattr(torch, "_grouped_mm"):
        return f"torch {torch.__version__} has no _grouped_mm"
    if dtype is not torch.bfloat16:
        return f"torch._grouped_mm takes torch.bfloat16, got {dtype}"
    for name, size in sizes.items():
        if size * dtype.itemsize % _GROUPED_ROW_BYTES:
            return (
                f"torch._grouped_mm takes rows of a multiple of {_GROUPED_ROW_BYTES} bytes: {name} "
                f"must be a multiple of {_GROUPED_ROW_BYTES // dtype.itemsize} with {dtype}, got "
                f"{size}"
            )
    return None


class GroupedExperts(nn.Module):
    """Two matrices per expert with an activation between them.

    Args:
        expert_ids: Global ids of the experts of this rank, in the order of their rows; -1 for a slot that
            is empty, whose parameters are zeros. An expert's first parameters follow from `seed` and its id:
            they do not depend on where it lives, and are those of its replicas.
        hidden: Elements of a row.
        ffn_hidden: Elements between the two matrices.
        activation: Activation between them.
        method: "loop": one product of matrices per expert. "grouped_mm": `torch._grouped_mm`, which
            takes bfloat16 in rows of a multiple of 16 bytes and reads no counts on the host. "auto":
            the latter where it takes what there is and torch has it.
        dtype: Dtype of the parameters.
        seed: See `expert_ids`.

    Raises:
        ValueError: `method` is unknown, or "grouped_mm" with a dtype or sizes that it does not take.
    """

    def __init__(
        self,
        expert_ids: Sequence[int],
        hidden: int,
        ffn_hidden: int,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor] = torch.relu,
        method: Literal["auto", "loop", "grouped_mm"] = "auto",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if method not in ("auto", "loop", "grouped_mm"):
            raise ValueError(f'method must be "auto", "loop" or "grouped_mm", got {method!r}')
        problem = _problem_with_grouped_mm(dtype, hidden=hidden, ffn_hidden=ffn_hidden)
        if method == "grouped_mm" and problem is not None:
            raise ValueError(problem)
        self.is_grouped = problem is None and method != "loop"
        self.activation = activation
        up = torch.zeros(len(expert_ids), hidden, ffn_hidden, dtype=dtype)
        down = torch.zeros(len(expert_ids), ffn_hidden, hidden, dtype=dtype)
        for local_expert_idx, expert_idx in enumerate(expert_ids):
            if expert_idx < 0:
                continue
            draw = torch.Generator().manual_seed(seed * 1_000_003 + expert_idx)
            up[local_expert_idx] = torch.randn(hidden, ffn_hidden, generator=draw) * hidden**-0.5
            down[local_expert_idx] = (
                torch.randn(ffn_hidden, hidden, generator=draw) * ffn_hidden**-0.5
            )
        self.up = nn.Parameter(up)
        self.down = nn.Parameter(down)

    def forward(self, rows: torch.Tensor, expert_offsets: torch.Tensor) -> torch.Tensor:
        """Every expert on its own rows.

        Args:
            rows: `[M, hidden]`, grouped by expert.
            expert_offsets: int32 `[num_local_experts + 1]`: padded starts. Rows beyond the last are of
                no expert, and the output there is not defined.

        Returns:
            `[M, hidden]`, dtype of the parameters.
        """
        rows = rows.to(self.up.dtype)
        if self.is_grouped and self.up.shape[0]:
            ends = expert_offsets[1:]
            between = self.activation(torch._grouped_mm(rows, self.up, offs=ends))
            return torch._grouped_mm(between, self.down, offs=ends)
        sizes = expert_offsets.diff().tolist()
        *parts, rest = torch.split(rows, [*sizes, rows.shape[0] - sum(sizes)])
        outputs = [
            self.activation(part @ up) @ down
            for part, up, down in zip(parts, self.up.unbind(), self.down.unbind(), strict=True)
        ]
        return torch.cat([*outputs, rest])

"""Sums of replicated gradients over the ranks of a communicator, the same bits on every rank."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import torch

from moe_comm.arguments import as_int, shown
from moe_comm.ep.buffer import EpBuffer, rejects_unbound
from moe_comm.ep.config import EpConfig
from moe_comm.ep.handles import DispatchHandle
from moe_comm.ep.limits import ROW_BYTES_MULTIPLE
from moe_comm.peers.agree import raise_different
from moe_comm.peers.communicator import Communicator, check_communicator, gathers
from moe_comm.peers.destroyable import Destroyable
from moe_comm.peers.missed_calls import Telling
from moe_comm.tensors.memory import check_memory
from moe_comm.tensors.memory_overlap import first_overlap, has_element_twice

# Long rows cost less each; short ones waste less at the end of a slice.
MOST_ROW_BYTES = 8192
SUMMED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class GradientSum(Destroyable):
    """Adds vectors of all ranks, over the communicator's own transport.

    Every rank owns a slice of the vector. A combine brings the slices of all ranks to their owner, who
    adds them; a dispatch brings the sums back to everybody. So it runs on every backend and between
    nodes, fails and recovers as they do, and needs no process group.

    What is added is parts: by default one a rank, and any number with `part_ranks`. The sum is taken
    in the order of the parts: `((0 + part 0) + part 1) + ...` with one IEEE addition each, in float32
    (float64 for float64), rounded once at the end. Its bits depend on the parts and not on the ranks
    that hold them: cut the global batch into parts, and the sum of their gradients is the same on any
    number of ranks.

    Collective: every rank makes it, with equal arguments, and calls it in the same order.

    Args:
        communicator: Owner of the peers.
        num_elements: Elements of the vector, >= 0.
        dtype: float32, bfloat16, float16 or float64.
        part_ranks: Rank of every part, in the order in which parts are added; None for one part per
            rank, in rank order. Equal on every rank. After a `recover`, name living ranks: the sum
            knows no other than those that are named.

    Raises:
        ValueError: An argument breaks a rule, or ranks disagree.

    Example:
        ```python
        gradients = [parameter.grad for parameter in model.parameters()]
        total = GradientSum(communicator, sum(gradient.numel() for gradient in gradients))
        total.sum_(gradients)
        ```
    """

    @gathers
    def __init__(
        self,
        communicator: Communicator,
        num_elements: int,
        dtype: torch.dtype = torch.float32,
        *,
        part_ranks: Sequence[int] | None = None,
    ) -> None:
        check_communicator(communicator)
        num_ranks = communicator.num_ranks
        with Telling(communicator.reject):
            num_elements = as_int("num_elements", num_elements, 0)
            ranks = _checked_ranks(part_ranks, num_ranks)
            if dtype not in SUMMED_DTYPES:
                raise ValueError(f"dtype must be one of {SUMMED_DTYPES}, got {shown(dtype)}")
        # The ranks of parts are compared with the configuration of the buffer.
        _agree(communicator, num_elements, dtype)
        self.num_elements = num_elements
        self.dtype = dtype
        self.part_idx = tuple(
            part for part, rank_idx in enumerate(ranks) if rank_idx == communicator.rank_idx
        )
        # Every expert of the exchange takes whole vectors: one expert a part, then one a rank.
        config = EpConfig(
            num_experts=len(ranks) + num_ranks,
            num_topk=max(len(ranks), num_ranks),
            hidden=None,
            num_max_tokens_per_rank=None,
            dtype=None,
            expert_rank=[*ranks, *range(num_ranks)],
        )
        self._buffer = EpBuffer(communicator, config)
        slice_elements = -(-num_elements // num_ranks)
        multiple = ROW_BYTES_MULTIPLE // dtype.itemsize
        self._hidden = min(
            max(multiple, -(-slice_elements // multiple) * multiple),
            MOST_ROW_BYTES // dtype.itemsize,
        )
        self._num_rows = max(1, -(-slice_elements // self._hidden))
        self._to_owners = self._handle(0, len(ranks))
        self._to_everybody = self._handle(len(ranks), num_ranks)

    def _handle(self, first_expert: int, num_experts: int) -> DispatchHandle:
        """Return the handle of an exchange of this rank's slice with so many experts."""
        num_topk = self._buffer.config.num_topk
        assert num_topk is not None
        experts = torch.full((num_topk,), -1, dtype=torch.int64)
        experts[:num_experts] = torch.arange(first_expert, first_expert + num_experts)
        device = self._buffer.communicator.device
        topk_idx = experts.repeat(self._num_rows, 1).to(device)
        rows = torch.zeros(
            self._num_rows, ROW_BYTES_MULTIPLE // self.dtype.itemsize, dtype=self.dtype
        )
        return self._buffer.dispatch(rows.to(device), topk_idx).handle

    @property
    def buffer(self) -> EpBuffer:
        """Buffer that the sum is added over."""
        return self._buffer

    @property
    def communicator(self) -> Communicator:
        """Owner of the peers."""
        return self._buffer.communicator

    @rejects_unbound("combine", lambda args, _: args[0].buffer)
    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their sums over the ranks, where each holds one part. Collective.

        Args:
            tensors: Any shapes and strides, `num_elements` in all, the same shapes on every rank.

        Raises:
            ValueError: Sizes are wrong on some rank; on every rank.
            TypeError: A dtype is wrong on some rank; on every rank.
            PeerFailedError: A peer died or gave up.
            PeerTimeoutError: A peer stopped progressing.
        """
        self.sum_parts([tensors], tensors)

    @rejects_unbound("combine", lambda args, _: args[0].buffer)
    def sum_parts(
        self, parts: Sequence[Sequence[torch.Tensor]], out: Sequence[torch.Tensor]
    ) -> None:
        """Add the parts of all ranks into `out`. Collective.

        Args:
            parts: This rank's parts, in their order (`part_idx`): tensors of `num_elements` in all.
            out: Tensors to write the sums to; may be those of a part.

        Raises:
            ValueError: Sizes are wrong on some rank; on every rank.
            TypeError: A dtype is wrong on some rank; on every rank.
            PeerFailedError: A peer died or gave up.
            PeerTimeoutError: A peer stopped progressing.
        """
        with Telling(self._buffer.reject, "combine"):
            parts, out = [list(part) for part in parts], list(out)
            self._check(parts, out)
        rows = self._buffer.empty_expert_output(
            self._to_owners, hidden=self._hidden, dtype=self.dtype
        )
        with torch.no_grad():
            num_padded = self._num_rows * self._hidden * self.communicator.num_ranks
            for part, vector in zip(parts, rows.view(len(parts), num_padded), strict=True):
                vector[self.num_elements :].zero_()
                _copy(part, self._pieces(vector, part))
            sums = self._buffer.combine(rows, self._to_owners)
            del rows
            gathered = self._buffer.dispatch(sums, None, handle=self._to_everybody).x
            _copy(self._pieces(gathered.flatten(), out), out)

    def _pieces(self, vector: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The vector cut into the shapes of `tensors`."""
        sizes = [tensor.numel() for tensor in tensors]
        pieces = torch.split(vector[: self.num_elements], sizes)
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]

    def _check(self, parts: Sequence[Sequence[torch.Tensor]], out: Sequence[torch.Tensor]) -> None:
        if len(parts) != len(self.part_idx):
            raise ValueError(
                f"this rank holds parts {list(self.part_idx)}, got {len(parts)} of them"
            )
        for tensor in itertools.chain(*parts, out):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"tensors are to be added, got {type(tensor).__name__}")
            if tensor.layout is not torch.strided:
                raise TypeError(f"tensors must be dense, got one of layout {tensor.layout}")
        for tensors in (*parts, out):
            num_elements = sum(tensor.numel() for tensor in tensors)
            if num_elements != self.num_elements:
                raise ValueError(
                    f"the tensors must have {self.num_elements} elements in all, got {num_elements}"
                )
        device = self.communicator.device
        for tensor in itertools.chain(*parts, out):
            if tensor.dtype is not self.dtype:
                raise TypeError(f"tensors must be of {self.dtype}, got {tensor.dtype}")
            if tensor.device != device:
                raise ValueError(f"tensors must be on {device}, got one on {tensor.device}")
            check_memory(f"a tensor of shape {tuple(tensor.shape)}", tensor)
        # Parts are read before `out` is written, and may lie in it.
        for tensor in out:
            if has_element_twice(tensor):
                raise ValueError(
                    f"a tensor of out has two elements in one place: shape {tuple(tensor.shape)}, "
                    f"strides {tensor.stride()}"
                )
        meeting = first_overlap(out)
        if meeting is not None:
            raise ValueError(
                f"out[{meeting.written}] and out[{meeting.other}] share bytes: each of them is "
                f"written; their shapes are {tuple(out[meeting.written].shape)} and "
                f"{tuple(out[meeting.other].shape)}"
            )

    def destroy(self) -> None:
        """Release what it holds. Local, idempotent."""
        self._buffer.destroy()


def _checked_ranks(part_ranks: Sequence[int] | None, num_ranks: int) -> list[int]:
    """The rank of every part."""
    if part_ranks is None:
        return list(range(num_ranks))
    ranks = [as_int(f"part_ranks[{part}]", rank) for part, rank in enumerate(part_ranks)]
    if not ranks:
        raise ValueError("part_ranks must name at least one part, got none")
    for part, rank in enumerate(ranks):
        if not 0 <= rank < num_ranks:
            raise ValueError(
                f"part_ranks[{part}] = {rank} is not a rank of a communicator of {num_ranks}"
            )
    return ranks


def _agree(communicator: Communicator, num_elements: int, dtype: torch.dtype) -> None:
    """Raise what differs between two ranks, on every rank. Collective.

    Slices of different vectors may have rows of one size: without this they would be added.
    """
    own = json.dumps({"num_elements": num_elements, "dtype": str(dtype)}).encode()
    said = communicator.exchange("GradientSum", own)
    # An excluded rank says nothing.
    raise_different(
        "ranks make a GradientSum differently",
        [json.loads(payload) if payload else None for payload in said],
    )


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)

"""A DeepEP `Buffer` (its V1 interface) as a transport of rows of any dtype and size."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name everywhere

from moe_comm.ep.backends.rows import as_bytes
from moe_comm.errors import CommunicationError

_PACKAGE = __name__.partition(".")[0]
_ROW_BYTES_MULTIPLE = 32  # of DeepEP's kernels, which move half a row of 16-byte words at a time
_SMALLEST_ROW_BYTES = 4096

# Limits of DeepEP's own kernels, not of modules that stand in for them.
_MAX_ROW_BYTES = 16352
_MAX_NUM_TOPK = 32
_MAX_NUM_LOCAL_EXPERTS = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one rank, and their scale factors.

    Args:
        x: `[n, hidden]`, any dtype, contiguous.
        sf: `[n, num_scales]`, any dtype and strides, or None.
    """

    x: torch.Tensor
    sf: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Arrival:
    """Rows that a multicast brought, in order of (source rank, token).

    Args:
        rows: m of them.
        topk_idx: int64 `[m, K]`, local experts, -1 elsewhere.
        topk_weights: `[m, K]`, 0 where the choice is not local, or None.
        handle: DeepEP's handle, for `multicast_again` and `reduce`.
    """

    rows: Rows
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    handle: object


def _load() -> types.ModuleType:
    """The installed `deep_ep`.

    Raises:
        ValueError: There is none, or one without the V1 interface.
    """
    try:
        module = importlib.import_module("deep_ep")
    except ImportError as error:
        raise ValueError(
            f'backend="deep_ep" needs DeepEP, and `import deep_ep` failed: {error}'
        ) from error
    if not hasattr(module, "Buffer"):
        raise ValueError('backend="deep_ep" needs a deep_ep with the class Buffer (V1), found none')
    return module


def _is_stand_in(module: types.ModuleType) -> bool:
    """Return whether `deep_ep` is this package's own module of that name."""
    return str(module.Buffer.__module__).partition(".")[0] == _PACKAGE


def problem_with_deep_ep(num_ranks: int, num_local_experts: int) -> str | None:
    """Why DeepEP on this rank cannot serve so many ranks and experts a rank, or None."""
    try:
        module = _load()
        module.Buffer.get_dispatch_config(num_ranks)
        module.Buffer.get_combine_config(num_ranks)
    except ValueError as error:
        return str(error)
    except AssertionError:
        return f"DeepEP has no configuration for {num_ranks} ranks"
    if num_local_experts > _MAX_NUM_LOCAL_EXPERTS and not _is_stand_in(module):
        return (
            f"DeepEP takes at most {_MAX_NUM_LOCAL_EXPERTS} experts a rank, got {num_local_experts}"
        )
    return None


class DeepEpTransport:
    """Moves rows over one DeepEP buffer, which grows to the widest row. Every method is collective.

    Args:
        group: Group of the ranks, used by nobody else.
        num_local_experts: Most experts of one rank; expert ids here are `rank * that + local`.
        row_bytes: Bytes of a row to expect, 0 if not known.
    """

    def __init__(self, group: dist.ProcessGroup, num_local_experts: int, row_bytes: int) -> None:
        self._module = _load()
        self._group = group
        self._num_ranks = group.size()
        self._num_local_experts = num_local_experts
        self._is_bound = not _is_stand_in(self._module)
        has_gpu = self._is_bound and torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else None
        self._failure: CommunicationError | None = None
        self._buffer: Any = None
        self._row_bytes = 0
        self.generation = 0
        with self._guarded("setup"):
            self._reserve(max(row_bytes, _SMALLEST_ROW_BYTES))

    @property
    def adds_in_rank_order(self) -> bool:
        """Return whether `reduce` adds all ranks' rows in rank order with one rounding at the end.

        Between nodes DeepEP rounds once a node.
        """
        return self._num_ranks <= 8 or not self._is_bound

    def multicast(
        self, rows: Rows, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> Arrival:
        """Every row to each rank that has one of its choices, once.

        Args:
            rows: T of them.
            topk_idx: int64 `[T, K]`, ids as the class says, -1 for none.
            topk_weights: float32 or float64 `[T, K]`, or None.
        """
        weights = topk_weights
        if weights is None:
            weights = torch.zeros(topk_idx.shape, dtype=torch.float32)
        # A float64 is two float32 of the same choice; they are copied, not computed with.
        num_parts = weights.element_size() // 4
        ids = topk_idx.repeat_interleave(num_parts, dim=1)
        if self._is_bound and ids.shape[1] > _MAX_NUM_TOPK:
            raise ValueError(f"DeepEP takes at most {_MAX_NUM_TOPK} choices, got {ids.shape[1]}")
        payload = self._encode(rows)
        with self._guarded("dispatch"):
            ids = ids.to(self._device).to(getattr(self._module, "topk_idx_t", torch.int64))
            per_rank, per_node, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(
                ids, self._num_ranks * self._num_local_experts
            )
            received, recv_idx, recv_weights, _, handle, _ = self._buffer.dispatch(
                payload,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids,
                topk_weights=weights.contiguous().view(torch.float32).to(self._device),
            )
        device = rows.x.device
        received_weights = recv_weights.to(device).contiguous().view(weights.dtype)
        return Arrival(
            rows=self._decode(received, rows),
            topk_idx=recv_idx[:, ::num_parts].to(device, torch.int64),
            topk_weights=None if topk_weights is None else received_weights,
            handle=handle,
        )

    def multicast_again(self, rows: Rows, handle: object) -> Rows:
        """Other rows to where those of `handle` went."""
        payload = self._encode(rows)
        with self._guarded("dispatch"):
            received = self._buffer.dispatch(payload, handle=handle)[0]
        return self._decode(received, rows)

    def reduce(self, x: torch.Tensor, handle: object) -> torch.Tensor:
        """bfloat16 rows back to where those of `handle` came from, summed over ranks, by DeepEP."""
        with self._guarded("combine"):
            sums = self._buffer.combine(x.to(self._device), handle)[0]
        return torch.where(sums.isnan(), torch.full_like(sums, float("nan")), sums).to(x.device)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, send_splits: list[int], operation: str
    ) -> None:
        """Rows `[n, bytes]` of uint8 to every rank and from every rank, in rank order."""
        rank_idx = torch.arange(self._num_ranks)
        destination = rank_idx.repeat_interleave(torch.tensor(send_splits)).unsqueeze(1)
        rows = Rows(sent)
        self.reserve(rows)
        payload = self._encode(rows)
        with self._guarded(operation):
            per_rank, per_node, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(
                destination.to(self._device).to(getattr(self._module, "topk_idx_t", torch.int64)),
                self._num_ranks,
            )
            arrived = self._buffer.dispatch(
                payload,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert,
            )[0]
        self.check_num_rows(arrived.shape[0], received.shape[0], operation)
        received.copy_(self._decode(arrived, rows).x)

    def reserve(self, rows: Rows) -> None:
        """Room for rows like these; handles of a buffer that had to grow are void after it.

        Raises:
            ValueError: DeepEP does not move such rows.
        """
        row_bytes = rows.x.shape[1] * rows.x.element_size()
        if rows.sf is not None and not _is_pair(rows):
            row_bytes += rows.sf.shape[1] * rows.sf.element_size()
        row_bytes += -row_bytes % _ROW_BYTES_MULTIPLE
        if self._is_bound and row_bytes > _MAX_ROW_BYTES:
            raise ValueError(
                f"DeepEP moves rows of at most {_MAX_ROW_BYTES} bytes, got {row_bytes}"
            )
        with self._guarded("setup"):
            self._reserve(row_bytes)

    def check_num_rows(self, num_rows: int, num_expected: int, operation: str) -> None:
        """Check that DeepEP delivered the number of rows that the ranks agreed on.

        Raises:
            CommunicationError: It is not.
        """
        if num_rows != num_expected:
            raise CommunicationError(
                f"{operation}: DeepEP delivered {num_rows} rows, expected {num_expected}",
                operation=operation,
                phase="data",
            )

    def destroy(self) -> None:
        """Let go of the buffer; idempotent. Not collective, but DeepEP itself may wait for its peers."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None and not self._is_bound:
            buffer.destroy()

    def _encode(self, rows: Rows) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the tensors that DeepEP moves: a pair that it knows, or bytes that look like bfloat16."""
        x, sf = rows.x, rows.sf
        row_bytes = x.shape[1] * x.element_size()
        if sf is not None and _is_pair(rows):
            return x.to(self._device), _copied(sf).to(self._device)
        parts = [as_bytes(x)]
        if sf is not None:
            parts.append(as_bytes(_copied(sf)))
            row_bytes += parts[-1].shape[1]
        padding = -row_bytes % _ROW_BYTES_MULTIPLE
        packed = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if padding:
            packed = F.pad(packed, (0, padding))
        return packed.view(torch.bfloat16).to(self._device)

    def _decode(
        self, received: torch.Tensor | tuple[torch.Tensor, torch.Tensor], like: Rows
    ) -> Rows:
        """Arrived rows in the form of `like`."""
        x, sf = like.x, like.sf
        if isinstance(received, tuple):
            return Rows(received[0].to(x.device), received[1].to(x.device))
        packed = as_bytes(received.to(x.device).contiguous())
        end = x.shape[1] * x.element_size()
        rows = packed[:, :end].contiguous().view(x.dtype)
        if sf is None:
            return Rows(rows)
        scales = packed[:, end : end + sf.shape[1] * sf.element_size()]
        return Rows(rows, _copied(scales).view(sf.dtype))

    def _reserve(self, row_bytes: int) -> None:
        """A buffer for rows of that size; all ranks move rows of one size, so all grow together."""
        if row_bytes <= self._row_bytes:
            return
        configs = [
            self._module.Buffer.get_dispatch_config(self._num_ranks),
            self._module.Buffer.get_combine_config(self._num_ranks),
        ]
        self.destroy()  # before the next: its memory is wanted
        self._buffer = self._module.Buffer(
            self._group,
            max(c.get_nvl_buffer_size_hint(row_bytes, self._num_ranks) for c in configs),
            max(c.get_rdma_buffer_size_hint(row_bytes, self._num_ranks) for c in configs),
            # DeepEP's destroy() is a barrier; without it, its destructor frees what it holds.
            explicitly_destroy=not self._is_bound,
        )
        self._row_bytes = row_bytes
        self.generation += 1

    @contextlib.contextmanager
    def _guarded(self, operation: str) -> Iterator[None]:
        """Name what DeepEP reports; a buffer that failed once stays failed."""
        if self._failure is not None:
            raise self._failure
        # The current device of a progress thread is not that of the thread that made the buffer.
        on_device = (
            contextlib.nullcontext() if self._device is None else torch.cuda.device(self._device)
        )
        try:
            with on_device:
                yield
        except (RuntimeError, AssertionError) as error:
            self._failure = (
                error
                if isinstance(error, CommunicationError)
                else CommunicationError(
                    f"{operation} failed in DeepEP: {error}", operation=operation, phase="data"
                )
            )
            raise self._failure from error


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, whatever a single row or column passes for: it may have any stride or begin anywhere."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _is_pair(rows: Rows) -> bool:
    """Return whether DeepEP takes data and scale factors as they are."""
    assert rows.sf is not None
    return (
        rows.x.dtype is torch.float8_e4m3fn
        and rows.x.shape[1] % _ROW_BYTES_MULTIPLE == 0
        and rows.sf.dtype in (torch.float32, torch.int32)
    )

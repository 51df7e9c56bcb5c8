"""`BucketBuffer`: collectives of DeepEP V2.5 on tensors that lie in one storage."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from moe_comm.arguments import as_dense, as_int, shown
from moe_comm.compat.deep_ep import streams
from moe_comm.compat.deep_ep.allocator import BufferAllocator, get_num_rdma_alignment, storage_of
from moe_comm.compat.deep_ep.arguments import check_bools, check_ints, ints_as_bools
from moe_comm.compat.deep_ep.base_buffer import BufferBase
from moe_comm.compat.deep_ep.bucket_calls import BucketCalls
from moe_comm.compat.deep_ep.elastic_calls import Group, meet
from moe_comm.compat.deep_ep.group import GroupOwner
from moe_comm.compat.deep_ep.utils.event import EventHandle, EventOverlap
from moe_comm.compat.deep_ep.utils.math import align
from moe_comm.peers.agree import (
    FirstError,
    decode_problem,
    encode_problem,
    raise_different,
    raise_together,
)
from moe_comm.peers.missed_calls import GATHER, Telling, keep, keeps_unbound, tells_peers
from moe_comm.tensors.memory import check_memory
from moe_comm.tensors.memory_overlap import first_overlap

Given = torch.Tensor | Sequence[torch.Tensor]

# By collective, what DeepEP asks for at least where all ranks are one NVLink domain.
_NUM_SMS = {"all_gather": 0, "reduce_scatter": 6, "all_reduce": 4}
_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _Places(NamedTuple):
    """Tensors that a collective reads, that it writes, and that its wait returns."""

    srcs: list[torch.Tensor]
    outs: list[torch.Tensor]
    results: list[torch.Tensor]


def _reject_call(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on every rank of the group that is named that arguments cannot be bound."""
    buffer: BucketBuffer = args[0]
    with Telling(keep, GATHER):
        owner = buffer._owners[buffer.get_context_idx(kwargs.get("group"))]
    owner.shared().communicator.reject(error)


class BucketBuffer(BufferBase):
    """A storage on every rank, and collectives of one or several groups on tensors that lie in it.

    On torch's default device where that is a GPU, else on that of the first group's communicator; in its
    heap, where it has one. For any number of ranks, and tensors of any size that ranks divide. Collective:
    every rank makes it and calls it in the same order, with equal sizes. What one rank gets wrong is raised
    on every rank of the group.

    Sums are float32, in rank order: the same bits on every run and on every rank. Calls are in order: each
    finds in the storage what the calls before it write there, waited for or not.

    Args:
        group: Process group, bootstrap, or None for the default process group; or a list of groups, of
            which every call then names one.
        allocation_plan_or_num_bytes: A plan, whose tensors lie in the storage from now on, or its bytes.
        sl_idx: No effect.
        num_gpu_timeout_secs: Validated; the communicator has limits of its own.
        explicitly_destroy: `destroy()` may be called.

    Attributes:
        storage: uint8 `[num_bytes]`, contents undefined; None once destroyed.
        num_bytes: As given.
        groups: As given, in a list.
        contexts: Owner of each group; None once destroyed.

    Raises:
        ValueError: A size is wrong, ranks differ, or a plan has been used.
        TypeError: An argument has another type.

    Example:
        ```python
        plan = deep_ep.BufferAllocator()
        gradients = plan.allocate((num_ranks * 4096,), torch.float32)
        buffer = deep_ep.BucketBuffer(group, plan)
        gradients.normal_()
        mine = buffer.reduce_scatter(gradients, scale=1 / num_ranks).wait()
        ```
    """

    @ints_as_bools
    @keeps_unbound
    def __init__(
        self,
        group: Group | Sequence[Group],
        allocation_plan_or_num_bytes: BufferAllocator | int,
        sl_idx: int | None = None,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        groups: Any = group if isinstance(group, list | tuple) else [group]
        self.groups: list[Group] = list(groups)
        if not self.groups:
            raise ValueError("group must be a group or a list of groups, got an empty one")
        plan = allocation_plan_or_num_bytes
        storage = torch.empty(0, device="cpu")

        def check() -> str:
            check_ints(0, sl_idx=0 if sl_idx is None else sl_idx)
            check_ints(1, num_gpu_timeout_secs=num_gpu_timeout_secs)
            check_bools(explicitly_destroy=explicitly_destroy)
            what = (
                plan.check()
                if isinstance(plan, BufferAllocator)
                else f"{as_int('allocation_plan_or_num_bytes', plan, 1)} bytes"
            )
            return f"a BucketBuffer on {device.type} of {what}"

        def allocate() -> str:
            nonlocal storage
            storage = storage_of(
                first.communicator, plan.num_bytes if isinstance(plan, BufferAllocator) else plan
            )
            return "the storage of a BucketBuffer"

        self._owners = [GroupOwner(each) for each in self.groups]
        device = torch.empty(0).device
        if device.type != streams.GPU:
            device = self._owners[0].shared().device
        first, *_ = [owner.settle(device, check) for owner in self._owners]
        first.check_together(allocate)
        super().__init__(explicitly_destroy, owner=self._owners[0])
        self.contexts: list[GroupOwner] | None = self._owners
        self.num_bytes = len(storage)
        self.storage: torch.Tensor | None = storage
        self._calls = [BucketCalls(owner) for owner in self._owners]
        self._session: BucketSession | None = None
        self._latest: EventHandle | None = None
        if isinstance(plan, BufferAllocator):
            plan.materialize(storage)

    def get_context_idx(self, group: Group = None) -> int:
        """The place of `group` in `groups`, 0 for None where there is one alone.

        Raises:
            ValueError: It is none of them, or has to be named.
        """
        if group in self.groups:
            return self.groups.index(group)
        if group is not None or len(self.groups) > 1:
            raise ValueError(
                f"group must be one of the {len(self.groups)} of this BucketBuffer, got {shown(group)}"
            )
        return 0

    def get_theoretical_num_sms(self, op: str, group: Group = None) -> int:
        """The least that DeepEP asks for: rows are moved by cores, not by SMs.

        Args:
            op: "all_gather", "reduce_scatter" or "all_reduce".
            group: As in a call.
        """
        self.get_context_idx(group)
        if op not in _NUM_SMS:
            raise ValueError(f"op must be one of {', '.join(_NUM_SMS)}, got {op!r}")
        return _NUM_SMS[op]

    def session(self) -> BucketSession:
        """Return a context for `with`, in which calls take tensors that lie anywhere."""
        return BucketSession(self)

    @ints_as_bools
    @tells_peers(_reject_call)
    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
        group: Group = None,
    ) -> None:
        """All ranks of a group arrive. Collective. The flags are for GPUs and have no effect."""
        idx = self._named(group)
        self._end_latest()
        meet(
            self._owners[idx],
            wait_comm_stream=wait_comm_stream,
            with_cpu_sync=with_cpu_sync,
            sequential=sequential,
        )

    @tells_peers(_reject_call)
    def all_gather(
        self,
        srcs: Given,
        dsts: Given | None = None,
        group: Group = None,
        num_sms: int | None = None,
    ) -> EventOverlap:
        """Bring the tensors of all ranks to every rank, one after the other in rank order. Collective.

        Args:
            srcs: A tensor or several of any dtypes, contiguous. Without `dsts` each is this rank's part of
                a tensor in the storage that takes all parts; with `dsts` they lie anywhere.
            dsts: As many, of `num_ranks` times the bytes each: in the storage, or in a session anywhere.
            group: Group of `groups`; needed if there are several.
            num_sms: None or 0.

        Returns:
            An event. Its first wait returns the gathered tensors (one where one was given), flat and of
            the dtypes of `srcs`; in a session with `dsts`, these.

        Raises:
            ValueError: A rule above is broken on some rank, or sizes differ; on every rank.
            TypeError: A type is wrong on some rank; on every rank.
            RuntimeError: The storage is too small for a session's results on some rank; on every rank.
        """
        idx = self._named(group)
        num_ranks = self._owners[idx].num_ranks

        def place() -> _Places:
            if num_sms not in (None, 0) or isinstance(num_sms, bool):
                raise ValueError(f"num_sms of an all_gather must be None or 0, got {num_sms}")
            tensors = self._tensors("srcs", srcs)
            if dsts is None:
                wholes = [self._whole(src, idx) for src in tensors]
                return _Places(tensors, wholes, wholes)
            given = self._tensors("dsts", dsts, is_inside=self._session is None)
            if len(given) != len(tensors):
                raise ValueError(f"dsts must be as many as srcs, {len(tensors)}, got {len(given)}")
            for number, (src, dst) in enumerate(zip(tensors, given, strict=True)):
                if dst.nbytes != num_ranks * src.nbytes:
                    raise ValueError(
                        f"dsts[{number}] must have {num_ranks} times the {src.nbytes} bytes of its "
                        f"source, got {dst.nbytes}"
                    )
                if self._session is not None and dst.dtype is not src.dtype:
                    raise TypeError(f"dsts[{number}] must be {src.dtype}, got {dst.dtype}")
            flat = [dst.view(-1).view(src.dtype) for src, dst in zip(tensors, given, strict=True)]
            return _Places(tensors, flat, given if self._session is not None else flat)

        places = self._agreed("all_gather", idx, place)
        event = self._calls[idx].all_gather(
            places.srcs, places.outs, _like(srcs, places.results), async_finish=True
        )
        return self._begun(event, 0)

    @tells_peers(_reject_call)
    def reduce_scatter(
        self,
        srcs: Given,
        comm_precision: str = "fp32",
        scale: float = 1.0,
        group: Group = None,
        num_sms: int | None = None,
    ) -> EventOverlap:
        """Add the tensors of all ranks; every rank gets its part of the sums. Collective.

        Args:
            srcs: A tensor or several, float32 and contiguous, in the storage (in a session anywhere), of
                as many equal parts as there are ranks.
            comm_precision: "fp32"; "bf16": what is added is rounded to bfloat16 before it travels.
            scale: The sums are multiplied by it.
            group: As in `all_gather`.
            num_sms: Kept in the event; no effect.

        Returns:
            An event. Its first wait returns this rank's parts, flat: in place of its own of `srcs`, which is
            written, or of a session's storage where these lie elsewhere.

        Raises:
            ValueError, TypeError, RuntimeError: As `all_gather`.
        """
        idx = self._named(group)
        owner = self._owners[idx]

        def place() -> _Places:
            if comm_precision not in _PRECISIONS:
                raise ValueError(f"comm_precision must be fp32 or bf16, got {comm_precision!r}")
            tensors = self._summed(srcs, scale, num_sms)
            outs = []
            for number, src in enumerate(tensors):
                num_elements, rest = divmod(src.numel(), owner.num_ranks)
                if rest:
                    raise ValueError(
                        f"the elements of srcs[{number}] must divide by {owner.num_ranks} ranks, got "
                        f"{src.numel()}"
                    )
                parts = src.view(owner.num_ranks, num_elements)
                outs.append(
                    parts[owner.rank_idx]
                    if self._begin(src) is not None
                    else self._staged(num_elements, src.dtype)
                )
            return _Places(tensors, outs, outs)

        places = self._agreed("reduce_scatter", idx, place, precision=comm_precision, scale=scale)
        event = self._calls[idx].reduce_scatter(
            places.srcs,
            places.outs,
            _like(srcs, places.results),
            scale=scale,
            dtype=_PRECISIONS[comm_precision],
            async_finish=True,
        )
        return self._begun(event, _NUM_SMS["reduce_scatter"] if num_sms is None else num_sms)

    @tells_peers(_reject_call)
    def all_reduce(
        self,
        srcs: Given,
        scale: float = 1.0,
        group: Group = None,
        num_sms: int | None = None,
    ) -> EventOverlap:
        """Replace tensors by their sums over all ranks. Collective.

        Args:
            srcs: A tensor or several, float32 and contiguous, in the storage: these are written. In a
                session anywhere: those that lie elsewhere are not written.
            scale: The sums are multiplied by it.
            group: As in `all_gather`.
            num_sms: Kept in the event; no effect.

        Returns:
            An event. Its first wait returns `srcs`; in a session flat tensors of the storage.

        Raises:
            ValueError, TypeError, RuntimeError: As `all_gather`.
        """
        idx = self._named(group)

        def place() -> _Places:
            tensors = self._summed(srcs, scale, num_sms)
            if self._session is None:
                return _Places(tensors, tensors, tensors)
            outs = [
                self._staged(src.numel(), src.dtype) if self._begin(src) is None else src.view(-1)
                for src in tensors
            ]
            return _Places(tensors, outs, outs)

        places = self._agreed("all_reduce", idx, place, scale=scale)
        event = self._calls[idx].all_reduce(
            places.srcs, places.outs, _like(srcs, places.results), scale=scale, async_finish=True
        )
        return self._begun(event, _NUM_SMS["all_reduce"] if num_sms is None else num_sms)

    def destroy(self) -> None:
        """Let go of the groups and of the storage, whose tensors stay; idempotent.

        Raises:
            ValueError: The buffer was made without `explicitly_destroy`.
        """
        super().destroy()
        for owner in self._owners:
            owner.release()
        self.contexts = None
        self.storage = None

    def _named(self, group: Group) -> int:
        """`get_context_idx`; peers hear by the next call that this rank has named no group of theirs."""
        with Telling(keep, GATHER):
            return self.get_context_idx(group)

    def _begun(self, event: EventOverlap, num_sms: int) -> EventOverlap:
        event.num_sms = num_sms
        self._latest = event.event
        return event

    def _end_latest(self) -> None:
        """Write what the latest call writes, which nobody may have waited for; its event keeps the result."""
        latest, self._latest = self._latest, None
        if latest is not None:
            latest.current_stream_wait()

    def _agreed(self, op: str, idx: int, place: Callable[[], _Places], **stated: object) -> _Places:
        """Return the places from `place`; all raise where it raises on one, or sizes differ. Collective."""
        communicator = self._owners[idx].shared().communicator
        session = self._session
        places = _Places([], [], [])
        num_before = 0 if session is None else session.num_allocated_bytes
        self._end_latest()
        with FirstError() as first:
            if session is not None:
                session.check_context(idx)
            places = place()
            meeting = first_overlap(places.outs)
            if meeting is not None:
                raise ValueError(
                    f"tensors {meeting.written} and {meeting.other} of a call share bytes: each of them "
                    "is written"
                )
        own = {
            "problem": encode_problem(first.error),
            "srcs": [f"{src.numel()} x {src.dtype}" for src in places.srcs],
            **{name: repr(value) for name, value in stated.items()},
        }
        try:
            payloads = communicator.exchange(f"BucketBuffer.{op}", json.dumps(own).encode())
            # An excluded rank says nothing.
            said = [json.loads(payload) if payload else None for payload in payloads]
            raise_together(
                [None if each is None else decode_problem(each["problem"]) for each in said],
                first.take(),
            )
            raise_different(f"ranks call {op} differently", said)
        except Exception:
            if session is not None:
                session.num_allocated_bytes = num_before
            raise
        return places

    def _tensors(self, name: str, given: Given, *, is_inside: bool = False) -> list[torch.Tensor]:
        """One tensor or several, contiguous and on the storage's device."""
        tensors = [given] if isinstance(given, torch.Tensor) else list(given)
        if not tensors:
            raise ValueError(f"{name} must be a tensor or several, got none")
        assert self.storage is not None
        for number, tensor in enumerate(tensors):
            this = f"{name}[{number}]"
            as_dense(this, tensor)
            if tensor.device != self.storage.device:
                raise ValueError(f"{this} must be on {self.storage.device}, got {tensor.device}")
            if not tensor.is_contiguous():
                raise ValueError(f"{this} must be contiguous, got strides {tensor.stride()}")
            if not tensor.numel():
                raise ValueError(f"{this} must have elements, got shape {tuple(tensor.shape)}")
            check_memory(this, tensor)
            if is_inside and self._begin(tensor) is None:
                raise ValueError(
                    f"{this} must lie in the storage of the BucketBuffer, or be given in a session; got "
                    f"one of shape {tuple(tensor.shape)} that lies elsewhere"
                )
        return tensors

    def _summed(self, srcs: Given, scale: Any, num_sms: Any) -> list[torch.Tensor]:
        """Check the arguments of a reduction, and return the tensors that it adds."""
        if num_sms is not None:
            check_ints(0, num_sms=num_sms)
        if not isinstance(scale, float | int) or isinstance(scale, bool):
            raise TypeError(f"scale must be a float, got {shown(scale)}")
        tensors = self._tensors("srcs", srcs, is_inside=self._session is None)
        for number, tensor in enumerate(tensors):
            if tensor.dtype is not torch.float32:
                raise TypeError(f"srcs[{number}] must be torch.float32, got {tensor.dtype}")
        return tensors

    def _begin(self, tensor: torch.Tensor) -> int | None:
        """The byte of the storage that a tensor begins at; None for one that lies elsewhere."""
        assert self.storage is not None
        begin = tensor.data_ptr() - self.storage.data_ptr()
        return begin if 0 <= begin <= self.num_bytes - tensor.nbytes else None

    def _whole(self, src: torch.Tensor, idx: int) -> torch.Tensor:
        """The flat tensor of the storage that all ranks' parts make, of which `src` is this rank's."""
        owner = self._owners[idx]
        begin = self._begin(src)
        if begin is None:
            if self._session is not None:
                return self._staged(owner.num_ranks * src.numel(), src.dtype)
            raise ValueError(
                "srcs must lie in the storage of the BucketBuffer, or come with dsts; got one of shape "
                f"{tuple(src.shape)} that lies elsewhere"
            )
        first = begin - owner.rank_idx * src.nbytes
        last = first + owner.num_ranks * src.nbytes
        if first < 0 or last > self.num_bytes:
            raise ValueError(
                f"srcs must be part {owner.rank_idx} of a tensor of the storage, which has bytes [0, "
                f"{self.num_bytes}); the whole would have [{first}, {last})"
            )
        assert self.storage is not None
        return self.storage[first:last].view(src.dtype)

    def _staged(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for a result of a session."""
        assert self._session is not None
        return self._session.take(num_elements * dtype.itemsize).view(dtype)


class BucketSession:
    """`with buffer.session():` the collectives of a `BucketBuffer` take tensors that lie anywhere.

    What has no place in the storage gets one there, from its beginning on: what lies there is lost, and the
    next session begins there again. One group at a time.

    Args:
        buffer: Buffer whose calls are meant.

    Attributes:
        num_allocated_bytes: Bytes of the storage that are allocated so far.
    """

    def __init__(self, buffer: BucketBuffer) -> None:
        self._buffer = buffer
        self._context_idx: int | None = None
        self.num_allocated_bytes = 0

    def __enter__(self) -> BucketSession:
        if self._buffer._session is not None:
            raise ValueError("a BucketBuffer has one session at a time, it is in another one")
        self._buffer._session = self
        self._context_idx = None
        self.num_allocated_bytes = 0
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._buffer._session = None

    def allocate(
        self,
        shapes: Sequence[int] | Sequence[Sequence[int]],
        dtype: torch.dtype = torch.float32,
        group: Group = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Tensors of the storage, contents undefined. Local.

        Args:
            shapes: One shape, or several.
            dtype: Dtype of the elements.
            group: Group that the session is for, as in a call.

        Returns:
            A tensor, or a tuple of as many.

        Raises:
            ValueError: The session is over, or for another group.
            RuntimeError: They do not fit.
        """
        self.check_context(self._buffer.get_context_idx(group))
        is_one = not shapes or isinstance(shapes[0], int)
        wanted: Any = [shapes] if is_one else shapes
        made = tuple(
            self.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape) for shape in wanted
        )
        return made[0] if is_one else made

    def check_context(self, context_idx: int) -> None:
        """Keep to one group. ValueError for another, or where the session is over."""
        if self._buffer._session is not self:
            raise ValueError("a session is used within its `with` block, this one is not open")
        if self._context_idx not in (None, context_idx):
            raise ValueError(
                f"a session is for one group: this one is for groups[{self._context_idx}], got "
                f"groups[{context_idx}]"
            )
        self._context_idx = context_idx

    def take(self, num_bytes: int) -> torch.Tensor:
        """The next so many bytes, uint8. RuntimeError where they do not fit."""
        storage, begin = self._buffer.storage, self.num_allocated_bytes
        assert storage is not None
        end = begin + align(num_bytes, get_num_rdma_alignment())
        if end > len(storage):
            raise RuntimeError(
                f"a session of a BucketBuffer needs {end} bytes with the next tensor of {num_bytes}, its "
                f"storage has {len(storage)}"
            )
        self.num_allocated_bytes = end
        return storage[begin : begin + num_bytes]


def _like(given: Given, results: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """One result for one tensor, a list for several."""
    return results[0] if isinstance(given, torch.Tensor) else results

"""Communicator: the ranks of one group, their heap and their health."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import warnings
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.utils.dlpack

from moe_comm.arguments import as_int, check_kind, shortened, shown, text_of
from moe_comm.peers import accelerators, missed_calls, node_layout, nvshmem
from moe_comm.peers.agree import (
    FirstError,
    agree,
    decode_problem,
    encode_problem,
    make_together,
    raise_different,
    raise_together,
    raise_unequal,
)
from moe_comm.peers.backend_choice import HEAP_BACKENDS, choose_backend, problem_with_names
from moe_comm.peers.bootstrap import Bootstrap, ThreadRank, bootstrap_for
from moe_comm.peers.communicator_options import CommunicatorOptions
from moe_comm.peers.destroyable import Destroyable
from moe_comm.peers.elastic import ElasticRanks
from moe_comm.peers.forks import forks
from moe_comm.peers.heap_stats import HeapStats
from moe_comm.peers.missed_calls import Telling, tells_peers
from moe_comm.peers.native_group import connect_group
from moe_comm.peers.peer_timeouts import ARRIVAL_TIMEOUT_S, STALL_TIMEOUT_S
from moe_comm.peers.rank_gpu import RankGpu, UnreachableGpusError

if TYPE_CHECKING:
    from moe_comm import _host

__all__ = ["Communicator", "HeapStats", "Recovery"]


@runtime_checkable
class _Rejecting(Protocol):
    """A buffer, through which peers hear of an operation that a rank has missed."""

    buffer_id: int

    def reject(self, operation: str, error: Exception) -> NoReturn: ...


# No payload of anybody else begins like this.
_REJECTION = b"\0moe_comm:rejected\0\x9d\xb1\x5c\x02"
_MOST_GATHERED_BYTES = 1 << 20
_MOST_TEXT = 4096
_TOLD_KINDS: tuple[type[Exception], ...] = (TypeError, NotImplementedError)


def _nothing() -> None:
    return None


def check_communicator(communicator: object) -> None:
    """Refuse what is no `Communicator`; peers, who are in its exchange, hear of it by the next call.

    Raises:
        TypeError: It is none.
    """
    with Telling(missed_calls.keep, missed_calls.GATHER):
        check_kind("communicator", communicator, Communicator)


def _reject_gather(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell peers, who are in an exchange of a communicator that is among the arguments."""
    for given in (*args, kwargs.get("communicator")):
        if isinstance(given, Communicator):
            given.reject(error)
    missed_calls.keep(missed_calls.GATHER, error)


def _reject_making(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell peers, who are making a communicator of the same group."""
    bootstrap = bootstrap_for(kwargs.get("group", args[1] if len(args) > 1 else None))
    agree(bootstrap.all_gather, str(error))


_Statement = tuple[dict[str, str], node_layout.RankPlace]

gathers = tells_peers(_reject_gather)
"""For collective calls that begin with an exchange of the communicator that they are given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery:
    """Agreement of the living ranks after a failure.

    Args:
        failed_ranks: Ranks that are dead or have left; they take part in nothing any more.
        completed_epochs: Last epoch that completed on every living rank, by buffer or batched copy
            in the order they were made; -1 for none.
    """

    failed_ranks: tuple[int, ...]
    completed_epochs: tuple[int, ...]


class Communicator(ElasticRanks, Destroyable):
    """The ranks of a group, on one machine or several.

    Collective: every rank of the group makes it, in the same order. Bootstraps over the group and,
    with the host backend, needs the group no more afterwards.

    Args:
        group: A `torch.distributed` group of any backend; None for the default group, or for a
            single rank when torch.distributed was never initialized; or a `Bootstrap`, such as
            `RankThreads(n)[i]` for ranks as threads of one process.
        device: Device where rows live: "cpu", or "cuda" for the current GPU of this process
            ("cuda:1" for another); with the host backend any device of torch. Ranks may share a GPU.
        parent: A wider communicator that contains every rank of this one: share its heap, sockets
            and service thread.
        num_local_ranks: Ranks per node, the same on every rank: consecutive ranks share a node, and
            it must divide their number. None: the parent's nodes for a child, else what the
            launcher's environment says where it started this very group, else the machines.
        stall_timeout_s: Limit for a peer that entered an operation and stopped progressing.
        arrival_timeout_s: Limit for a living peer that has not entered an operation others are in.
            It is named in a warning once a minute before.
        backend: "host" (shared memory within a node, a rail between nodes; rows of a GPU are copied to
            the host and back), "collective" (torch.distributed alone), "deep_ep" (an installed
            DeepEP), "reference" (plain torch, slow, for comparison), "simt" (GPU kernels on an
            emulator, slow, for tests), "cuda" (GPUs of one machine that reach each other), "nvshmem"
            (GPUs of several nodes) or "auto": with a GPU, cuda on one node and nvshmem on several, and
            host, with a warning, where GPUs of a node do not reach each other; else host where all
            nodes have equally many ranks, else collective.
        max_heap_bytes: Most bytes of memory that heap segments of this rank take; None for no
            limit.
        num_threads: Threads that copy and add rows for this rank, >= 1; None for the cores available
            divided by the ranks on this machine.
        with_huge_pages: Ask for 2 MiB pages.
        num_sms: SMs that the kernels of one buffer take on this rank, with a GPU: >= 1, the same on
            every rank; None for 24, or a rank's share of half its GPU where that is less. Those of
            all ranks and buffers on one GPU must fit it at once.
        rail: Engine that moves rows between nodes with the host backend, the same on every rank:
            "gloo" (torch.distributed), "mpi" (mpi4py), "sockets" (the communicator's own) or
            "auto". Of no use with one node.
        check_messages: Whether every message of a dispatch or combine between nodes carries a
            checksum, with the host backend; the same on every rank. A message that was damaged on
            the way is then a `PeerFailedError` on every rank, which names the rank it came from. Of
            no use with one node.

    Raises:
        ValueError: An argument breaks a rule above, on every rank when it is only one rank's.
        OSError: The machine refused a socket or memory.
    """

    @tells_peers(_reject_making)
    def __init__(
        self,
        group: dist.ProcessGroup | Bootstrap | None = None,
        device: str | torch.device = "cpu",
        parent: Communicator | None = None,
        num_local_ranks: int | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        arrival_timeout_s: float = ARRIVAL_TIMEOUT_S,
        *,
        backend: str = "auto",
        max_heap_bytes: int | None = None,
        num_threads: int | None = None,
        with_huge_pages: bool = True,
        num_sms: int | None = None,
        rail: str = "auto",
        check_messages: bool = False,
    ) -> None:
        self.bootstrap = bootstrap_for(group)
        self._process_id = os.getpid()
        self._fork_generation = forks.generation
        self.group: dist.ProcessGroup | None = (
            group if group is not None and isinstance(group, dist.ProcessGroup) else None
        )
        self.rank_idx = self.bootstrap.rank_idx
        self.num_ranks = self.bootstrap.num_ranks
        self.parent = parent
        self.native: _host.Group | None = None
        self.gpu: RankGpu | None = None
        self.rail_name = rail
        self._destroyed = False
        self._closed_by = ""
        self._dependants: weakref.WeakSet[Destroyable] = weakref.WeakSet()
        self.latest_buffer: Callable[[], _Rejecting | None] = _nothing
        """Gives the buffer that this rank has used last."""

        stated: _Statement | None = None
        with FirstError() as first:
            options = self._take_arguments(
                device,
                stall_timeout_s=stall_timeout_s,
                arrival_timeout_s=arrival_timeout_s,
                max_heap_bytes=max_heap_bytes,
                num_threads=num_threads,
                with_huge_pages=with_huge_pages,
                num_sms=num_sms,
                check_messages=check_messages,
            )
            backend = self._inherited(backend)
            stated = self._state(backend, num_local_ranks, options)
        gathered = make_together(
            self.bootstrap.all_gather, first.take_line(), "a communicator", stated
        )
        raise_different("ranks ask for different communicators", [wish for wish, _ in gathered])
        places = [place for _, place in gathered]
        self.backend, self.num_local_ranks = choose_backend(
            backend, rail, self.check_messages, self.device, places
        )
        self.nodes = node_layout.NodeLayout(
            num_ranks=self.num_ranks, num_local_ranks=self.num_local_ranks
        )
        self._home_nodes = tuple(self.nodes.node_idx(rank) for rank in range(self.num_ranks))
        self._learn_gpus(is_auto=backend == "auto")
        if self.backend in HEAP_BACKENDS:
            self._connect(options, places)

    def _take_arguments(self, device: str | torch.device, **given: Any) -> CommunicatorOptions:
        """Keep what needs no peer to be right, and raise where something is not."""
        if self.parent is not None:
            if not isinstance(self.parent, Communicator):
                raise TypeError(f"parent must be a Communicator, got {shown(self.parent)}")
            self.parent.check_process("Communicator")
        self.device = torch.device(device)
        options = CommunicatorOptions.checked(self.device, **given)
        self.stall_timeout_s = options.stall_timeout_s
        self.arrival_timeout_s = options.arrival_timeout_s
        if isinstance(self.bootstrap, ThreadRank):
            self.bootstrap.arrival_timeout_s = options.arrival_timeout_s
        self.check_messages = options.check_messages
        # For the communicator that survivors of failures go on with.
        self._options: dict[str, Any] = dataclasses.asdict(options)
        return options

    def _inherited(self, backend: str) -> str:
        """Return the backend that "auto" stands for where rows of the parent pass through the host."""
        is_staged = self.parent is not None and self.parent.is_staged
        return "host" if is_staged and backend == "auto" else backend

    def _state(
        self, backend: str, num_local_ranks: int | None, options: CommunicatorOptions
    ) -> _Statement:
        """Return this rank's statement of itself to its peers. Raise ValueError if its wishes are wrong."""
        if num_local_ranks is not None:
            num_local_ranks = as_int("num_local_ranks", num_local_ranks)
        problem = problem_with_names(
            backend, self.rail_name, self.check_messages, self.device
        ) or node_layout.problem_with_declared(num_local_ranks, self.num_ranks)
        if problem is None and backend == "host" and self.device.type != "cpu":
            self.device = accelerators.resolve_device(self.device)
            if options.num_sms is not None:
                problem = (
                    f"num_sms is for kernels of a GPU, got {options.num_sms} with the host backend"
                )
        elif problem is None and self.device.type == "cuda":
            parent_gpu = None if self.parent is None else self.parent.gpu
            self.gpu = RankGpu(self.device, options.num_sms, parent_gpu)
            self.device = self.gpu.device
        problem = problem or self._problem_with_parent(backend, options.max_heap_bytes)
        if problem is not None:
            raise ValueError(problem)
        wishes = {
            "backend": backend,
            "rail": self.rail_name,
            "device": self.device.type,
            "check_messages": str(self.check_messages),
        }
        return wishes, self._place(num_local_ranks)

    def _learn_gpus(self, is_auto: bool) -> None:
        """Learn who has which GPU; give up the GPUs' heaps where they do not reach each other. Collective.

        Args:
            is_auto: Whether the backend was left open.

        Raises:
            ValueError: They do not, and it was not; on every rank.
        """
        reason = ""
        try:
            if self.gpu is not None:
                self.gpu.learn_peers(self.bootstrap, self.nodes.local_ranks(self.node_idx))
        except UnreachableGpusError as error:
            if not is_auto:
                raise
            reason = str(error)
        if not reason:
            return
        with FirstError() as first:  # where a filter makes an error of the warning
            warnings.warn(
                f"the host backend is taken for tensors on {self.device}: {reason}. Every dispatch "
                "and combine copies its rows to the host and back, and waits for these copies. "
                'backend="host" asks for that without this warning, backend="cuda" refuses it',
                stacklevel=4,  # past this, the constructor, and what tells peers of wrong arguments
            )
        agree(self.bootstrap.all_gather, first.take_line())
        self.backend, self.gpu = "host", None
        self._options["num_sms"] = None  # of kernels that there are none of

    def _connect(self, options: CommunicatorOptions, places: list[node_layout.RankPlace]) -> None:
        """Make the heap that all ranks can address, and what they hear of each other by. Collective."""
        nvshmem_id = nvshmem.agree(self.bootstrap) if self.backend == "nvshmem" else None
        self.native = connect_group(
            self.bootstrap,
            options,
            places,
            self.num_local_ranks,
            None if self.parent is None else self.parent.native,
        )
        if self.gpu is not None:
            self.gpu.make_heap(self.native, self.bootstrap, options.max_heap_bytes, nvshmem_id)
        if self.parent is not None:
            self.parent.adopt(self)
        # At exit operations in flight end and peers hear of it while Python still runs; `atexit`
        # alone is not called in the children of multiprocessing.
        util.Finalize(self, _leave, (weakref.ref(self), self.native), exitpriority=100)

    def _place(self, num_local_ranks: int | None) -> node_layout.RankPlace:
        """Return the place of this rank, for its peers."""
        return node_layout.RankPlace(
            machine=node_layout.own_machine(),
            declared=num_local_ranks,
            launched=node_layout.launched_num_local_ranks(self.rank_idx, self.num_ranks),
            parent_rank=-1 if self.parent is None else self.parent.rank_idx,
            parent_node=-1 if self.parent is None else self.parent.node_idx,
        )

    def _problem_with_parent(self, backend: str, max_heap_bytes: int | None) -> str | None:
        """Return the reason that this communicator cannot be a child of its parent, or None."""
        if self.parent is None:
            return None
        if self.parent._destroyed:
            return "parent has been destroyed"
        if max_heap_bytes is not None:
            return f"max_heap_bytes belongs to the parent's heap, got {max_heap_bytes}"
        if backend in ("auto", *HEAP_BACKENDS) and self.parent.native is None:
            return f"parent has no heap (its backend is {self.parent.backend!r})"
        if self.device.type != "cpu" and self.parent.device != self.device:
            return f"device must be the parent's, {self.parent.device}, got {self.device}"
        if self.gpu is not None and self.parent.gpu is None:
            return (
                f"the parent has no heap on its GPU (its backend is {self.parent.backend!r}): backend "
                f'must be "host", got {backend!r}'
            )
        return None

    @property
    def is_destroyed(self) -> bool:
        """Return whether it has been destroyed, or closed by a `shrink` or `grow`."""
        return self._destroyed

    @property
    def is_staged(self) -> bool:
        """Return whether rows on a device pass through the host's memory, where the heap is."""
        return self.backend == "host" and self.device.type != "cpu"

    @property
    def num_nodes(self) -> int:
        """Nodes, each of `num_local_ranks` consecutive ranks."""
        return self.nodes.num_nodes

    @property
    def node_idx(self) -> int:
        """Node of this rank."""
        return self.nodes.node_idx(self.rank_idx)

    @property
    def local_rank_idx(self) -> int:
        """This rank among those of its node."""
        return self.nodes.local_rank_idx(self.rank_idx)

    def require_gpu(self) -> RankGpu:
        """This rank's GPU.

        Raises:
            ValueError: The communicator was destroyed or has no GPU.
        """
        if self._destroyed:
            raise ValueError(self.end_text)
        if self.gpu is None:
            raise ValueError(f"the {self.backend} backend has no GPU")
        return self.gpu

    def require_native(self) -> _host.Group:
        """The native group: sockets, heap and health of the ranks.

        Raises:
            ValueError: The communicator was destroyed or has no heap.
        """
        if self._destroyed:
            raise ValueError(self.end_text)
        if self.native is None:
            raise ValueError(f"the {self.backend} backend has no heap")
        return self.native

    def is_forked(self) -> bool:
        """Return whether this process was forked from the one that made the communicator."""
        return forks.generation != self._fork_generation

    def check_process(self, what: str) -> None:
        """Refuse `what` in a forked child, which has neither the peers nor the memory.

        Raises:
            ValueError: This process was forked from the one that made the communicator.
        """
        if self.is_forked():
            raise ValueError(
                f"{what}: the communicator belongs to process {self._process_id} and this is its "
                f"forked child {os.getpid()}"
            )

    def adopt(self, dependant: Destroyable) -> None:
        """Destroy `dependant`, a buffer or a child, before this communicator, if it still lives."""
        self._dependants.add(dependant)

    @gathers
    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's small `payload` (<= 1 MiB), in rank order. Collective.

        Travels over the communicator's own sockets (host) or its bootstrap. Failed ranks give b"".

        Raises:
            TypeError: Some rank's payload is no bytes; on every rank.
            ValueError: Some rank's payload is too long; on every rank.
            PeerFailedError: A peer died or left.
            PeerTimeoutError: A peer did not arrive in `arrival_timeout_s`.
        """
        if missed_calls.kept.calls:
            self.tell_missed("all_gather")
        with Telling(self.reject):
            if not isinstance(payload, bytes):
                raise TypeError(f"payload must be bytes, got {type(payload).__name__}")
            if len(payload) > _MOST_GATHERED_BYTES:
                raise ValueError(
                    f"payload must have at most {_MOST_GATHERED_BYTES} bytes, got {len(payload)}"
                )
        return self.exchange("all_gather", payload)

    def exchange(self, call: str, payload: bytes) -> list[bytes]:
        """Every rank's payload, of ranks that are in the same call. Collective.

        Args:
            call: Name of the public call that exchanges, without a NUL.
            payload: Payload of this rank.

        Returns:
            Payloads in rank order; b"" for failed ranks.

        Raises:
            ValueError: Ranks are in different calls, or one rejects its own; on every rank.
            TypeError: As some rank rejected it.
        """
        if missed_calls.kept.calls:
            self.tell_missed(call)
        name = call.encode() + b"\0"
        payloads = []
        for rank_idx, item in enumerate(self._gather(name + payload)):
            if item and not item.startswith(name):
                other = item.partition(b"\0")[0].decode(errors="replace")
                raise ValueError(
                    f"ranks are in different calls: rank {self.rank_idx} in {call}, rank {rank_idx} "
                    f"in {shortened(other)}"
                )
            payloads.append(item[len(name) :])
        return payloads

    def check_together(
        self,
        check: Callable[[], str],
        call: str = "making",
        unequal: str = "ranks make different things",
    ) -> None:
        """Raise on every rank what `check` raises on any. Collective; for whatever ranks do together.

        Args:
            check: Run on every rank. Returns what has to be equal on all of them.
            call: As in `exchange`.
            unequal: Begins the message where what is returned differs.

        Raises:
            TypeError: As some rank's `check` raised it.
            ValueError: Likewise, or what ranks state differs; both are named.
        """
        if missed_calls.kept.calls:
            self.tell_missed(call)
        with Telling(self.reject):
            stated = check()
        gathered = self.exchange(call, b"+" + stated.encode(errors="backslashreplace"))
        # An excluded rank says nothing.
        raise_unequal(
            unequal,
            [item[1:].decode() if item else None for item in gathered],
            shortened,
        )

    def reject(self, error: Exception) -> NoReturn:
        """Raise `error` on every rank, in place of an `all_gather` that they enter. Collective.

        Args:
            error: Raised as a TypeError or NotImplementedError where it is one, else as a ValueError, with
                this rank's number in front.
        """
        kind = next((kind for kind in _TOLD_KINDS if isinstance(error, kind)), ValueError)
        told = encode_problem(kind(text_of(error)[:_MOST_TEXT]))
        self._gather(_REJECTION + told.encode(errors="backslashreplace"))
        raise AssertionError("a rejected exchange did not raise") from error

    def _gather(self, payload: bytes) -> list[bytes]:
        if self.native is not None:
            gathered = self.require_native().all_gather(payload)
        else:
            gathered = [bytes(item) for item in self.bootstrap.all_gather(payload)]
        if any(item.startswith(_REJECTION) for item in gathered):
            raise_together(
                decode_problem(item[len(_REJECTION) :].decode(errors="replace"))
                if item.startswith(_REJECTION)
                else None
                for item in gathered
            )
        return gathered

    def tell_missed(
        self, call: str, reject: Callable[[str, Exception], NoReturn] | None = None
    ) -> None:
        """Take part in the calls that peers are in and this rank has missed. Collective.

        What is missed of a buffer is taken to be of the buffer that is called now, else of the one
        that this communicator has, or used last.

        Args:
            call: Name of the call that this rank makes now.
            reject: `EpBuffer.reject` of the buffer whose operation it has called; None for none.
        """
        for missed in missed_calls.take():
            error = missed.as_peer_error(call)
            # Every rank raises it, this one did so before.
            with contextlib.suppress(TypeError, ValueError):
                if missed.operation == missed_calls.GATHER:
                    self.reject(error)
                told = reject or self._reject_of_buffer()
                if told is not None:
                    told(missed.operation, error)

    def _reject_of_buffer(self) -> Callable[[str, Exception], NoReturn] | None:
        found = [each for each in self._dependants if isinstance(each, _Rejecting)]
        latest = self.latest_buffer()
        if latest in found:
            return latest.reject
        return found[0].reject if len(found) == 1 else None

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in this rank's symmetric heap, contents undefined; of the CPU with the host backend. Local.

        Peers can write it in place: a copy into it needs no slot. Its memory goes back to the heap
        with the last tensor over it; it starts at a multiple of 64 bytes (of 4096 from 4096 bytes
        on).

        Args:
            *shape: Sizes, each >= 0; none for a 0-dim tensor.
            dtype: Dtype of the elements.

        Raises:
            ValueError: A size is negative, or the backend has no heap.
            CapacityError: The limit or the machine does not allow it.
        """
        if any(size < 0 for size in shape):
            raise ValueError(f"sizes must be >= 0, got {shape}")
        owner = self.require_native() if self.gpu is None else self.require_gpu().heap
        flat: torch.Tensor = owner.empty(math.prod(shape) * dtype.itemsize)
        return flat.view(dtype).view(shape)

    def reserve(self, num_bytes: int) -> None:
        """Grow this rank's heap so that `num_bytes` more fit without growth inside a call. Local.

        Raises:
            CapacityError: The limit or the machine does not allow it.
        """
        if num_bytes < 0:
            raise ValueError(f"num_bytes must be >= 0, got {num_bytes}")
        owner = self.require_native() if self.gpu is None else self.require_gpu().heap
        owner.reserve(num_bytes)

    def trim(self) -> int:
        """Give the pages of all free heap memory of this rank back to the system. Local.

        Memory of a GPU stays: peers have it mapped.

        Returns:
            Bytes given back.
        """
        return self.require_native().trim()

    def heap_stats(self) -> HeapStats:
        """Bytes of this rank's heap now, of the one on its GPU where it has one. Local."""
        if self.gpu is not None:
            return HeapStats(**self.require_gpu().heap.stats())
        return HeapStats(**self.require_native().heap_stats())

    def use_on(self, stream: torch.cuda.Stream) -> None:
        """Say that `stream` uses windows of this rank's GPU: from now on they wait for it too.

        Streams that were current at a call of a buffer are known already. `Tensor.record_stream` has
        no effect on this memory. The stream must live as long as the communicator. With the host backend
        there are none: results are torch's memory.
        """
        if not self.is_staged:
            self.require_gpu().heap.use_on(stream.cuda_stream)

    def recover(self) -> Recovery:
        """Make the buffers of the living usable again after an abort. Collective over the living.

        Operations go on among the living: a dead rank sends and receives nothing, and a token routed
        to an expert of a dead rank is a ValueError on every rank.

        Returns:
            Failed ranks and the last epochs that completed everywhere, equal on all living ranks.

        Raises:
            PeerTimeoutError: A living peer did not arrive in `arrival_timeout_s`.
        """
        missed_calls.take()  # peers have left them
        failed_ranks, completed_epochs = self.require_native().recover()
        return Recovery(failed_ranks=tuple(failed_ranks), completed_epochs=tuple(completed_epochs))

    def destroy(self) -> None:
        """Leave in good order: peers hear of it and do not take it for a failure. Idempotent.

        Tensors already handed out stay valid.

        Raises:
            ValueError, TypeError, PeerFailedError, PeerTimeoutError: Errors that `EpBuffer.destroy`
                of a buffer raises. Everything has been released.
        """
        if self._destroyed:
            return
        if self.native is not None:
            self.native.prepare_to_leave()
        with contextlib.ExitStack() as ends:
            ends.callback(self._end)
            for dependant in list(self._dependants):
                ends.callback(dependant.destroy)

    def _end(self) -> None:
        self._destroyed = True
        if self.native is not None:
            self.native.destroy()

    def __repr__(self) -> str:
        return f"Communicator(rank_idx={self.rank_idx}, num_ranks={self.num_ranks}, backend={self.backend!r})"


def _leave(reference: weakref.ref[Communicator], native: _host.Group) -> None:
    """The end of a communicator that nobody destroyed."""
    communicator = reference()
    if communicator is not None:
        # Python has said already what ends the process.
        with contextlib.suppress(KeyboardInterrupt):
            communicator.destroy()
    native.destroy()

"""Who the peers are: the ranks of one group, their heap and their health."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import types
import weakref
from multiprocessing import util
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.utils.dlpack

from moe_comm import cuda_devices, env, node_layout, nvshmem
from moe_comm.bootstrap import Bootstrap, bootstrap_for
from moe_comm.elastic import ElasticRanks
from moe_comm.heap_stats import HeapStats

if TYPE_CHECKING:
    from moe_comm import _cuda, _host

__all__ = ["Communicator", "HeapStats", "Recovery"]

BACKENDS = ("auto", "host", "collective", "deep_ep", "reference", "simt", "cuda", "nvshmem")
# Backends over shared-memory heaps, one a node.
HEAP_BACKENDS = ("host", "simt", "cuda", "nvshmem")
# Backends whose rows lie on a GPU.
GPU_BACKENDS = ("cuda", "nvshmem")
# Backends that know no nodes, or lay them out themselves.
ONE_NODE_BACKENDS = ("cuda", "deep_ep")
RAILS = ("auto", "gloo", "mpi", "sockets")
CONNECT_TIMEOUT_S = 300.0


class _Destroyable(Protocol):
    def destroy(self) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery:
    """What the living agreed on.

    Args:
        failed_ranks: Ranks that are dead or have left; they take part in nothing any more.
        completed_epochs: Last epoch that completed on every living rank, by buffer or batched copy
            in the order they were made; -1 for none.
    """

    failed_ranks: tuple[int, ...]
    completed_epochs: tuple[int, ...]


class Communicator(ElasticRanks):
    """The ranks of a group, on one machine or several.

    Collective: every rank of the group makes it, in the same order. Bootstraps over the group and,
    with the host backend, needs the group no more afterwards.

    Args:
        group: A `torch.distributed` group of any backend; None for the default group, or for a
            single rank when torch.distributed was never initialised; or a `Bootstrap`, such as
            `RankThreads(n)[i]` for ranks as threads of one process.
        device: Where rows live: "cpu", or "cuda" for the current GPU of this process ("cuda:1" for
            another). Ranks may share a GPU.
        parent: A wider communicator that contains every rank of this one: share its heap, sockets
            and service thread.
        num_local_ranks: Ranks per node, the same on every rank: consecutive ranks share a node, and
            it must divide their number. None: the parent's nodes for a child, else what the
            launcher's environment says where it started this very group, else the machines.
        stall_timeout_s: Limit for a peer that entered an operation and stopped progressing.
        arrival_timeout_s: Limit for a living peer that has not entered an operation others are in.
            It is named in a warning once a minute before.
        backend: "host" (shared memory within a node, a rail between nodes), "collective"
            (torch.distributed alone), "deep_ep" (an installed DeepEP), "reference" (plain torch,
            slow, for comparison), "simt" (GPU kernels on an emulator, slow, for tests),
            "cuda" (GPUs of one machine that reach each other), "nvshmem" (GPUs of several nodes) or
            "auto": with a GPU, cuda on one node and nvshmem on several; else host where all nodes
            have equally many ranks, else collective. An `EpBuffer` may choose another for CPU
            tensors.
        max_heap_bytes: Most bytes of memory that heap segments of this rank take; None for no
            limit.
        num_threads: Threads that copy and add rows for this rank, >= 1; None for the cores available
            divided by the ranks on this machine.
        with_huge_pages: Ask for 2 MiB pages.
        num_sms: With a GPU: SMs that the kernels of one buffer take on this rank, >= 1, the same on
            every rank; None for 24, or a rank's share of half its GPU where that is less. Those of
            all ranks and buffers on one GPU must fit it at once.
        rail: What moves rows between nodes with the host backend, the same on every rank: "gloo"
            (torch.distributed), "mpi" (mpi4py), "sockets" (the communicator's own) or "auto". Of no
            use with one node.

    Raises:
        ValueError: An argument breaks a rule above, on every rank when it is only one rank's.
        OSError: The machine refused a socket or memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Bootstrap | None = None,
        device: str | torch.device = "cpu",
        parent: Communicator | None = None,
        num_local_ranks: int | None = None,
        stall_timeout_s: float = 30.0,
        arrival_timeout_s: float = 1800.0,
        *,
        backend: str = "auto",
        max_heap_bytes: int | None = None,
        num_threads: int | None = None,
        with_huge_pages: bool = True,
        num_sms: int | None = None,
        rail: str = "auto",
    ) -> None:
        self.bootstrap = bootstrap_for(group)
        self.group: dist.ProcessGroup | None = (
            group if group is not None and isinstance(group, dist.ProcessGroup) else None
        )
        self.rank_idx = self.bootstrap.rank_idx
        self.num_ranks = self.bootstrap.num_ranks
        self.parent = parent
        self.stall_timeout_s = float(stall_timeout_s)
        self.arrival_timeout_s = float(arrival_timeout_s)
        self.native: _host.Group | None = None
        self.device_heap: _cuda.Heap | None = None
        self.devices: list[cuda_devices.DeviceIdentity] = []
        self._num_sms = num_sms
        self._num_claimed_sms = 0
        self._destroyed = False
        self._closed_by = ""
        # For the communicator that survivors of failures go on with.
        self._options: dict[str, Any] = {
            "stall_timeout_s": self.stall_timeout_s,
            "arrival_timeout_s": self.arrival_timeout_s,
            "max_heap_bytes": max_heap_bytes,
            "num_threads": num_threads,
            "with_huge_pages": with_huge_pages,
            "num_sms": num_sms,
        }
        self._dependants: weakref.WeakSet[_Destroyable] = weakref.WeakSet()
        self._retained: list[object] = []
        self.rail_name = rail

        try:
            self.device = torch.device(device)
            problem = self._problem_with(
                backend, num_local_ranks, max_heap_bytes, num_threads
            ) or self._problem_with_device(backend)
        except Exception as error:  # noqa: BLE001 - whatever it is, peers must hear of it
            problem = str(error).split("\n", 1)[0]
        place = node_layout.RankPlace(
            machine=node_layout.own_machine(),
            declared=num_local_ranks,
            launched=node_layout.launched_num_local_ranks(self.rank_idx, self.num_ranks),
            parent_rank=-1 if parent is None else parent.rank_idx,
            parent_node=-1 if parent is None else parent.node_idx,
        )
        gathered = self.bootstrap.all_gather((problem, backend, rail, place))
        for rank_idx, (peer_problem, _, _, _) in enumerate(gathered):
            if peer_problem is not None:
                raise ValueError(f"rank {rank_idx}: {peer_problem}")
        for what, values in (
            ("backends", [peer_backend for _, peer_backend, _, _ in gathered]),
            ("rails", [peer_rail for _, _, peer_rail, _ in gathered]),
        ):
            if len(set(values)) > 1:
                raise ValueError(f"ranks ask for different {what}: {values}")
        places = [peer_place for _, _, _, peer_place in gathered]
        self.backend = self._place_ranks(backend, places)
        if self.backend not in HEAP_BACKENDS:
            return
        if self.backend in GPU_BACKENDS:
            self._agree_on_devices()
        unique_id = nvshmem.agree(self.bootstrap) if self.backend == "nvshmem" else b""
        self.native = self._connect(places, max_heap_bytes, num_threads, with_huge_pages)
        if self.backend in GPU_BACKENDS:
            self.device_heap = self._make_device_heap(max_heap_bytes, unique_id)
        if parent is not None:
            parent.adopt(self)
        # At exit operations in flight end and peers hear of it while Python still runs; `atexit`
        # alone is not called in the children of multiprocessing.
        util.Finalize(self, _leave, (weakref.ref(self), self.native), exitpriority=100)

    def _problem_with(
        self,
        backend: str,
        num_local_ranks: int | None,
        max_heap_bytes: int | None,
        num_threads: int | None,
    ) -> str | None:
        """What is wrong with this rank's arguments, or None."""
        if backend not in BACKENDS:
            return f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}"
        if self.rail_name not in RAILS:
            return f"rail must be one of {', '.join(RAILS)}, got {self.rail_name!r}"
        has_rail = backend in ("auto", "host") and self.device.type == "cpu"
        if self.rail_name != "auto" and not has_rail:
            return f"rail is for the host backend, got {self.rail_name!r} with {backend!r} on {self.device}"
        if problem := node_layout.problem_with_declared(num_local_ranks, self.num_ranks):
            return problem
        for name in ("stall_timeout_s", "arrival_timeout_s"):
            if not getattr(self, name) > 0.0:
                return f"{name} must be > 0, got {getattr(self, name)}"
        if max_heap_bytes is not None and max_heap_bytes <= 0:
            return f"max_heap_bytes must be > 0, got {max_heap_bytes}"
        if num_threads is not None and num_threads < 1:
            return f"num_threads must be >= 1, got {num_threads}"
        if self.parent is not None:
            if self.parent._destroyed:
                return "parent has been destroyed"
            if max_heap_bytes is not None:
                return f"max_heap_bytes belongs to the parent's heap, got {max_heap_bytes}"
            if backend in ("auto", *HEAP_BACKENDS) and self.parent.native is None:
                return f"parent has no heap (its backend is {self.parent.backend!r})"
        return None

    def _place_ranks(self, backend: str, places: list[node_layout.RankPlace]) -> str:
        """Set the nodes all ranks agree on; return the backend, chosen where it is "auto"."""
        machines = [place.machine for place in places]
        if backend in HEAP_BACKENDS and backend in ONE_NODE_BACKENDS and len(set(machines)) > 1:
            other = next(i for i, machine in enumerate(machines) if machine != machines[0])
            raise ValueError(
                f"the {backend} backend needs all ranks on one machine and in one network namespace; "
                f"rank 0 is on {machines[0]}, rank {other} on {machines[other]}; use "
                'backend="host" or "collective"'
            )
        is_auto_gpu = backend == "auto" and self.device.type == "cuda"
        num_local_ranks = node_layout.agree_on_nodes(
            places,
            # GPUs of one machine reach each other, whatever its launcher makes of it.
            with_launcher=backend not in ONE_NODE_BACKENDS and not is_auto_gpu,
            must_fit=backend in HEAP_BACKENDS
            or is_auto_gpu
            or (backend == "auto" and self.parent is not None),
        )
        if is_auto_gpu:
            backend = "cuda" if num_local_ranks == self.num_ranks else "nvshmem"
        elif backend == "auto":
            backend = "collective" if num_local_ranks is None else "host"
            if backend == "collective" and self.rail_name != "auto":
                raise ValueError(
                    f"rail {self.rail_name!r} is for the host backend, which needs equally many "
                    "consecutive ranks on every node; these ranks are placed unevenly"
                )
        if backend in ONE_NODE_BACKENDS and places[0].declared not in (None, self.num_ranks):
            raise ValueError(
                f"the {backend} backend takes one node: num_local_ranks must be None or "
                f"{self.num_ranks}, got {places[0].declared}"
            )
        # Where nodes play no part, ranks that are placed unevenly are nodes of one.
        self.num_local_ranks = num_local_ranks or 1
        self._home_nodes = tuple(rank // self.num_local_ranks for rank in range(self.num_ranks))
        return backend

    @property
    def num_nodes(self) -> int:
        """Nodes, each of `num_local_ranks` consecutive ranks."""
        return self.num_ranks // self.num_local_ranks

    @property
    def node_idx(self) -> int:
        """Node of this rank."""
        return self.rank_idx // self.num_local_ranks

    @property
    def local_rank_idx(self) -> int:
        """This rank among those of its node."""
        return self.rank_idx % self.num_local_ranks

    def _problem_with_device(self, backend: str) -> str | None:
        """What is wrong with this rank's device, or None. Gives "cuda" its number."""
        if self.device.type not in ("cpu", "cuda"):
            return f"device must be cpu or cuda, got {self.device}"
        fitting = (
            (*GPU_BACKENDS, "auto")
            if self.device.type == "cuda"
            else set(BACKENDS) - set(GPU_BACKENDS)
        )
        if backend not in fitting:
            return f"the {backend} backend does not move tensors on {self.device}"
        if self.device.type == "cpu":
            if self._num_sms is not None:
                return f"num_sms is for a GPU, got {self._num_sms} with device {self.device}"
            return None
        if self._num_sms is not None and self._num_sms < 1:
            return f"num_sms must be >= 1, got {self._num_sms}"
        reason = cuda_devices.unusable_reason(self.device.index or 0)
        if reason is not None:
            return reason
        if not torch.cuda.is_available():
            return "this build of torch has no CUDA, and rows are its tensors"
        if self.device == torch.device("cuda"):  # without a number
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.devices = [cuda_devices.identify(self.device.index)]
        if self.parent is not None and self.parent.device != self.device:
            return f"device must be the parent's, {self.parent.device}, got {self.device}"
        return None

    def _agree_on_devices(self) -> None:
        """Learn who has which GPU, and whether all reach each other. Collective."""
        if self.parent is not None:
            self._num_sms = self._num_sms or self.parent.claimable_sms
        (own,) = self.devices
        self.devices = self.bootstrap.all_gather(own)
        if self._num_sms is None:
            self._num_sms = cuda_devices.default_num_sms(self.devices)
        first = self.node_idx * self.num_local_ranks
        self._raise_together(
            cuda_devices.problem_with_devices(
                self.rank_idx, self.devices, range(first, first + self.num_local_ranks)
            )
        )

    def _make_device_heap(self, max_heap_bytes: int | None, unique_id: bytes) -> _cuda.Heap:
        """This rank's memory on its GPU, which peers can open. Collective."""
        if self.parent is not None and self.parent.device_heap is not None:
            return self.parent.device_heap
        assert self.native is not None
        heap: _cuda.Heap | None = None
        problem = None
        try:
            # torch and this module use one context of the device; torch's is made first.
            torch.empty(0, device=self.device)
            arguments = (
                self.native,
                self.device.index,
                env.cuda_max_connections(),
                max_heap_bytes or 0,
                env.poison_windows(),
            )
            if self.backend == "nvshmem":
                module = nvshmem.load_nvshmem_module()
                heap = module.InternodeHeap.create(*arguments, unique_id)
            else:
                heap = cuda_devices.load_cuda_module().Heap.create(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, peers must hear of it
            problem = str(error).split("\n", 1)[0]
        try:
            self._raise_together(problem)
        except ValueError:
            self.native.destroy()
            raise
        assert heap is not None
        return heap

    def _raise_together(self, problem: str | None) -> None:
        """Raise what any rank found wrong on every rank. Collective."""
        for rank_idx, peer_problem in enumerate(self.bootstrap.all_gather(problem)):
            if peer_problem is not None:
                raise ValueError(f"rank {rank_idx}: {peer_problem}")

    @property
    def claimable_sms(self) -> int | None:
        """SMs for the kernels of one buffer on this rank; None without a GPU."""
        return self._num_sms

    def require_device_heap(self) -> _cuda.Heap:
        """The memory on the GPU behind the cuda backend.

        Raises:
            ValueError: The communicator was destroyed or has no GPU.
        """
        if self._destroyed:
            raise ValueError(self.end_text)
        if self.device_heap is None:
            raise ValueError(f"the {self.backend} backend has no GPU")
        return self.device_heap

    def claim_sms(self) -> tuple[int, str]:
        """SMs for one more buffer on this rank, and what is wrong with that ("" if nothing).

        `return_sms` gives them back, also after a problem. Children claim from their parent.
        """
        num_sms = self._num_sms or 1
        owner = self
        while owner.parent is not None:
            owner = owner.parent
        problem = cuda_devices.problem_with_sms(owner.devices, num_sms, owner._num_claimed_sms)
        owner._num_claimed_sms += num_sms
        return num_sms, problem

    def return_sms(self, num_sms: int) -> None:
        """Give back what `claim_sms` gave."""
        owner = self
        while owner.parent is not None:
            owner = owner.parent
        owner._num_claimed_sms -= num_sms

    def _connect(
        self,
        places: list[node_layout.RankPlace],
        max_heap_bytes: int | None,
        num_threads: int | None,
        with_huge_pages: bool,
    ) -> _host.Group:
        from moe_comm import _host

        boots = [place.machine.boot for place in places]
        num_machine_ranks = boots.count(boots[self.rank_idx])
        if num_threads is None:
            num_threads = max(1, len(os.sched_getaffinity(0)) // num_machine_ranks)
        channel = self.bootstrap.all_gather(secrets.randbits(62))[0]
        if self.parent is not None and self.parent.native is not None:
            return _host.Group.create_child(
                self.parent.native,
                [place.parent_rank for place in places],
                self.rank_idx,
                channel,
                self.stall_timeout_s,
                self.arrival_timeout_s,
                num_threads,
                self.num_local_ranks,
                num_machine_ranks,
            )
        mesh = self._listen(len({place.machine for place in places}) == 1)
        addresses = self.bootstrap.all_gather(mesh.address())
        mesh.connect(
            self.rank_idx,
            addresses,
            CONNECT_TIMEOUT_S,
            # Who dies while they connect is found by the group from which they come.
            getattr(self.bootstrap, "shrunk_group", None),
            self.num_local_ranks,
            self.stall_timeout_s,
        )
        heap = _host.ShmHeap.create(
            mesh, max_heap_bytes or 0, with_huge_pages, env.poison_windows()
        )
        return _host.Group.create(
            mesh,
            heap,
            channel,
            self.stall_timeout_s,
            self.arrival_timeout_s,
            num_threads,
            self.num_local_ranks,
            num_machine_ranks,
        )

    def _listen(self, is_one_machine: bool) -> _host.PeerMesh:
        """The sockets at which peers of this node, and of others, reach this rank. Collective."""
        from moe_comm import _host

        if self.num_nodes == 1:
            return _host.PeerMesh.create()
        mesh = None
        problem = None
        try:
            mesh = _host.PeerMesh.create_over_nodes(
                is_one_machine, env.socket_interface() or "", env.master_address() or ""
            )
        except (ValueError, OSError) as error:  # an interface that only this machine lacks
            problem = str(error)
        self._raise_together(problem)
        assert mesh is not None
        return mesh

    def require_native(self) -> _host.Group:
        """The native group behind the host backend.

        Raises:
            ValueError: The communicator was destroyed or has no heap.
        """
        if self._destroyed:
            raise ValueError(self.end_text)
        if self.native is None:
            raise ValueError(f"the {self.backend} backend has no heap")
        return self.native

    def adopt(self, dependant: _Destroyable) -> None:
        """Destroy `dependant`, a buffer or a child, before this communicator, if it still lives."""
        self._dependants.add(dependant)

    def retain(self, resource: object) -> None:
        """Keep `resource` as long as this object: memory that peers of a failed call may still write."""
        self._retained.append(resource)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's small `payload` (<= 1 MiB), in rank order. Collective.

        Travels over the communicator's own sockets (host) or its bootstrap. Failed ranks give b"".

        Raises:
            PeerFailedError: A peer died or left.
            PeerTimeoutError: A peer did not arrive in `arrival_timeout_s`.
        """
        if self.native is not None:
            return self.require_native().all_gather(payload)
        return [bytes(item) for item in self.bootstrap.all_gather(payload)]

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in this rank's symmetric heap, contents undefined. Local.

        Peers can write it in place: a copy into it needs no slot. Its memory goes back to the heap
        with the last tensor over it; it starts at a multiple of 64 bytes (of 4096 from 4096 bytes
        on).

        Args:
            *shape: Sizes, each >= 0; none for a 0-dim tensor.
            dtype: Of the elements.

        Raises:
            ValueError: A size is negative, or the backend has no heap.
            CapacityError: The limit or the machine does not allow it.
        """
        if any(size < 0 for size in shape):
            raise ValueError(f"sizes must be >= 0, got {shape}")
        owner = self.require_native() if self.device_heap is None else self.require_device_heap()
        capsule = owner.empty(math.prod(shape) * dtype.itemsize)
        flat: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
        return flat.view(dtype).view(shape)

    def reserve(self, num_bytes: int) -> None:
        """Grow this rank's heap so that `num_bytes` more fit without growth inside a call. Local.

        Raises:
            CapacityError: The limit or the machine does not allow it.
        """
        if num_bytes < 0:
            raise ValueError(f"num_bytes must be >= 0, got {num_bytes}")
        owner = self.require_native() if self.device_heap is None else self.require_device_heap()
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
        if self.device_heap is not None:
            return HeapStats(**self.require_device_heap().stats())
        return HeapStats(**self.require_native().heap_stats())

    def use_on(self, stream: torch.cuda.Stream) -> None:
        """Say that `stream` uses windows of this rank's GPU: from now on they wait for it too.

        Streams that were current at a call of a buffer are known already. `Tensor.record_stream` has
        no effect on this memory. The stream must live as long as the communicator.
        """
        self.require_device_heap().use_on(stream.cuda_stream)

    def recover(self) -> Recovery:
        """Make the buffers of the living usable again after an abort. Collective over the living.

        Operations go on among the living: a dead rank sends and receives nothing, and a token routed
        to an expert of a dead rank is a ValueError on every rank.

        Returns:
            Failed ranks and the last epochs that completed everywhere, equal on all living ranks.

        Raises:
            PeerTimeoutError: A living peer did not arrive in `arrival_timeout_s`.
        """
        failed_ranks, completed_epochs = self.require_native().recover()
        return Recovery(failed_ranks=tuple(failed_ranks), completed_epochs=tuple(completed_epochs))

    def destroy(self) -> None:
        """Leave in good order: peers hear of it and do not take it for a failure. Idempotent.

        Tensors already handed out stay valid.
        """
        if self._destroyed:
            return
        if self.native is not None:
            self.native.prepare_to_leave()
        for dependant in list(self._dependants):
            dependant.destroy()
        self._destroyed = True
        if self.native is not None:
            self.native.destroy()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.destroy()

    def __repr__(self) -> str:
        return f"Communicator(rank_idx={self.rank_idx}, num_ranks={self.num_ranks}, backend={self.backend!r})"


def _leave(reference: weakref.ref[Communicator], native: _host.Group) -> None:
    """The end of a communicator that nobody destroyed."""
    communicator = reference()
    if communicator is not None:
        communicator.destroy()
    native.destroy()

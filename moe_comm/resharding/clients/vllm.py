"""vLLM's weight transfer over this package: the class in its workers, and the one in trainers.

Needs vLLM, whose base classes it extends. vLLM finds the worker's class by the package's plugin; a trainer imports
this for `MoeCommTrainerInitInfo`, which registers both. Workers and trainers are the ranks of a `RefitWorld`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from moe_comm.errors import CommunicationError
from moe_comm.peers.agree import FirstError, first_line
from moe_comm.peers.peer_timeouts import CONNECT_TIMEOUT_S, STALL_TIMEOUT_S
from moe_comm.resharding.clients.frameworks import class_of, module_of
from moe_comm.resharding.clients.vllm_names import register_weight_transfer
from moe_comm.resharding.clients.weight_sources import TrainerWeights, trainer_weights
from moe_comm.resharding.describe.checkpoint_views import CheckpointViews
from moe_comm.resharding.describe.loader_views import TensorSpec
from moe_comm.resharding.engines.vllm_cpu import VllmCpuModel
from moe_comm.resharding.hold.held_versions import Version
from moe_comm.resharding.hold.refit_world import RefitWorld

__all__ = [
    "MoeCommInitInfo",
    "MoeCommTrainerInitInfo",
    "MoeCommTrainerWeightTransferEngine",
    "MoeCommUpdateInfo",
    "MoeCommWeightTransferEngine",
]

_base = module_of("vllm.distributed.weight_transfer.base")
register_weight_transfer()
_GRACE_S = 10.0
"""So long a call of the client and the part of this rank in the world wait for each other's error."""
_MOST_STARTS = 3
"""Most starts of an update: one may be open, and vLLM may say of the next what came of a call before."""


@dataclasses.dataclass(kw_only=True)
class MoeCommInitInfo(class_of(_base, "WeightTransferInitInfo")):  # type: ignore[misc]
    """Init info of a worker: `RefitHost.info`, and what the trainers' init info says besides.

    Args:
        address: Address of the host of the world.
        key: Key of the host.
        num_trainers: Trainers in the world.
        num_engines: Workers in the world, over all data-parallel ranks.
        transport: Transport of the host.
        rank_offset: Place among the engines of the first worker of this vLLM.
        verify: As of `RefitWorld.prepare`; that of the trainers.
        timeout_s: As of `RefitWorld.join`.
        arrival_timeout_s: As of `RefitWorld.join`.
        stall_timeout_s: As of `RefitWorld.join`.
    """

    address: str
    key: str
    num_trainers: int
    num_engines: int
    transport: str = "auto"
    rank_offset: int = 0
    verify: str = "checksum"
    timeout_s: float = CONNECT_TIMEOUT_S
    arrival_timeout_s: float = CONNECT_TIMEOUT_S
    stall_timeout_s: float = STALL_TIMEOUT_S

    def world(self) -> dict[str, Any]:
        """Return what `RefitWorld.join` takes as its info."""
        names = ("address", "key", "num_trainers", "num_engines", "transport")
        return {name: getattr(self, name) for name in names}

    def limits(self) -> dict[str, float]:
        """Return the limits of waits, as `RefitWorld.join` takes them."""
        names = ("timeout_s", "arrival_timeout_s", "stall_timeout_s")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(kw_only=True)
class MoeCommUpdateInfo(class_of(_base, "WeightTransferUpdateInfo")):  # type: ignore[misc]
    """Update info of a worker, given for every update.

    Args:
        version: Version that the trainers send; None to take theirs.
        abandon: Whether nothing comes: the update ends in an error, by which vLLM takes the next one.
    """

    version: int | str | None = None
    abandon: bool = False


@dataclasses.dataclass
class MoeCommTrainerInitInfo(class_of(_base, "TrainerInitInfo")):  # type: ignore[misc]
    """Init info of every trainer rank, with `rank`, its own among the trainers.

    Args:
        world: `RefitHost.info`.
        rank_offset: Place among the engines of the first worker of the client's vLLM.
        verify: As of `RefitWorld.prepare`, equal on all trainers.
        timeout_s: Limit for all trainers and workers to come, and for each step after that.
        arrival_timeout_s: Limit for a rank that does not enter a refit that others are in.
        stall_timeout_s: Limit for a rank that entered one and stopped.
    """

    backend: ClassVar[str] = "moe_comm"

    world: dict[str, Any]
    rank_offset: int = 0
    verify: str = "checksum"
    timeout_s: float = CONNECT_TIMEOUT_S
    arrival_timeout_s: float = CONNECT_TIMEOUT_S
    stall_timeout_s: float = STALL_TIMEOUT_S

    def for_worker(self) -> MoeCommInitInfo:
        """Return what workers are given."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("world", "rank"):
            del own[name]
        return MoeCommInitInfo(**self.world, **own)


class _Served:
    """Target of a worker's refits: versions come whole, or the one before stays."""

    def __init__(self, model: VllmCpuModel, checkpoint: dict[str, TensorSpec]) -> None:
        self._model, self._checkpoint = model, checkpoint
        self._is_handed_over = False

    def begin(self, version: Version) -> None:
        self._is_handed_over = False
        self._model.accept(self._checkpoint)

    def commit(self, version: Version) -> None:
        self._model.moved()
        self._model.commit(str(version))
        self._is_handed_over = True

    def abort(self) -> None:
        if self._is_handed_over:
            raise RuntimeError(f"version {self._model.version} has been handed over")


class MoeCommWeightTransferEngine(class_of(_base, "WeightTransferEngine")):  # type: ignore[misc]
    """The worker's end: an engine's rank of a `RefitWorld`, whose versions are served whole.

    `update_weights` is where a version comes and is handed over, on all workers or, as far as nothing was
    handed over, on none: an error there ends vLLM's update and leaves the worker ready for the next, and
    the trainers hear it. One of `finish_weight_update` would leave the update open for good.

    Args:
        config: vLLM's, with this backend's name.
        vllm_config: vLLM's configuration of the engine.
        device: Device of the worker.
        model: Model of the worker, loaded.
    """

    init_info_cls = MoeCommInitInfo
    update_info_cls = MoeCommUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._model: VllmCpuModel | None = None
        self._world: RefitWorld | None = None
        self._verify = "plan"
        self._version: Version | None = None
        self._has_come = False

    def init_transfer_engine(self, init_info: MoeCommInitInfo) -> None:
        """Join the world, and hold what the trainers have against vLLM's loader. Collective with trainers.

        A worker that has a world leaves it, and joins with the version that it serves.

        Raises:
            CommunicationError: A rank is gone or did not come; its role and rank are named.
            NotImplementedError: As `VllmCpuModel`.
            ValueError: A tensor is missing, extra or of another shape; on every rank, trainers too.
        """
        self._leave()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size
        self._world = RefitWorld.join(
            init_info.world(),
            "engine",
            rank + parallel.rank,
            version=self._version,
            **init_info.limits(),
        )
        self._verify = init_info.verify
        try:
            self._describe(self._world)
        except BaseException:
            self._leave()
            raise

    def _describe(self, world: RefitWorld) -> None:
        """Hear what comes, and plan for it. Collective."""
        problem = FirstError()
        told: list[Any] = world.gather([], None)
        side = hook = None
        with problem:
            checkpoint = _checkpoint_of(told)
            if self._model is None:
                self._model = VllmCpuModel(self.model, self.vllm_config)
            self._model.accept(checkpoint)
            side = CheckpointViews(self._model.views, self._model)
            hook = _Served(self._model, checkpoint)
        world.gather(None, problem.take())
        world.prepare(side, hook, verify=self._verify)

    def start_weight_update(self) -> None:
        """Begin an update. Nothing that is served is written before a version is whole.

        Raises:
            RuntimeError: There is no world.
        """
        self._require_world()
        self._has_come = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take a whole version, and serve it. Collective with trainers.

        The base class ends in a call of an accelerator, which raises where there is none.

        Raises:
            Exception: As `receive_weights`.
            ValueError: `update_info` has something else than a version.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: MoeCommUpdateInfo) -> None:
        """Take a whole version, and serve it. Collective with trainers.

        Raises:
            CommunicationError: A rank is gone or did not come. vLLM's `init_weight_transfer_engine`
                joins again.
            RefitError, ValueError: As `RefitWorld.refit`; the version before is served.
            RuntimeError: There is no world, or the update is abandoned.
        """
        if update_info.abandon:
            raise RuntimeError(f"the update was abandoned: {self._version!r} is served")
        world = self._require_world()
        if any(world.gather(False)):
            self._describe(world)
        self._version = world.refit(update_info.version)
        self._has_come = True

    def finish_weight_update(self) -> None:
        """End an update.

        Raises:
            RuntimeError: Nothing has come in it; vLLM still has it open, and takes an update.
        """
        if not self._has_come:
            raise RuntimeError(
                f"no version has come since start_weight_update: {self._version!r} is served; "
                "call update_weights"
            )

    def shutdown(self) -> None:
        """Leave the world, and free the second model. What is served stays."""
        self._leave()
        self._model = None

    def _leave(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.close()

    def _require_world(self) -> RefitWorld:
        if self._world is None:
            raise RuntimeError("this worker has no trainers: call init_weight_transfer_engine")
        return self._world


class MoeCommTrainerWeightTransferEngine(class_of(_base, "TrainerWeightTransferEngine")):  # type: ignore[misc]
    """A trainer rank's end: a trainer of a `RefitWorld`. Rank 0 calls vLLM by the client.

    Made by `trainer_init` on every trainer rank.

    Args:
        client: Client of vLLM; called on rank 0 alone.
        source: Weights that this rank holds, see `trainer_weights`.
        is_sender: Whether this is rank 0.
    """

    init_info_cls = MoeCommTrainerInitInfo

    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._info: MoeCommTrainerInitInfo
        self._world: RefitWorld | None = None
        self._weights: TrainerWeights | None = None
        self._told: dict[str, TensorSpec] | None = None
        self._is_lost = False

    @classmethod
    def trainer_init(
        cls, init_info: MoeCommTrainerInitInfo, *, client: Any, source: Any = None
    ) -> MoeCommTrainerWeightTransferEngine:
        """Join the world with vLLM's workers, and plan. Collective over trainers and workers.

        Raises:
            CommunicationError: A rank is gone or did not come; its role and rank are named.
            TypeError: `source` is nothing that `trainer_weights` takes.
            ValueError: vLLM's loader does not want what the trainers have: the tensor is named. Or the
                client failed, as rank 0 says.
        """
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine._info = init_info
        engine._connect()
        return engine

    def _connect(self) -> None:
        """Join the world, for the first time or again. Collective."""
        worker_info = dataclasses.asdict(self._info.for_worker())
        is_joined = threading.Event()

        def ask() -> None:
            try:
                self.client.init_weight_transfer_engine(worker_info)
            except Exception as error:
                # The workers of a vLLM that has heard of it join, or say there what is wrong.
                if not is_joined.wait(_GRACE_S):
                    self._refuse(f"vLLM was not asked to join: {first_line(error)}")
                raise

        def join() -> None:
            if self._world is None:
                limits: dict[str, Any] = self._info.for_worker().limits()
                self._world = RefitWorld.join(
                    self._info.world, "trainer", self._info.rank, **limits
                )
            else:
                self._world.rejoin(self._info.timeout_s)
            is_joined.set()
            self._describe(self._world)

        try:
            self._beside(ask, join)
        except BaseException:
            self._is_lost = True
            self._leave()
            raise
        self._is_lost = False

    def _refuse(self, why: str) -> None:
        """Tell all that wait for this world's ranks."""
        RefitWorld.refuse(self._info.world, "trainer", self._info.rank, why, timeout_s=_GRACE_S)

    def _beside(
        self, ask: Callable[[], object], take_part: Callable[[], None]
    ) -> BaseException | None:
        """Take part in the world, while rank 0 also asks vLLM to.

        Returns:
            Error that the client raised; None for none. Workers have done all the same what they were asked,
            since all of them took part: after an error vLLM takes what its other workers answered for their
            answers to the next calls.
        """
        if not self.is_sender:
            take_part()
            return None
        pool = concurrent.futures.ThreadPoolExecutor(1, "moe_comm client")
        asked = pool.submit(ask)
        pool.shutdown(wait=False)
        try:
            take_part()
        except BaseException:
            # So that the next call of the client finds this one ended.
            concurrent.futures.wait([asked], _GRACE_S)
            raise
        return asked.exception()

    def _describe(self, world: RefitWorld) -> None:
        """Tell what this rank holds, and plan for it. Collective."""
        problem = FirstError()
        tensors: dict[str, TensorSpec] = {}
        # Also where this fails: a refit by the plan before would bring other tensors than there are.
        self._told = None
        with problem:
            if self._weights is None:
                num_trainers = int(self._info.world["num_trainers"])
                self._weights = trainer_weights(self.source, self._info.rank, num_trainers)
            tensors = dict(self._weights.tensors())
        world.gather([(name, *spec) for name, spec in tensors.items()], problem.take())
        world.gather(None)
        assert self._weights is not None
        world.prepare(self._weights.side, verify=self._info.verify)
        self._told = tensors

    def send_weights(self, version: Version | None = None) -> Version:
        """Bring the weights as they are now to all workers, which serve them. Collective, on every trainer rank.

        After a `CommunicationError` the next call joins again first, with workers that live or have been
        started anew.

        Args:
            version: Version of the weights, equal on all trainers; None for one more than the highest that a
                worker holds.

        Returns:
            The version.

        Raises:
            CommunicationError: A rank is gone or did not come; its role and rank are named.
            RefitError, ValueError: As `RefitWorld.refit`; the version before is served. Or the source yields
                something else than its metadata says; the tensor is named.
            RuntimeError: After `shutdown`.
        """
        if self._is_lost:
            self._connect()
        world = self._world
        if world is None:
            raise RuntimeError("send_weights after shutdown")
        if version is None:
            held = [each for each in world.versions().values() if isinstance(each, int)]
            version = max(held, default=0) + 1
        named: Version = version
        if self.is_sender:
            try:
                self._start()
            except BaseException:
                # The other trainers hear of it; the workers are not in it.
                self._is_lost = True
                world.close()
                raise
        try:
            failed = self._beside(
                lambda: self.client.update_weights({"version": named}),
                lambda: self._refit(world, named),
            )
        except CommunicationError:
            self._is_lost = True
            raise
        if self.is_sender:
            try:
                self.client.finish_weight_update(weight_version=str(named))
            except Exception as error:
                raise (failed or error) from error
        return named

    def _start(self) -> None:
        """Have vLLM begin an update, after one that a trainer began and did not end, too."""
        for _ in range(_MOST_STARTS - 1):
            with contextlib.suppress(Exception):  # whatever the client raises; the last is raised
                self.client.start_weight_update()
                return
            with contextlib.suppress(Exception):  # which it always raises
                self.client.update_weights({"abandon": True})
        self.client.start_weight_update()

    def _refit(self, world: RefitWorld, version: Version) -> None:
        """Take part in a refit. Collective."""
        problem = FirstError()
        is_changed = False
        weights = self._weights
        assert weights is not None
        with problem:
            tensors = weights.tensors()
            is_changed = self._told is None or list(tensors.items()) != list(self._told.items())
            weights.refresh()
        if any(world.gather(is_changed, problem.take())):
            self._describe(world)
        world.refit(version)

    def shutdown(self) -> None:
        """Leave the world. What vLLM serves stays."""
        self._is_lost = False
        self._leave()

    def _leave(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.close()


def _checkpoint_of(told: list[Any]) -> dict[str, TensorSpec]:
    """Put together what trainers hold.

    Args:
        told: Name, shape and dtype of every tensor, per rank; empty for an engine.

    Raises:
        ValueError: Two ranks say different things of one tensor, or no rank has any.
    """
    checkpoint: dict[str, TensorSpec] = {}
    first: dict[str, int] = {}
    for rank, its in enumerate(told):
        for name, *said in its:
            spec = TensorSpec(*said)
            known = checkpoint.setdefault(name, spec)
            if known != spec:
                raise ValueError(
                    f"{name}: is {known} on trainer {first[name]}, and {spec} on trainer {rank}"
                )
            first.setdefault(name, rank)
    if not checkpoint:
        raise ValueError("no trainer has a tensor")
    return checkpoint

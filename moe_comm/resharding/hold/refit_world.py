"""Refits between trainers and engines that are processes of different programs."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from moe_comm._version import __version__
from moe_comm.arguments import as_int, check_bool, shown, text_of
from moe_comm.errors import CommunicationError, PeerFailedError, RefitError
from moe_comm.peers.agree import FirstError, agree, first_line, raise_together, raise_unequal
from moe_comm.peers.communicator import Communicator
from moe_comm.peers.gather_objects import gather_objects
from moe_comm.peers.missed_calls import tells_peers
from moe_comm.peers.peer_timeouts import (
    ARRIVAL_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    STALL_TIMEOUT_S,
)
from moe_comm.peers.role_rendezvous import Place, RoleHost, RoleRank, places_of
from moe_comm.peers.survivors import MESSAGE_BYTES, SocketRanks
from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.copy_services.gloo_copy_service import GlooCopyService
from moe_comm.resharding.copy_services.process_group import all_gather_bytes, failure_of
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.resharding.hold.deltas import Changed, DeltaReport
from moe_comm.resharding.hold.heap_parameters import SharedWeights, share_in_place
from moe_comm.resharding.hold.held_versions import Held, HeldVersions, RefitTarget, Version
from moe_comm.resharding.hold.refit import Refit
from moe_comm.resharding.hold.refit_models import unwrap_models

Role = Literal["trainer", "engine"]
_TRANSPORTS = ("auto", "symmetric", "gloo")
_OPTIONS = ("transform", "verify", "strict", "deltas", "execution_batch_bytes")
_CPU = torch.device("cpu")


class _WorldRanks:
    """All ranks as a bootstrap that outlives generations: plans are kept by it."""

    def __init__(self) -> None:
        self.rank_idx = -1
        self.num_ranks = 0
        self.communicator: Communicator | None = None
        self.process_group: dist.ProcessGroup | None = None

    def all_gather(self, item: Any, step: str = "all_gather") -> list[Any]:
        """Every rank's `item`, plain data, in rank order. Collective.

        Raises:
            CommunicationError: A rank is gone or did not come.
            ValueError: Some rank is in another `step`, over the heap; on every rank.
        """
        exchange = functools.partial(self._exchange, step)
        return gather_objects(exchange, item, piece_bytes=MESSAGE_BYTES)

    def _exchange(self, step: str, payload: bytes) -> list[bytes]:
        if self.communicator is not None:
            return self.communicator.exchange(step, payload)
        group = self.process_group
        if group is None:
            raise PeerFailedError("this rank has left the world", operation="refit")
        try:
            return all_gather_bytes(group, _CPU, payload)
        except RuntimeError as error:
            what = "the ranks of a world could not speak to each other"
            raise failure_of(group, what, error, operation="refit", phase="rows") from error

    def leave(self) -> None:
        """Leave this generation. Local, idempotent."""
        communicator, self.communicator, self.process_group = self.communicator, None, None
        if communicator is not None:
            communicator.destroy()


class RefitHost:
    """The rendezvous of a world, in whichever process shall outlive the others. Made by `RefitWorld.host`.

    Attributes:
        info: Information that everybody gives to `RefitWorld.join`, of texts and numbers that JSON carries.
            It has the key of the world: whoever knows it can become a rank.
    """

    def __init__(self, ranks: RoleHost, transport: str) -> None:
        self._ranks = ranks
        self.info: dict[str, str | int] = {
            "address": ranks.address,
            "key": ranks.key,
            "num_trainers": ranks.roles["trainer"],
            "num_engines": ranks.roles["engine"],
            "transport": transport,
        }

    def refuse(self, why: str) -> None:
        """Raise `why` as a ValueError in all that wait in `join`, and in all that come until `close`."""
        self._ranks.refuse(why)

    def close(self) -> None:
        """Let nobody join any more; a world that is there goes on. Idempotent."""
        self._ranks.close()

    def __enter__(self) -> RefitHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reject_refit(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell peers, who are in a refit."""
    world = args[0]
    with world._together("refit"):
        world._meet("refit", FirstError(error), {})


class RefitWorld:
    """Trainers and engines, each of a program of its own, as the ranks of refits.

    Ranks of the group are the trainers, then the engines. Neither side needs a process group of
    torch.distributed, and none that is there is touched. Made by `join`; every call below that is
    collective is one of all trainers and engines.

    Attributes:
        role: "trainer" or "engine".
        rank: Rank within the role.
        rank_idx: Rank in the group.
        generation: Number of times that ranks have been assembled, this one included.
        transport: "symmetric" or "gloo".
        service: The copy service of this generation.

    Example:
        # trainer r of 4
        world = RefitWorld.join(info, "trainer", r)
        world.prepare(model)
        world.refit(step)
        # engine r of 2
        world = RefitWorld.join(info, "engine", r)
        world.prepare(model)
        version = world.refit()
    """

    service: CopyService

    @staticmethod
    def host(
        address: str,
        *,
        num_trainers: int,
        num_engines: int,
        key: str | None = None,
        transport: str = "auto",
    ) -> RefitHost:
        """Listen for the ranks of a world. Local.

        Args:
            address: "host:port" of the interface of this machine at which to listen, and no other; port
                0 for any that is free.
            num_trainers: Processes that hold a part of the source, >= 1.
            num_engines: Processes that hold a part of a target, >= 1.
            key: Secret of the world; None for a random one.
            transport: "symmetric" (one machine), "gloo" (any), or "auto": symmetric where all ranks are
                on one machine.

        Raises:
            OSError: This process cannot listen there.
            ValueError: An argument breaks a rule above.
        """
        if transport not in _TRANSPORTS:
            raise ValueError(f"transport must be one of {_TRANSPORTS}, got {transport!r}")
        return RefitHost(
            RoleHost(address, {"trainer": num_trainers, "engine": num_engines}, __version__, key),
            transport,
        )

    @classmethod
    def join(
        cls,
        info: Mapping[str, Any],
        role: Role,
        rank: int,
        *,
        version: Version | None = None,
        timeout_s: float = CONNECT_TIMEOUT_S,
        arrival_timeout_s: float = ARRIVAL_TIMEOUT_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> RefitWorld:
        """Become a rank of a world, for the first time or after a restart. Collective.

        Args:
            info: `info` of the host.
            role: "trainer" or "engine".
            rank: Rank within the role.
            version: Version that an engine holds already; None for none.
            timeout_s: Limit for all ranks to come, and for each step after that.
            arrival_timeout_s: Limit for a living rank that does not enter a refit that others are in.
            stall_timeout_s: Limit for a rank that entered one and stopped; over gloo the limit of both
                is `arrival_timeout_s`.

        Raises:
            PeerFailedError: A rank died on the way, or the host has gone.
            PeerTimeoutError: Not everybody came in time; who is missing is named, on every rank.
            ValueError: An argument is wrong, or the sizes, the key, the place or the package's version
                of some rank do not fit the host's; on every rank that waits.
        """
        world = cls()
        world._take(info, role, rank)
        for name, seconds in (
            ("timeout_s", timeout_s),
            ("arrival_timeout_s", arrival_timeout_s),
            ("stall_timeout_s", stall_timeout_s),
        ):
            if isinstance(seconds, bool) or not seconds > 0.0:
                raise ValueError(f"{name} must be > 0, got {seconds}")
        world._limits = {
            "arrival_timeout_s": arrival_timeout_s,
            "stall_timeout_s": stall_timeout_s,
        }
        if version is not None:
            _check_version(version)
            if role != "engine":
                raise ValueError(f"version is what an engine holds, got {version!r} of a {role}")
        world._held.own = Held(version)
        world._assemble(timeout_s)
        return world

    @classmethod
    def refuse(
        cls,
        info: Mapping[str, Any],
        role: Role,
        rank: int,
        why: str,
        *,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """Tell all that wait in `join` or `rejoin`, and those of this role that come soon, that nothing comes of it.

        Not collective.

        Args:
            info: `info` of the host.
            role: As of `join`.
            rank: Rank within the role.
            why: Message of the ValueError that they raise.
            timeout_s: Limit for the host to answer.

        Raises:
            PeerFailedError, PeerTimeoutError: The host has gone, or does not answer.
        """
        world = cls()
        world._take(info, role, rank)
        with contextlib.suppress(ValueError):  # this process hears it, too
            RoleRank(
                world._address,
                world._key,
                world._roles,
                (role, rank),
                timeout_s,
                __version__,
                refusal=why or "no reason",
            )

    def __init__(self) -> None:
        self._ranks = _WorldRanks()
        self._models: tuple[Any, Any] | None = None
        self._options: dict[str, Any] = {}
        self._refit: Refit | None = None
        self._is_planned = False
        self._shares_memory = False
        self._shared: SharedWeights | None = None
        self._limits: dict[str, Any] = {}
        self._held = HeldVersions()
        self._all_raise = False  # what ends the collective call that this rank is in
        self.generation = 0

    def _take(self, info: Mapping[str, Any], role: Role, rank: int) -> None:
        try:
            self._address, self._key = str(info["address"]), str(info["key"])
            self._roles = {
                "trainer": as_int("num_trainers", info["num_trainers"], 1),
                "engine": as_int("num_engines", info["num_engines"], 1),
            }
            self._asked_transport = info.get("transport", "auto")
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"info must be the dictionary of RefitWorld.host ({type(error).__name__}: {error})"
            ) from error
        if self._asked_transport not in _TRANSPORTS:
            raise ValueError(
                f"transport must be one of {_TRANSPORTS}, got {self._asked_transport!r}"
            )
        if role not in self._roles:
            raise ValueError(f'role must be "trainer" or "engine", got {role!r}')
        self.role = role
        self.rank = as_int("rank", rank)
        self._places = places_of(self._roles)

    @property
    def rank_idx(self) -> int:
        """This rank in the group."""
        return self._ranks.rank_idx

    @property
    def num_ranks(self) -> int:
        """Trainers and engines."""
        return len(self._places)

    @property
    def last_delta(self) -> DeltaReport | None:
        """Numbers of the last refit with deltas; None before it."""
        return None if self._refit is None else self._refit.last_delta

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Group of all ranks over Gloo, not torch.distributed's; None over shared memory or after `close`."""
        return self._ranks.process_group

    def rejoin(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Go on in a new generation, with those who live and those started anew. Collective.

        After a refit has raised a `CommunicationError`, every rank that lives calls this, and a process
        in the place of one that does not calls `join`. Models and plans stay: the next refit plans anew
        only where a rank has come that has no plan.

        Args:
            timeout_s: As of `join`.

        Raises:
            NotImplementedError: The world is over gloo, which does not tell every rank of a death.
            PeerFailedError, PeerTimeoutError, ValueError: As `join`; this rank may call it again.
        """
        if self.transport == "gloo":
            raise NotImplementedError(
                f"rejoin: {self.role} {self.rank} is of a world over gloo, where ranks that live need not "
                "hear of a death; end all its processes, start them anew and have them join"
            )
        self._assemble(timeout_s)

    def _assemble(self, timeout_s: float) -> None:
        """Become a rank of the next generation. Collective."""
        place: Place = (self.role, self.rank)
        with RoleRank(
            self._address, self._key, self._roles, place, timeout_s, __version__
        ) as joining:
            # Only now: everybody has left the generation before, and hears of nothing else.
            self._leave()
            transport = self._asked_transport
            if transport == "auto":
                transport = "symmetric" if joining.is_one_machine else "gloo"
            self._ranks.rank_idx, self._ranks.num_ranks = joining.rank_idx, joining.num_ranks
            agree(joining.all_gather, self._problem_with(transport, joining))
            self.transport = transport
            if transport == "symmetric":
                self._connect_heap(joining)
            else:
                self._connect_sockets(joining)
            self._hear(joining.all_gather(dataclasses.astuple(self._held.own)))
        self.generation = joining.generation
        self._is_planned = False

    @staticmethod
    def _problem_with(transport: str, joining: RoleRank) -> str | None:
        if transport == "symmetric" and not joining.is_one_machine:
            return "transport symmetric needs all ranks on one machine, and they are on several"
        return None

    def _connect_heap(self, joining: RoleRank) -> None:
        communicator = Communicator(
            joining, num_local_ranks=joining.num_ranks, backend="host", **self._limits
        )
        try:
            communicator.all_gather(b"")
            communicator.bootstrap = SocketRanks(communicator.require_native())
            self.service = SymmetricCopyService(communicator=communicator)
        except BaseException:
            communicator.destroy()
            raise
        self._ranks.communicator = communicator

    def _connect_sockets(self, joining: RoleRank) -> None:
        store = dist.PrefixStore("gloo", joining.store)  # type: ignore[attr-defined]
        timeout = dt.timedelta(seconds=self._limits["arrival_timeout_s"])
        group = dist.ProcessGroup(store, joining.rank_idx, joining.num_ranks)
        backend = dist.ProcessGroupGloo(store, joining.rank_idx, joining.num_ranks, timeout=timeout)
        group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, backend)
        self._ranks.process_group = group
        self.service = GlooCopyService(group)

    def _leave(self) -> None:
        with contextlib.ExitStack() as leaving:
            leaving.callback(self._ranks.leave)
            service = self.__dict__.pop("service", None)
            if service is not None:
                leaving.callback(service.close)
            self._unshare()

    def _unshare(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()

    def close(self) -> None:
        """Leave the world; the other ranks hear of it in their next refit. Idempotent."""
        self._leave()
        self._refit = None

    def __enter__(self) -> RefitWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(
        self,
        model: Any,
        target: RefitTarget | None = None,
        *,
        shares_memory: bool = False,
        **options: Any,
    ) -> None:
        """Plan refits between the models of all ranks. Collective.

        Args:
            model: Part that this rank holds: of the source on a trainer, of the target on an engine.
            target: Hooks of an engine that are called around each refit; None where `model` itself is served,
                which a refit that fails in the middle leaves without a whole version; stale while one runs.
            shares_memory: Whether, on an engine, `model` is shared by `share_in_place`, in every generation,
                until this world is closed.
            options: `transform`, `verify`, `strict`, `deltas`, `execution_batch_bytes` of `Refit`.

        Raises:
            CommunicationError: A rank is gone or did not come; its role and rank are named.
            TypeError, ValueError, RuntimeError: As `Refit`, on every rank.
        """
        problem = FirstError()
        with problem:
            unknown = sorted(set(options) - set(_OPTIONS))
            if unknown:
                raise TypeError(f"prepare takes {', '.join(_OPTIONS)} of Refit, got {unknown}")
            if target is not None and self.role != "engine":
                raise ValueError(f"target is for engines, got one on {self.role} {self.rank}")
            if shares_memory and (self.role != "engine" or self.transport != "symmetric"):
                raise ValueError(
                    f"shares_memory is for engines over symmetric, got it on {self.role} {self.rank} over "
                    f"{self.transport}"
                )
            for name in ("begin", "commit", "abort"):
                if target is not None and not callable(getattr(target, name, None)):
                    raise TypeError(f"target must have {name}(), got {shown(target)}")
        self._models = (model, None) if self.role == "trainer" else (None, model)
        self._held.take(target, model)
        self._options = options
        self._shares_memory = shares_memory
        self._unshare()
        self._refit, self._is_planned = None, False
        with self._together("prepare"):
            self._plan(problem)

    def gather(self, item: Any, error: Exception | None = None) -> list[Any]:
        """Every rank's `item`, plain data, in rank order. Collective.

        Args:
            item: Plain data of this rank.
            error: Error of this rank, which every rank raises instead; None for none.

        Raises:
            CommunicationError: A rank is gone or did not come; its role and rank are named.
            ValueError: Ranks are in different calls.
            Exception: Some rank's `error`.
        """
        with self._together("gather"):
            return self._meet("gather", FirstError(error), item)

    def _plan(self, problem: FirstError) -> None:
        """Make the refit of this generation. Collective."""
        assert self._models is not None
        with problem:
            if (
                self._shares_memory
                and self._shared is None
                and self._ranks.communicator is not None
            ):
                self._shared = share_in_place(self._models[1], self._ranks.communicator)
        self._meet("prepare", problem, {})
        with problem, self._naming_places():
            self._refit = Refit(
                *self._models,
                self.service,
                self._ranks,
                dst_rank_offset=self._roles["trainer"],
                **self._options,
            )
        self._vote("planned", problem)
        self._is_planned = True

    @tells_peers(_reject_refit)
    def refit(
        self,
        version: Version | None = None,
        *,
        allow_older: bool = False,
        changed: Changed | None = None,
    ) -> Version:
        """Bring the trainers' weights as they are now to all engines. Collective, blocking.

        In two phases: when every rank has sent and received all of it (and compared checksums, with
        `verify="checksum"`), engines commit; else they abort, and every rank raises.

        Args:
            version: Version of the weights; equal on all trainers, needless on engines.
            allow_older: Whether a lower int than an engine holds is no mistake; equal on all trainers.
            changed: Tensors that may have changed, on a trainer with deltas, as of `Refit.run`.

        Returns:
            The version, on every rank.

        Raises:
            CommunicationError: A rank is gone or did not come, or it is this one that has ended the
                call by itself, and left; its role and rank are named. Those that live call `rejoin`.
            RefitError: An engine did not commit; the message says who holds which version. Or checksums
                differ.
            ValueError: The version is older than one that an engine holds, or ranks ask for different
                ones; before anything moves. Or as `Refit.run`.
        """
        with self._together("refit"):
            return self._run(version, allow_older, changed)

    def _run(self, version: Version | None, allow_older: bool, changed: Changed | None) -> Version:
        problem = FirstError()
        if not self._is_planned and self._models is not None and "service" in self.__dict__:
            self._plan(FirstError())
        with problem:
            if self._models is None or "service" not in self.__dict__:
                raise ValueError("refit: call prepare() first, and nothing after close()")
            check_bool("allow_older", allow_older)
            if version is not None or self.role == "trainer":
                _check_version(version)
        wish = {"version": version, "allow_older": allow_older if self.role == "trainer" else None}
        wishes = self._meet("refit", problem, wish)
        with self._all_raising():
            agreed = self._agree_on_version(wishes)
        is_engine = self.role == "engine"
        with problem:
            if is_engine:
                self._held.target.begin(agreed)
        try:
            self._vote("begun", problem)
            with problem, self._naming_places():
                assert self._refit is not None
                self._refit.run(changed=changed)
            self._vote("moved", problem)
        except BaseException as error:
            if is_engine:
                self._abort(f"a refit to {agreed!r} failed: {error}", self._held.own)
            if self._all_raise:
                self._gather_held()
            raise
        self._commit(agreed)
        return agreed

    @contextlib.contextmanager
    def _together(self, call: str) -> Iterator[None]:
        """Leave the generation where a collective call ends on this rank alone: others wait for it there."""
        self._all_raise = False
        try:
            yield
        except CommunicationError:
            raise
        except BaseException as error:
            if self._all_raise:
                raise
            self._leave()
            if not isinstance(error, Exception):
                raise
            raise PeerFailedError(
                f"{self.role} {self.rank} ended {call} by itself and has left: {first_line(error)}",
                ranks=(self.rank_idx,),
                operation=call,
            ) from error

    @contextlib.contextmanager
    def _all_raising(self) -> Iterator[None]:
        """Conclusion from what every rank has heard: its ValueErrors are raised on all."""
        try:
            yield
        except ValueError:
            self._all_raise = True
            raise

    def _tell(self, step: str, problem: FirstError, mine: Any = None) -> list[tuple[Any, Any]]:
        """Errors and reports of all ranks, in the same step of a call. Collective."""
        told = self._ranks.all_gather((problem.error, mine), step)
        self._all_raise = any(error is not None for error, _ in told)
        return told

    def _vote(self, step: str, problem: FirstError) -> None:
        """Raise on every rank what `problem` is on any. Collective."""
        if isinstance(problem.error, CommunicationError):
            problem.raise_own()
        try:
            with self._naming_places(problem):
                told = self._tell(step, problem)
        except ValueError:  # the others are elsewhere: what led to that tells more
            problem.raise_own()
            raise
        errors = [error for error, _ in told]
        if None not in errors:  # every rank has said it before
            problem.raise_own()
        raise_together(errors, problem.error)

    def _commit(self, version: Version) -> None:
        before, problem = self._held.own, FirstError()
        if self.role == "engine":
            with problem:
                self._held.commit(version)
        own = None if problem.error is None else text_of(problem.error)
        try:
            with self._naming_places():
                told = self._ranks.all_gather(own, "committed")
        except CommunicationError as error:
            if own is not None:  # nobody will say what comes of it: a half is not kept
                self._abort(f"a commit of {version!r} failed: {own}; {error}", before)
            raise
        failed = {rank: why for rank, why in enumerate(told) if why is not None}
        self._all_raise = bool(failed)
        if failed and self.role == "engine":
            why = "; ".join(failed.values())
            committed = self._held.own
            self._abort(f"a commit of {version!r} failed: {why}", before, keeps=committed)
        self._gather_held()
        if failed:
            reasons = "; ".join(f"{self._name_of(rank)}: {why}" for rank, why in failed.items())
            raise RefitError(
                f"version {version!r} was not committed by all: {reasons}. Held now: {self._held.text()}",
                ranks=tuple(failed),
            )

    def _abort(self, why: str, before: Held, keeps: Held | None = None) -> None:
        model = None if self._models is None else unwrap_models(None, self._models[1]).target
        self._held.abort(why, before, model, keeps)

    def _gather_held(self) -> None:
        """Hear what engines hold. Collective, also on ranks that are about to raise."""
        self._all_raise, all_raise = False, self._all_raise
        with self._naming_places():
            self._hear(self._ranks.all_gather(dataclasses.astuple(self._held.own), "held"))
        self._all_raise = all_raise

    def _hear(self, told: list[Any]) -> None:
        first = self._roles["trainer"]
        self._held.by_rank = {rank: Held(*said) for rank, said in enumerate(told[first:])}

    def versions(self) -> dict[int, Version | None]:
        """By rank of the engine, the version that it holds, as of the last collective call. Local.

        None for an engine that holds no whole version, or none of this world.
        """
        return self._held.whole()

    def stale_engines(self) -> dict[int, str]:
        """By rank, why an engine does not hold the newest version, as of the last collective call. Local."""
        return self._held.stale()

    def _agree_on_version(self, wishes: list[dict[str, Any]]) -> Version:
        """The version of a refit; the same on every rank, or all raise."""
        said = [(rank, wish) for rank, wish in enumerate(wishes) if wish["version"] is not None]
        version: Version = wishes[0]["version"]
        for rank, wish in said:
            if wish["version"] != version:
                raise ValueError(
                    f"ranks ask for different versions: {self._name_of(0)} for {version!r}, "
                    f"{self._name_of(rank)} for {wish['version']!r}"
                )
        allowed = {wish["allow_older"] for wish in wishes} - {None}
        if len(allowed) > 1:
            raise ValueError("trainers differ in allow_older: it is True on some, False on others")
        for rank, held in self.versions().items():
            is_older = isinstance(held, int) and isinstance(version, int) and version < held
            if is_older and allowed == {False}:
                raise ValueError(
                    f"version {version} is older than {held}, which engine {rank} holds "
                    "(allow_older=True brings it back)"
                )
        return version

    def _meet(self, call: str, problem: FirstError, wish: Any) -> list[Any]:
        """Tell each other who calls what; hear what engines hold. Collective."""
        if self._ranks.num_ranks == 0 or "service" not in self.__dict__:
            self._all_raise = True
            problem.raise_own()
            raise ValueError(f"{call}: this rank has left the world; rejoin() brings it back")
        with self._naming_places():
            said = (call, *dataclasses.astuple(self._held.own), wish)
            gathered = self._tell("meet", problem, said)
        raise_together([error for error, _ in gathered], problem.error)
        told = [its for _, its in gathered]
        with self._all_raising():
            raise_unequal("ranks are in different calls", [said[0] for said in told])
        self._hear([said[1:3] for said in told])
        return [said[3] for said in told]

    def _name_of(self, rank_idx: int) -> str:
        role, rank = self._places[rank_idx]
        return f"{role} {rank}"

    @contextlib.contextmanager
    def _naming_places(self, problem: FirstError | None = None) -> Iterator[None]:
        """Say of the ranks of an error who they are, and what was wrong on this one."""
        try:
            yield
        except CommunicationError as error:
            who = ", ".join(f"rank {rank} is {self._name_of(rank)}" for rank in error.ranks)
            text = f"{error} ({who})" if who else str(error)
            if problem is not None and problem.error is not None:
                text += f"; {self.role} {self.rank} had failed: {first_line(problem.error)}"
            raise type(error)(
                text,
                ranks=error.ranks,
                operation=error.operation,
                phase=error.phase,
                epoch=error.epoch,
            ) from error


def _check_version(version: object) -> None:
    if isinstance(version, bool) or not isinstance(version, int | str):
        raise TypeError(f"version must be an int or a text, got {shown(version)}")

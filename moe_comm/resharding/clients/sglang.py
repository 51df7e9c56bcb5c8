"""Weights of a trainer in SGLang's servers, by its custom loader: the loader, and the trainer's end.

Neither imports SGLang, whose servers are started with `--custom-weight-loader` and the path in `LOADER`.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import json
import logging
import pickle
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from moe_comm.arguments import as_int
from moe_comm.peers.agree import FirstError, first_line
from moe_comm.resharding.clients.tensor_stream import OutgoingTensors, StreamError, TensorStream
from moe_comm.resharding.describe.loader_views import TensorSpec, loader_views
from moe_comm.resharding.hold.refit_world import RefitHost, RefitWorld, Role

__all__ = ["LOADER", "SglangStream", "load", "own_address"]

LOADER = "moe_comm.resharding.clients.sglang.load"
"""Path of `load`, as SGLang takes it."""
_GRACE_S = 10.0
"""So long a request that was posted may go on when its version has failed."""
_logger = logging.getLogger(__name__)


def own_address() -> str:
    """Return "host:port" of this machine by its host name, with any free port."""
    return f"{socket.gethostbyname(socket.gethostname())}:0"


class SglangStream:
    """The trainer's end: full tensors by name to the ranks of SGLang's servers, as whole versions.

    Used by one process. For a version, `send`; or `begin`, `add` each tensor, `end`. SGLang's own session is
    around it (`/pause_generation`, `/begin_weight_update`; `/end_weight_update`, `/continue_generation`).
    Every rank serves the version, or the one before and this end raises; the next one works.

    Args:
        address: "host:port" of this machine at which ranks find this process; port 0 for any, a new one
            for each version.
        num_ranks: Ranks of tensor parallelism of each server; its ranks take all tensors, and keep
            what SGLang's loader keeps there.
        post: Callable that gets the number of a server and a body, posts it to its
            `/update_weights_from_tensor` and returns what came back. Runs in a thread of its own.
        bucket_bytes: As of `TensorStream`.
        timeout_s: Limit of every wait.
        is_checked: Whether a version is refused that lacks a tensor of the model, by SGLang's loader
            recorded (`loader_views`). False for a loader that computes with what it loads.
    """

    def __init__(
        self,
        address: str,
        num_ranks: Sequence[int],
        post: Callable[[int, dict[str, Any]], object],
        *,
        bucket_bytes: int = 256 << 20,
        timeout_s: float = 300.0,
        is_checked: bool = True,
    ) -> None:
        self._num_ranks = [as_int("num_ranks", each, 1) for each in num_ranks]
        self._post = post
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._is_checked = is_checked
        self._address = address
        self._host: RefitHost | None = None
        self._world: RefitWorld | None = None
        self._outgoing: OutgoingTensors | None = None
        self._posted: list[concurrent.futures.Future[None]] = []

    def send(self, named: Iterable[tuple[str, torch.Tensor]], version: str) -> int:
        """Send a version, and return the number of bytes of its tensors.

        All tensors are taken, also where it fails: other ranks of the trainer take part in making each.

        Raises:
            StreamError: A rank is gone.
            ValueError, NotImplementedError: The model of a rank lacks a tensor, or has no place for
                one, which is named.
            Exception: Error that the loader of a rank raises, as `agree` brings it to other ranks.
            CommunicationError: Not everybody came.
            RuntimeError: A server refused the request.
            Exception: Error that `named` raises.
        """
        rest = iter(named)
        try:
            self.begin(version)
            for name, tensor in rest:
                self.add(name, tensor)
            return self.end()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            for _ in rest:
                pass

    def begin(self, version: str) -> None:
        """Have all ranks wait for a version. Errors are those of `send`; `fail` then ends it."""
        self.fail(RuntimeError("the trainer began another version"))
        # Anew for each: a server that has been started in the place of another one is among its ranks.
        host = self._host = RefitWorld.host(
            self._address, num_trainers=1, num_engines=sum(self._num_ranks), transport="gloo"
        )
        pool = concurrent.futures.ThreadPoolExecutor(len(self._num_ranks), "moe_comm SGLang")
        self._posted = [
            pool.submit(self._ask, server, version, host) for server in range(len(self._num_ranks))
        ]
        pool.shutdown(wait=False)
        try:
            self._world = _join(host.info, "trainer", 0, self._timeout_s)
        except BaseException as error:
            host.refuse(f"the trainer gave up: {first_line(error)}")
            self._leave()
            raise
        stream = TensorStream(self._world.process_group, self._bucket_bytes)
        self._outgoing = stream.begin(version)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Send a tensor of the version, which may change again when this has returned."""
        self._begun()[0].add(name, tensor)

    def end(self) -> int:
        """Return the number of bytes, once every rank serves the version."""
        outgoing, world = self._begun()
        self._outgoing = None
        num_bytes = outgoing.end()
        world.gather(None)
        for posted in self._posted:
            posted.result(self._timeout_s)
        self._leave()
        return num_bytes

    def fail(self, error: BaseException) -> None:
        """Give up a version that has begun, if one has: the one before is served."""
        outgoing, self._outgoing = self._outgoing, None
        if outgoing is not None and not isinstance(error, StreamError):
            with contextlib.suppress(StreamError):  # those that live hear it so, too
                outgoing.fail(error)
        self._leave()

    def _begun(self) -> tuple[OutgoingTensors, RefitWorld]:
        if self._outgoing is None or self._world is None:
            raise RuntimeError("no version has begun: call begin()")
        return self._outgoing, self._world

    def _leave(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.close()
        posted, self._posted = self._posted, []
        concurrent.futures.wait(posted, _GRACE_S)
        host, self._host = self._host, None
        if host is not None:
            host.close()

    def _body(self, server: int, version: str, info: Mapping[str, Any]) -> dict[str, Any]:
        """Make the body of a request: per rank, in the tensor's place, where to find this process."""
        first = sum(self._num_ranks[:server])
        texts = []
        for rank in range(first, first + self._num_ranks[server]):
            said = {
                "info": info,
                "rank": rank,
                "version": version,
                "has_other_ranks": self._num_ranks[server] > 1,
                "is_checked": self._is_checked,
                "bucket_bytes": self._bucket_bytes,
                "timeout_s": self._timeout_s,
            }
            row = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
            # Pickled plainly it has its bytes with it; shared as between processes it would not leave the host.
            texts.append(base64.b64encode(pickle.dumps([("moe_comm", row)])).decode())
        # Models of drafts load by themselves; SGLang would call the loader for each.
        return {"serialized_named_tensors": texts, "load_format": LOADER, "selector": "target"}

    def _ask(self, server: int, version: str, host: RefitHost) -> None:
        """Post a request; whoever waits for the ranks of a server that refuses it hears why."""
        try:
            answer = self._post(server, self._body(server, version, host.info))
            if isinstance(answer, Mapping) and not answer.get("success", True):
                raise RuntimeError(f"SGLang refused the update: {answer.get('message', answer)}")
        except Exception as error:
            if self._world is None:
                host.refuse(f"server {server} did not take the request: {first_line(error)}")
            raise


def _join(info: Mapping[str, Any], role: Role, rank: int, timeout_s: float) -> RefitWorld:
    return RefitWorld.join(info, role, rank, timeout_s=timeout_s, arrival_timeout_s=timeout_s)


# ---------------------------------------------------------------------------------------------
# In SGLang's processes


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Take a version from a trainer's `SglangStream`; SGLang calls this in every rank.

    SGLang ends the process of a loader that raises. So where the version before is served, whatever
    has failed, the trainer raises, and this only logs.

    Raises:
        RuntimeError: The model holds neither version.
        ValueError: The tensors are none of an `SglangStream`.
    """
    try:
        ((_, row),) = named_tensors
        said = json.loads(bytes(row.tolist()))
        said["info"]["address"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected one tensor of an SglangStream, got {[name for name, _ in named_tensors]}"
        ) from error
    try:
        _take(model, said)
    except _NoVersionError:
        raise
    except Exception:
        _logger.exception("version %s was not taken: the one before is served", said["version"])


class _NoVersionError(RuntimeError):
    """The version before cannot be brought back."""


def _take(model: Any, said: Mapping[str, Any]) -> None:
    """Load a version, or raise with the one before brought back. Collective."""
    specs: dict[str, TensorSpec] = {}

    def noted(
        received: Iterable[tuple[str, torch.Tensor]],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in received:
            specs[name] = TensorSpec.of(tensor)
            yield name, tensor

    with _join(said["info"], "engine", said["rank"], said["timeout_s"]) as world:
        stream = TensorStream(world.process_group, said["bucket_bytes"])
        problem = FirstError()
        before = _Before(model)
        try:
            with contextlib.closing(stream.receive(said["version"])) as received:
                with problem:
                    model.load_weights(noted(received))
                    if (left := next(received, None)) is not None:
                        raise ValueError(f"{left[0]}: the loader stopped before it")
                # The trainer hears of a mistake here with its words, once all has come.
                for _ in received:
                    pass
            if isinstance(problem.error, StreamError):
                problem.raise_own()
            with problem:
                if said["is_checked"] and not problem:
                    _check(model, specs, said["has_other_ranks"])
            world.gather(None, problem.take())
        except BaseException:
            before.bring_back(model)
            raise


def _check(model: Any, specs: dict[str, TensorSpec], has_other_ranks: bool) -> None:
    """Hold what has come against the model's own loader, once for tensors that come again and again."""
    if list(specs.items()) != list(_checked.get(model, {}).items()):
        loader_views(
            model.load_weights,
            specs,
            model.named_parameters(),
            optional=model.named_buffers(),
            other_ranks=has_other_ranks,
        )
        _checked[model] = specs


_checked: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, TensorSpec]]
_checked = weakref.WeakKeyDictionary()
"""By model, what it has loaded."""


class _Before:
    """Parameters and buffers of a model, copied to host memory."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._values = {name: tensor.to("cpu", copy=True) for name, tensor in _tensors(model)}

    def bring_back(self, model: torch.nn.Module) -> None:
        """Write the copies into the model.

        Raises:
            _NoVersionError: A tensor has another shape or dtype, or there is none.
        """
        now = dict(_tensors(model))
        for name, value in self._values.items():
            found = now.get(name)
            was = TensorSpec.of(value)
            if found is None or TensorSpec.of(found) != was:
                has = "nothing" if found is None else TensorSpec.of(found)
                raise _NoVersionError(
                    f"{name}: is {has} after a version that failed, and was {was}: the model holds neither "
                    "version"
                )
            found.copy_(value)


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, tensor.detach()

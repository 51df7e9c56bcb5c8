"""Versions for SGLang's servers, whose ranks are threads here and whose models are a module with a loader.

What is SGLang's and miles' own stands in tests/multiprocess/test_refit_clients.py.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import importlib
import pickle
import sys
import types
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm.resharding.clients import sglang

Named = dict[str, torch.Tensor]


class Fused(torch.nn.Module):
    """Part of a model of SGLang that is looked at: a part of the experts, gate and up in one tensor."""

    def __init__(self, experts: range) -> None:
        super().__init__()
        self.experts = experts
        self.w13 = torch.nn.Parameter(torch.zeros(len(experts), 4, 3))
        self.norm = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("bias", torch.zeros(2))
        self.trips_at = ""

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            if name == self.trips_at:
                raise KeyError(name)
            if name in ("norm", "bias"):
                getattr(self, name).data.copy_(tensor)
                continue
            number, half = name.split(".")
            if int(number) in self.experts:
                row = self.w13.data[int(number) - self.experts.start]
                row[0 if half == "gate" else 2 :][:2].copy_(tensor)

    def held(self) -> Named:
        return {name: tensor.clone() for name, tensor in self.state_dict().items()}


def checkpoint(value: float, **changes: torch.Tensor | None) -> Named:
    names = [f"{number}.{half}" for number in range(4) for half in ("gate", "up")]
    named: Named = {name: torch.full((2, 3), value + at) for at, name in enumerate(names)}
    named |= {"norm": torch.full((3,), value), "bias": torch.full((2,), -value)}
    for name, tensor in changes.items():
        named.pop(name.replace("_", "."))
        if tensor is not None:
            named[name.replace("_", ".")] = tensor
    return named


class Servers:
    """Two servers: one of two ranks with half of the experts each, and one of a single rank."""

    def __init__(self, **options: Any) -> None:
        self.models = [[Fused(range(2)), Fused(range(2, 4))], [Fused(range(4))]]
        self.refusal: str | None = None
        self.num_posts = 0
        self.errors: list[BaseException] = []
        self.stream = sglang.SglangStream(
            "127.0.0.1:0", [2, 1], self.post, timeout_s=20, bucket_bytes=64, **options
        )

    def post(self, server: int, body: dict[str, Any]) -> dict[str, Any]:
        assert body.pop("load_format") == "moe_comm.resharding.clients.sglang.load"
        assert body.pop("selector") == "target"
        (texts,) = body.values()
        self.num_posts += 1
        if self.refusal is not None and server == 1:
            return {"success": False, "message": self.refusal}

        def rank(at: int) -> None:
            try:
                sglang.load(self.models[server][at], pickle.loads(base64.b64decode(texts[at])))
            except BaseException as error:  # noqa: BLE001 - SGLang's process would end
                self.errors.append(error)

        with ThreadPoolExecutor(len(texts)) as pool:
            list(pool.map(rank, range(len(texts))))
        return {"success": True, "message": "Success"}

    def held(self) -> list[Named]:
        return [model.held() for models in self.models for model in models]


@pytest.fixture
def servers() -> Servers:
    return Servers()


def assert_served(servers: Servers, named: Named) -> None:
    for models in servers.models:
        for model in models:
            expected = Fused(model.experts)
            expected.load_weights(named.items())
            for name, tensor in expected.held().items():
                assert torch.equal(model.held()[name], tensor), name
    assert servers.errors == []


def test_versions_are_served_by_every_rank(servers: Servers) -> None:
    for version in (1, 2):
        named = checkpoint(100.0 * version)
        sent = servers.stream.send(iter(named.items()), str(version))
        assert sent == sum(tensor.nbytes for tensor in named.values())
        assert_served(servers, named)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"1_up": None}, r"w13\[1:2, 2:4, 0:3\] .*the loader fills it from no tensor"),
        ({"1_up": torch.ones(3, 2)}, "must match the size of tensor"),
        ({"norm": None, "bias": None}, "norm.* the loader fills it from no tensor"),
    ],
)
def test_a_version_that_is_not_the_models_is_refused_whole(
    servers: Servers, changes: dict[str, Any], text: str
) -> None:
    good = checkpoint(1)
    servers.stream.send(good.items(), "1")
    with pytest.raises((ValueError, RuntimeError), match=text):
        servers.stream.send(checkpoint(2, **changes).items(), "2")
    assert_served(servers, good)
    servers.stream.send(checkpoint(3).items(), "3")
    assert_served(servers, checkpoint(3))


def test_an_unchecked_version_may_lack_tensors() -> None:
    servers = Servers(is_checked=False)
    servers.stream.send(checkpoint(2, norm=None).items(), "1")
    assert servers.models[1][0].norm.eq(0).all()
    assert servers.models[1][0].w13.eq(0).any().item() is False


def test_a_loader_that_raises_brings_the_old_version_back_everywhere(servers: Servers) -> None:
    good = checkpoint(1)
    servers.stream.send(good.items(), "1")
    servers.models[0][1].trips_at = "3.gate"
    taken = iter(checkpoint(2).items())
    with pytest.raises(KeyError, match=r"3\.gate"):
        servers.stream.send(taken, "2")
    assert next(taken, None) is None
    assert_served(servers, good)


def test_what_the_trainer_raises_ends_the_version(servers: Servers) -> None:
    good = checkpoint(1)
    servers.stream.send(good.items(), "1")

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(checkpoint(2).items())[:5]
        raise OSError("out of files")

    with pytest.raises(OSError, match="out of files"):
        servers.stream.send(failing(), "2")
    assert_served(servers, good)
    servers.stream.begin("3")
    servers.stream.add("norm", torch.ones(3))
    servers.stream.begin("4")
    assert_served(servers, good)
    for name, tensor in checkpoint(4).items():
        servers.stream.add(name, tensor)
    servers.stream.end()
    assert_served(servers, checkpoint(4))


def test_a_server_that_refuses_ends_the_wait_of_all(servers: Servers) -> None:
    servers.refusal = "begin_weight_update() first"
    taken = iter(checkpoint(2).items())
    with pytest.raises(ValueError, match=r"server 1 did not .*begin_weight_update\(\) first"):
        servers.stream.send(taken, "1")
    assert next(taken, None) is None
    servers.refusal = None
    assert_served(servers, {"norm": torch.zeros(3)})
    servers.stream.send(checkpoint(3).items(), "3")
    assert_served(servers, checkpoint(3))


def test_a_model_that_holds_neither_version_ends_its_process(servers: Servers) -> None:
    broken = servers.models[1][0]

    def load_weights(named: Iterable[tuple[str, torch.Tensor]]) -> None:
        broken.norm = torch.nn.Parameter(torch.zeros(7))
        raise KeyError("norm")

    broken.load_weights = load_weights  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="norm"):
        servers.stream.send(checkpoint(1).items(), "1")
    (error,) = servers.errors
    assert isinstance(error, RuntimeError)
    assert "norm: is torch.float32 of shape (7,) after a version that failed" in str(error)
    assert "the model holds neither version" in str(error)


def test_other_tensors_and_calls_out_of_order_are_refused(servers: Servers) -> None:
    for named in ([("w", torch.ones(2))], [], [("w", torch.zeros(2, dtype=torch.uint8))]):
        with pytest.raises(ValueError, match="expected one tensor of an SglangStream"):
            sglang.load(Fused(range(4)), named)
    for call in (servers.stream.end, lambda: servers.stream.add("norm", torch.ones(3))):
        with pytest.raises(RuntimeError, match="no version has begun"):
            call()
    with pytest.raises(ValueError, match="num_ranks must be >= 1, got 0"):
        sglang.SglangStream("127.0.0.1:0", [0], servers.post)


# ---------------------------------------------------------------------------------------------
# miles

MILES = "moe_comm.resharding.clients.miles"


class MilesUpdates:
    """Calls of miles' `WeightUpdater`, with clients of two servers.

    Args:
        protocol: Made by miles' factory.
    """

    def __init__(self, protocol: Any) -> None:
        self.protocol = protocol
        self.servers = Servers()
        self.version = 0

    def connect(self) -> None:
        def client(server: int) -> types.SimpleNamespace:
            async def update_weights_from_tensor(**body: Any) -> dict[str, Any]:
                return await asyncio.to_thread(self.servers.post, server, body)

            return types.SimpleNamespace(update_weights_from_tensor=update_weights_from_tensor)

        self.protocol.connect([client(0), client(1)], [2, 1], [0, 2], None, None, "all")
        assert self.protocol.is_sender

    def run(self, *buckets: Named) -> None:
        version = self.version + 1
        assert self.protocol.begin_sync(version, lambda **_: iter(()))
        self.version = version
        for bucket in buckets:
            self.protocol.send_bucket(list(bucket.items()))
        self.protocol.after_base_weights()
        self.protocol.finalize(version)
        self.protocol.after_engines_resumed()


def miles_arguments() -> types.SimpleNamespace:
    return types.SimpleNamespace(
        colocate=False,
        update_weight_transfer_mode="external",
        custom_weight_transfer_protocol_path=f"{MILES}.MoeCommWeightTransfer",
        update_weight_buffer_size=64,
        rollout_num_gpus_per_engine=1,
        moe_comm_address="127.0.0.1:0",
        moe_comm_timeout_s=20,
    )


def check_updates_of_miles(updates: MilesUpdates) -> None:
    """Two that arrive, and between them one that lacks a tensor, one of nothing, one refused, one that fails."""
    assert updates.protocol.required_placement.gather_pp
    updates.connect()
    good = checkpoint(1)
    halves = dict(list(good.items())[:5]), dict(list(good.items())[5:])
    updates.run(*halves)
    assert_served(updates.servers, good)
    sent = sum(tensor.nbytes for tensor in good.values())
    assert updates.protocol.pop_metrics() == {"perf/moe_comm_bytes": float(sent)}
    with pytest.raises(ValueError, match=r"norm.*the loader fills it from no tensor"):
        updates.run(checkpoint(2, norm=None))
    with pytest.raises(ValueError, match="version 3: miles has sent no tensor"):
        updates.run()
    updates.servers.refusal, updates.servers.num_posts = "no session is open", 0
    with pytest.raises(ValueError, match="no session is open"):
        updates.run(*halves)
    assert updates.servers.num_posts == 2
    updates.servers.refusal = None
    updates.servers.models[0][0].trips_at = "0.gate"
    with pytest.raises(KeyError, match=r"0\.gate"):
        updates.run(*({name: each} for name, each in checkpoint(2).items()))
    assert_served(updates.servers, good)
    assert updates.protocol.pop_metrics() == {}
    updates.servers.models[0][0].trips_at = ""
    updates.connect()
    updates.run(checkpoint(5))
    assert_served(updates.servers, checkpoint(5))


@pytest.fixture
def a_world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class Placement:
    gather_pp: bool


class Protocol:
    required_placement = Placement(gather_pp=False)

    def __init__(self, args: Any) -> None:
        self.args = args
        self.is_sender: bool | None = None
        self.update_weight_metrics: dict[str, float] = {}

    def after_engines_resumed(self) -> None:
        pass

    def pop_metrics(self) -> dict[str, float]:
        metrics, self.update_weight_metrics = self.update_weight_metrics, {}
        return metrics


@pytest.fixture
def transfer_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand in for miles' base class and what it runs coroutines with, where it is not installed."""
    names = "backends", "backends.training_utils", "backends.training_utils.weight_update"
    of_miles = {name: types.ModuleType(name) for name in ("miles", *(f"miles.{n}" for n in names))}
    of_miles[f"miles.{names[-1]}.protocol"] = types.SimpleNamespace(  # type: ignore[assignment]
        WeightTransferProtocol=Protocol
    )
    of_miles["miles.utils"] = types.ModuleType("miles.utils")
    of_miles["miles.utils.async_utils"] = types.SimpleNamespace(run=asyncio.run)  # type: ignore[assignment]
    of_miles["miles.utils.distributed_utils"] = types.SimpleNamespace(  # type: ignore[assignment]
        get_gloo_group=lambda: None
    )
    for name, module in of_miles.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MILES, raising=False)
    made = importlib.import_module(MILES).MoeCommWeightTransfer
    monkeypatch.delitem(sys.modules, MILES)
    return made


@pytest.mark.usefixtures("a_world_of_one")
def test_updates_of_miles(transfer_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_updates_of_miles(MilesUpdates(transfer_class(miles_arguments())))
    # Another trainer only takes part.
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    other = transfer_class(miles_arguments())
    other.connect([], None, None, None, None, "all")
    assert other.is_sender is False
    assert other.begin_sync(1, lambda **_: iter(()))
    other.after_base_weights()
    other.finalize(1)

"""Streams of named tensors between ranks that are threads here, over Gloo."""

from __future__ import annotations

import asyncio
import datetime as dt
import importlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm.resharding.clients.tensor_stream import StreamError, TensorStream
from moe_comm.resharding.clients.trl import TrlWeightTransfer
from tests.helpers.published_conversion import publish_conversion

Named = list[tuple[str, torch.Tensor]]

TENSORS: Named = [
    ("rows", torch.arange(12.0).view(3, 4)),
    ("turned", torch.arange(24, dtype=torch.int32).view(4, 6).t()),
    ("scalar", torch.tensor(3.5, dtype=torch.bfloat16)),
    ("nothing", torch.empty(0, 4)),
    ("bytes", torch.arange(200, dtype=torch.uint8)),
    ("conjugate", torch.complex(torch.arange(40.0), torch.ones(40)).conj()),
    ("last", torch.ones(3, dtype=torch.float16)),
]


def run_ends(
    *ends: Callable[[TensorStream], Any], bucket_bytes: int = 64, timeout_s: float = 30
) -> list[Any]:
    """Run one end per rank; what it returns, or the error."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        timeout = dt.timedelta(seconds=timeout_s)
        group = dist.ProcessGroupGloo(store, rank, len(ends), timeout=timeout)
        try:
            return ends[rank](TensorStream(group, bucket_bytes))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(len(ends)) as pool:
        return list(pool.map(run, range(len(ends))))


def taken(stream: TensorStream) -> Named:
    return [(name, tensor.clone()) for name, tensor in stream.receive()]


def assert_same(found: Iterable[tuple[str, torch.Tensor]], expected: Named) -> None:
    found = list(found)
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, tensor), (_, other) in zip(found, expected, strict=True):
        assert tensor.dtype == other.dtype, name
        assert torch.equal(tensor, other), name


@pytest.mark.parametrize("bucket_bytes", [16, 64, 1 << 20])
def test_tensors_arrive_on_every_rank_twice(bucket_bytes: int) -> None:
    doubled = [(name, tensor * 2) for name, tensor in TENSORS]

    def send(stream: TensorStream) -> list[int]:
        return [stream.send(TENSORS, "1"), stream.send(iter(doubled), "2")]

    def receive(stream: TensorStream) -> tuple[list[Named], str | None]:
        return [taken(stream), taken(stream)], stream.version

    sent, *received = run_ends(send, receive, receive, bucket_bytes=bucket_bytes)
    assert sent == [sum(tensor.nbytes for _, tensor in TENSORS)] * 2
    for (first, second), version in received:
        assert_same(first, TENSORS)
        assert_same(second, doubled)
        assert version == "2"


def test_no_tensors_are_a_stream() -> None:
    assert run_ends(lambda stream: stream.send([]), taken) == [0, []]


def failing() -> Iterator[tuple[str, torch.Tensor]]:
    yield from TENSORS[:2]
    raise OSError("out of files")


def test_an_error_of_the_sender_reaches_all_and_the_next_stream_is_whole() -> None:
    def send(stream: TensorStream) -> Exception:
        with pytest.raises(OSError, match="out of files") as caught:
            stream.send(failing())
        stream.send(TENSORS)
        return caught.value

    def receive(stream: TensorStream) -> Named:
        with pytest.raises(StreamError, match=r"stopped after 1 tensors, .*OSError: out of files"):
            taken(stream)
        return taken(stream)

    _, *received = run_ends(send, receive, receive)
    for each in received:
        assert_same(each, TENSORS)


@pytest.mark.parametrize(
    ("named", "kind", "text"),
    [
        (TENSORS[0], ValueError, "rows comes twice"),
        ((3, torch.ones(2)), TypeError, "a name of a tensor must be a str, got 3"),
        (("far", torch.ones(2, device="meta")), ValueError, "far has no memory"),
        (("few", torch.ones(2).to_sparse()), ValueError, "few has no memory of its own"),
    ],
)
def test_what_cannot_be_sent_is_refused_on_both_ends(
    named: Any, kind: type[Exception], text: str
) -> None:
    sent, received = run_ends(lambda stream: stream.send([TENSORS[0], named]), taken)
    assert type(sent) is kind
    assert text in str(sent)
    assert isinstance(received, StreamError)
    assert text in str(received)


def test_a_rank_that_stops_fails_the_stream_everywhere_and_the_next_is_whole() -> None:
    def send(stream: TensorStream) -> None:
        with pytest.raises(StreamError, match=r"ranks \[1\] did not take all of 7 tensors"):
            stream.send(TENSORS)
        stream.send(TENSORS)

    def stop(stream: TensorStream) -> Named:
        with pytest.raises(KeyError):
            for name, _ in stream.receive():
                if name == "turned":
                    raise KeyError(name)
        return taken(stream)

    def stop_at_once(stream: TensorStream) -> Named:
        named = stream.receive()
        with pytest.raises(KeyError):
            for name, _ in named:
                raise KeyError(name)
        named.close()
        return taken(stream)

    def receive(stream: TensorStream) -> Named:
        with pytest.raises(StreamError, match=r"ranks \[1\] did not take all of 7 tensors"):
            taken(stream)
        assert stream.version is None
        return taken(stream)

    for end in (stop_at_once, stop):
        sent, *received = run_ends(send, end, receive)
        assert sent is None
        for each in received:
            assert_same(each, TENSORS)


def test_another_version_is_refused_before_anything_is_yielded() -> None:
    found: Named = []

    def receive(stream: TensorStream) -> None:
        found.extend(stream.receive("8"))

    for named in (TENSORS, []):
        sent, received = run_ends(lambda stream, named=named: stream.send(named, "7"), receive)  # type: ignore[misc]
        assert isinstance(sent, StreamError)
        assert isinstance(received, StreamError)
        assert "expected version 8, got 7" in str(received)
        assert found == []


def test_a_rank_that_is_gone_is_an_error_that_says_where() -> None:
    sent, received = run_ends(lambda _: None, taken, timeout_s=1)
    assert sent is None
    assert isinstance(received, StreamError)
    assert "rank 1: waiting for the others at what comes after its begin" in str(received)


def test_a_bucket_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_bytes must be >= 16, got 8"):
        TensorStream(None, 8)


def test_a_stream_without_a_group_is_refused() -> None:
    with pytest.raises(
        TypeError, match="group must be a process group or a backend of one, got None"
    ):
        TensorStream(None)


# ---------------------------------------------------------------------------------------------
# TRL


class Halved(torch.nn.Module):
    """Part of a model of transformers that is looked at; its gate and up are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.arange(16.0).view(2, 4, 2))
        self.q = torch.nn.Parameter(torch.arange(6.0).view(3, 2))
        self.k = torch.nn.Parameter(torch.arange(4.0).view(2, 2) + 100)
        self.all_tied_weights_keys: dict[str, str] = {}


def revert(_: torch.nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    disk = {"qk": torch.cat([state["q"], state["k"]])}
    for half, tensor in zip(("gate", "up"), state["fused"].chunk(2, dim=1), strict=True):
        disk |= {f"{number}.{half}": row.t() for number, row in enumerate(tensor.unbind())}
    return disk


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for where transformers publishes its conversion."""
    publish_conversion(monkeypatch, revert)


@pytest.mark.usefixtures("published")
def test_a_transfer_of_trl_arrives_by_the_names_on_disk() -> None:
    model = Halved()
    calls: list[str] = []

    def send(stream: TensorStream) -> int:
        transfer = TrlWeightTransfer(
            model,
            lambda: stream,
            pause=lambda: calls.append("pause"),
            resume=lambda: calls.append("resume"),
            destroy=lambda: calls.append("destroy"),
        )
        with pytest.raises(RuntimeError, match="before init_weight_transfer"):
            transfer.send_weights(iter([]))
        transfer.init_weight_transfer()
        halves = ("q", model.q), ("k", model.k)
        for named, text in (
            ([("head", model.q), *halves], "head: Halved has no such tensor"),
            ([("q", model.q.t()), *halves], r"q: expected .* shape \(3, 2\), got \(2, 3\)"),
            (halves[:1], "qk: 4 of 10 elements have not come"),
            (halves, "fused: this parameter has not come, nor have 0 others"),
        ):
            rest = iter(named)
            with pytest.raises(ValueError, match=text):
                transfer.send_weights(rest)
            assert next(rest, None) is None
        assert transfer.version == 0
        transfer.pause()
        transfer.send_weights(iter(model.named_parameters()))
        transfer.resume()
        transfer.destroy()
        return transfer.version

    def receive(stream: TensorStream) -> tuple[dict[str, torch.Tensor], str | None]:
        for _ in range(4):
            with pytest.raises(StreamError, match="the sender stopped"):
                taken(stream)
        return dict(taken(stream)), stream.version

    version, (found, stream_version) = run_ends(send, receive)
    expected = revert(model, {name: tensor.detach() for name, tensor in model.named_parameters()})
    assert (version, stream_version) == (1, "1")
    assert calls == ["pause", "resume", "destroy"]
    assert_same(sorted(found.items()), sorted(expected.items()))


# ---------------------------------------------------------------------------------------------
# verl

VERL = "verl.checkpoint_engine.base"
ENGINE = "moe_comm.resharding.clients.verl"


@pytest.fixture
def engine_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand in for verl's base class and registry, where it is not installed."""
    registry: dict[str, type] = {}

    class Registry:
        @staticmethod
        def register(backend: str) -> Callable[[type], type]:
            return lambda cls: registry.setdefault(backend, cls)

    base = types.ModuleType(VERL)
    base.CheckpointEngineRegistry = Registry  # type: ignore[attr-defined]
    base.CheckpointEngine = type("CheckpointEngine", (), {})  # type: ignore[attr-defined]
    for name in ("verl", "verl.checkpoint_engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, VERL, base)
    monkeypatch.delitem(sys.modules, ENGINE, raising=False)
    importlib.import_module(ENGINE)
    monkeypatch.delitem(sys.modules, ENGINE)
    return registry["moe_comm"]


class Update:
    """Steps of verl's manager over two actors and rollout ranks, all threads here."""

    def __init__(self, engine_class: Any) -> None:
        self.new = lambda is_master: engine_class(
            100, **({"is_master": True} if is_master else {}), timeout_s=20, host="127.0.0.1"
        )
        self.engine_class = engine_class
        self.actors = [self.new(rank == 0) for rank in range(2)]

    async def receive(self, end: Any, step: int) -> Named:
        return [(name, tensor.clone()) async for name, tensor in end.receive_weights(step)]

    def run(self, rollouts: list[Any], weights: Callable[[], Any], step: int) -> list[Any]:
        ends = [*self.actors, *rollouts]
        sides = self.engine_class.build_topology(2, len(rollouts), [end.prepare() for end in ends])
        entries = [
            {key: values[rank] for key, values in side.items()}
            for side, count in zip(sides, (2, len(rollouts)), strict=True)
            for rank in range(count)
        ]

        def one(rank: int) -> Any:
            ends[rank].init_process_group(**entries[rank])
            try:
                if rank < 2:
                    return asyncio.run(ends[rank].send_weights(weights(), global_steps=step))
                return asyncio.run(self.receive(ends[rank], step))
            except Exception as error:  # noqa: BLE001 - the test looks at it
                return error
            finally:
                ends[rank].finalize()

        with ThreadPoolExecutor(len(ends)) as pool:
            return list(pool.map(one, range(len(ends))))


def test_updates_of_verl_arrive_over_one_group_until_ranks_change(engine_class: Any) -> None:
    update = Update(engine_class)
    rollouts = [update.new(False), update.new(False)]
    groups = []
    for step in (1, 2):
        ended = update.run(rollouts, lambda: iter(TENSORS), step)
        assert ended[:2] == [None, None]
        for each in ended[2:]:
            assert_same(each, TENSORS)
        groups.append(update.actors[0].prepare()["joined"])
    assert groups[0] == groups[1]
    # One is started anew: it has no group, and the others join another one with it.
    rollouts[1] = update.new(False)
    assert_same(update.run(rollouts, lambda: iter(TENSORS), 3)[3], TENSORS)
    groups.append(update.actors[0].prepare()["joined"])
    assert groups[2] != groups[1]
    # One is gone.
    assert_same(update.run(rollouts[1:], lambda: iter(TENSORS), 4)[2], TENSORS)
    assert update.actors[0].prepare()["joined"][2] == 2


def test_a_failed_update_of_verl_says_so_and_the_next_is_whole(engine_class: Any) -> None:
    update = Update(engine_class)
    rollouts = [update.new(False)]
    sent, _, received = update.run(rollouts, failing, 1)
    assert isinstance(sent, OSError)
    assert isinstance(received, StreamError)
    made: list[Iterator[Any]] = []

    def twice() -> Iterator[Any]:
        made.append(iter([*TENSORS, *TENSORS]))
        return made[-1]

    sent, _, received = update.run(rollouts, twice, 2)
    assert isinstance(sent, ValueError)
    assert isinstance(received, StreamError)
    assert [next(each, None) for each in made] == [None, None]
    assert_same(update.run(rollouts, lambda: iter(TENSORS), 3)[2], TENSORS)


def test_a_topology_of_other_metadata_is_refused(engine_class: Any) -> None:
    with pytest.raises(ValueError, match="expected metadata of 3 ranks, got 1"):
        engine_class.build_topology(2, 1, [{}])
    with pytest.raises(ValueError, match="expected the first actor's address"):
        engine_class.build_topology(1, 1, [{"joined": None}, {"joined": None}])
    with pytest.raises(RuntimeError, match="before init_process_group"):
        asyncio.run(anext(engine_class(100).receive_weights()))

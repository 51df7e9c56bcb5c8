"""Native errors become Python's whatever a handler of a signal raises meanwhile."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

import moe_comm
from moe_comm import Communicator, RankThreads, errors
from tests import _host_testing

SITE = {"ranks": (1, 3), "operation": "dispatch", "phase": "rows", "epoch": 7}
CAPACITY = {"needed_bytes": 64, "available_bytes": 32, "ranks": (2,), "needed_rows": (5, 6)}
MADE_IN_PYTHON = {
    "PeerFailed": (errors.PeerFailedError, SITE),
    "PeerTimeout": (errors.PeerTimeoutError, SITE),
    "Evicted": (errors.EvictedError, SITE),
    "CapacityError": (errors.CapacityError, CAPACITY),
}
BUILTIN = {
    "InvalidArgument": ValueError,
    "InvalidType": TypeError,
    "SystemError": OSError,
    "ConcurrentUse": RuntimeError,
}


class _Handled(Exception):  # noqa: N818 - what a user's handler may raise
    """Raised by the handler of a signal."""


@pytest.fixture(params=[KeyboardInterrupt, _Handled], ids=["ctrl-c", "own"])
def handled(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    """Error that the handler of SIGUSR1 raises."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise request.param("by the handler")

    before = signal.signal(signal.SIGUSR1, handle)
    yield request.param
    signal.signal(signal.SIGUSR1, before)


def _signals(kind: type[Exception], num_times: int) -> Callable[..., None]:
    """The constructor of a class, during whose first calls a signal comes."""
    original = kind.__init__
    calls = iter(range(num_times))

    def construct(self: Exception, *args: object, **kwargs: object) -> None:
        if next(calls, None) is not None:
            signal.raise_signal(signal.SIGUSR1)
        original(self, *args, **kwargs)

    return construct


def _check(error: BaseException | None, kind: str) -> None:
    expected, attributes = MADE_IN_PYTHON[kind]
    assert type(error) is expected
    assert str(error) == "rank 3 died"
    assert {name: getattr(error, name) for name in attributes} == attributes


@pytest.mark.parametrize("kind", MADE_IN_PYTHON)
def test_errors_have_their_class_and_attributes(kind: str) -> None:
    with pytest.raises(MADE_IN_PYTHON[kind][0]) as caught:
        _host_testing.throw_error(kind, b"rank 3 died")
    _check(caught.value, kind)


@pytest.mark.parametrize("kind", MADE_IN_PYTHON)
def test_what_a_handler_raises_has_the_error_as_its_context(
    kind: str, handled: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    error_class = MADE_IN_PYTHON[kind][0]
    monkeypatch.setattr(error_class, "__init__", _signals(error_class, 1))
    with pytest.raises(handled, match="by the handler") as caught:
        try:
            raise LookupError("before")
        except LookupError:
            _host_testing.throw_error(kind, b"rank 3 died")
    _check(caught.value.__context__, kind)
    assert isinstance(caught.value.__context__.__context__, LookupError)


@pytest.mark.parametrize("kind", MADE_IN_PYTHON)
def test_a_second_signal_leaves_the_first(
    kind: str, handled: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    error_class = MADE_IN_PYTHON[kind][0]
    monkeypatch.setattr(error_class, "__init__", _signals(error_class, 2))
    with pytest.raises(handled, match="by the handler"):
        _host_testing.throw_error(kind, b"rank 3 died")


@pytest.mark.parametrize("kind", [*MADE_IN_PYTHON, *BUILTIN])
def test_a_message_that_is_no_utf8_keeps_its_class(kind: str) -> None:
    expected = BUILTIN[kind] if kind in BUILTIN else MADE_IN_PYTHON[kind][0]
    with pytest.raises(expected, match="it is \N{REPLACEMENT CHARACTER}closed") as caught:
        _host_testing.throw_error(kind, b"it is \xe9closed")
    assert type(caught.value) is expected
    if kind == "SystemError":
        assert caught.value.errno == 12


def test_the_heap_of_a_communicator_answers_a_signal(
    handled: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors.CapacityError, "__init__", _signals(errors.CapacityError, 1))
    with Communicator(backend="host", max_heap_bytes=1 << 20) as communicator:
        with pytest.raises(handled) as caught:
            communicator.reserve(1 << 24)
    assert isinstance(caught.value.__context__, errors.CapacityError)
    assert caught.value.__context__.needed_bytes >= 1 << 24


def test_an_interrupt_while_a_wait_is_logged_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = RankThreads(2)
    leave = threading.Event()

    def second() -> None:
        with Communicator(ranks[1], backend="host"):
            leave.wait(60)

    def interrupt(record: logging.LogRecord) -> bool:
        raise KeyboardInterrupt("during logging")

    logger = logging.getLogger("moe_comm")
    peer = threading.Thread(target=second, daemon=True)
    peer.start()
    communicator = Communicator(ranks[0], backend="host", arrival_timeout_s=60)
    moe_comm._host.set_warning_interval(0.05)
    logger.addFilter(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt, match="during logging"):
            communicator.all_gather(b"nobody else comes")
    finally:
        logger.removeFilter(interrupt)
        moe_comm._host.set_warning_interval(60)
        leave.set()
        peer.join(60)
        communicator.destroy()

"""A message between nodes that says what cannot be is refused before memory is touched by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

import moe_comm
from moe_comm import EpBuffer, EpConfig
from tests.helpers.rank_threads import on_ranks
from tests.helpers.scripted_rails import Message, ScriptedRails

pytest.importorskip("moe_comm._host")

HIDDEN = 64
NUM_TOKENS = 20
FIRST_OF_TOKEN = 1 << 62
ROW_BITS = 48

Numbers = list[int]


def _set(position: int, change: Callable[[int], int]) -> Callable[[Numbers], None]:
    def damage(numbers: Numbers) -> None:
        numbers[position] = change(numbers[position])

    return damage


def _unmark_all(numbers: Numbers) -> None:
    """Every row after the first becomes one of the first token's."""
    numbers[1:] = [number & ~FIRST_OF_TOKEN for number in numbers[1:]]


@dataclasses.dataclass(frozen=True)
class _Damage:
    """What happens to one message of rank 2 to rank 0.

    Args:
        in_combine: The call it belongs to: the combine, otherwise the dispatch.
        position: Which message of that call it is; number 0 has the counts.
        change: Changes its int64 numbers.
        said: What rank 0 says of it.
        node_reduction: Of the configuration.
    """

    in_combine: bool
    position: int
    change: Callable[[Numbers], None]
    said: str
    node_reduction: bool = False


DAMAGES = {
    "rows of a dispatch": _Damage(
        False, 1, _set(0, lambda _: 1 << 40), r"announces 1099511627776 rows"
    ),
    "no rows": _Damage(False, 1, _set(0, lambda _: 0), r"announces 0 rows"),
    "row beyond a window": _Damage(
        True, 1, _set(3, lambda slot: slot | 1 << 40), r"asked rank 0 for row \d{13} of rank [01]"
    ),
    "row of another node": _Damage(
        True, 1, _set(0, lambda _: 3 << ROW_BITS), r"asked rank 0 for row 0 of rank 3"
    ),
    "row of no rank": _Damage(
        True, 1, _set(0, lambda _: 99 << ROW_BITS), r"asked rank 0 for row 0 of rank 99"
    ),
    "no row": _Damage(True, 1, _set(0, lambda _: -1), r"asked rank 0 for row"),
    "sum of no token": _Damage(
        True,
        1,
        _set(0, lambda slot: slot & ~FIRST_OF_TOKEN),
        r"asked rank 0 for a row of no token",
        node_reduction=True,
    ),
    "sum of too many rows": _Damage(
        True, 1, _unmark_all, r"asked rank 0 for more rows of a token than 4", node_reduction=True
    ),
    "sum of a row beyond a window": _Damage(
        True,
        1,
        _set(1, lambda slot: slot | 1 << 40),
        r"asked rank 0 for row \d{13} of rank [01]",
        node_reduction=True,
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_message_is_refused(monkeypatch: pytest.MonkeyPatch, damage: _Damage) -> None:
    first: list[int] = []  # message of the pair that the call begins with

    def rewrite(message: Message, received: memoryview) -> None:
        if first and message == (2, 0, first[0] + damage.position):
            numbers = received[: len(received) // 8 * 8].cast("q")
            changed = numbers.tolist()
            damage.change(changed)
            for i, number in enumerate(changed):
                numbers[i] = number

    rails = ScriptedRails(monkeypatch, rewrite=rewrite)
    config = EpConfig(
        num_experts=8,
        num_topk=4,
        hidden=HIDDEN,
        num_max_tokens_per_rank=NUM_TOKENS,
        dtype=torch.bfloat16,
        node_reduction=damage.node_reduction,
    )

    def body(comm: moe_comm.Communicator) -> Exception:
        draw = torch.Generator().manual_seed(comm.rank_idx)
        x = torch.randn(NUM_TOKENS, HIDDEN, generator=draw).bfloat16()
        topk_idx = torch.rand(NUM_TOKENS, 8, generator=draw).topk(4).indices

        def call(watch: bool) -> torch.Tensor:
            def begin() -> None:
                comm.bootstrap.all_gather(None)
                if comm.rank_idx == 0:
                    first.append(len(rails.sizes[2, 0]))
                comm.bootstrap.all_gather(None)

            if watch and not damage.in_combine:
                begin()
            result = buffer.dispatch(x, topk_idx)
            if watch and damage.in_combine:
                begin()
            return buffer.combine(result.x, result.handle)

        with EpBuffer(comm, config) as buffer:
            # After these no rank is short of a window, so the messages of a call are always the same.
            for _ in range(2):
                expected = call(watch=False).clone()
            with pytest.raises((RuntimeError, moe_comm.PeerFailedError)) as caught:
                call(watch=True)
            first.clear()
            comm.recover()
            assert torch.equal(call(watch=False), expected)
            return caught.value

    errors = on_ranks(4, body, num_local_ranks=2)
    assert not isinstance(errors[0], moe_comm.PeerFailedError)
    with pytest.raises(RuntimeError, match=rf"rank 2 {damage.said}"):
        raise errors[0]
    for error in errors[1:]:
        assert isinstance(error, moe_comm.PeerFailedError), error
        assert error.ranks == (0,)

"""A message between nodes that says what cannot be is refused before memory is touched by it.

With `check_messages` so is every message in which a bit has changed.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import moe_comm
from moe_comm import EpBuffer, EpConfig, Layout, Quantization, QuantizationFormat
from tests.helpers.configs import ep_config
from tests.helpers.rank_threads import on_ranks
from tests.helpers.scripted_rails import Message, ScriptedRails

pytest.importorskip("moe_comm._host")

HIDDEN = 64
NUM_TOKENS = 20
NUM_EXPERTS = 8
FIRST_OF_TOKEN = 1 << 62
ROW_BITS = 48
# Parts of messages, counted in int64 numbers. A dispatch in which every token goes everywhere has 20 rows
# of 128 bytes in its one chunk, or of 64 bytes and a scale factor of 4, then their slots, then their ids.
COUNTS_AT = 144 // 8
OFFERED_BYTES_AT = 120 // 8
SLOTS_AT = 20 * 128 // 8
IDS_AT = SLOTS_AT + 20 * 2
IDS_OF_QUANTIZED_AT = (20 * 64 + 128 + 20 * 8 * 8) // 8

# Rows by rank, whose places every rank finds from sets of tokens of all: of 4 ranks, then of shared experts.
SHARED_SETS_AT = 4
REPLICATED: dict[str, Any] = {
    "dispatch": {"layout": Layout.RANK_MAJOR},
    "placement": moe_comm.Placement([[0, 1, 6], [2, 3, 4], [4, 5, 0], [6, 7, 2]], NUM_EXPERTS),
}
EVERYWHERE: dict[str, Any] = {"num_topk": NUM_EXPERTS}

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
    """Damage to one message of rank 2 to rank 0.

    Args:
        in_combine: The call it belongs to: the combine, otherwise the dispatch.
        position: Which message of that call it is; number 0 has the counts.
        change: Changes its int64 numbers.
        said: What rank 0 says of it.
        node_reduction: Of the configuration.
        num_topk: Of the configuration.
        dispatch: Arguments of the dispatch.
        with_weights: Rows are dispatched with weights.
        avoids_rank_1: The even ranks, rank 0 among them, send nothing to rank 1.
        placement: Of the configuration.
    """

    in_combine: bool
    position: int
    change: Callable[[Numbers], None]
    said: str
    node_reduction: bool = False
    num_topk: int = 4
    dispatch: dict[str, Any] = dataclasses.field(default_factory=dict)
    with_weights: bool = False
    avoids_rank_1: bool = False
    placement: moe_comm.Placement | None = None


DAMAGES = {
    "rows of a dispatch": _Damage(
        False, 1, _set(0, lambda _: 1 << 40), r"announces 1099511627776 rows"
    ),
    "no rows": _Damage(False, 1, _set(0, lambda _: 0), r"announces 0 rows"),
    "fewer than no choices": _Damage(
        False, 0, _set(COUNTS_AT, lambda _: -1), r"says that -1 choices of its 80 are of expert 0"
    ),
    "more choices than tokens have": _Damage(
        False, 0, _set(COUNTS_AT, lambda _: 1 << 30), r"says that 1073741824 choices of its 80"
    ),
    "more tokens than there are": _Damage(
        False,
        0,
        _set(COUNTS_AT + NUM_EXPERTS // 2, lambda _: 1 << 20),
        r"says that 1048576 of its 20 tokens are bound for rank 0",
    ),
    "row for the weights behind the last row": _Damage(
        False,
        2,
        _set(SLOTS_AT, lambda _: 161),
        r"sends a row for row 161 of rank 0",
        with_weights=True,
        **EVERYWHERE,
    ),
    "row for a rank of another node": _Damage(
        False,
        2,
        _set(SLOTS_AT, lambda _: 2 << ROW_BITS),
        r"sends a row for row 0 of rank 2",
        **EVERYWHERE,
    ),
    "row for no expert": _Damage(
        False,
        2,
        _set(IDS_AT, lambda _: 1000),
        r"sends a row for expert 1000, expected \[-1, 8\)",
        dispatch={"layout": Layout.RANK_MAJOR},
        **EVERYWHERE,
    ),
    "row of an expert that has a slot and no id": _Damage(
        False,
        2,
        _set(IDS_OF_QUANTIZED_AT, lambda _: -1),
        r"sends a row for expert -1, expected \[0, 8\)",
        dispatch={
            "quantization": Quantization(
                format=QuantizationFormat.FP8_BLOCK128, is_column_major=True
            )
        },
        **EVERYWHERE,
    ),
    "choice of a token that is not there": _Damage(
        False,
        1,
        _set(SHARED_SETS_AT, lambda tokens: tokens ^ 1 << 40),
        "offers choices that are not those",
        **REPLICATED,
    ),
    "more tokens for a rank than choices": _Damage(
        False,
        1,
        _set(0, lambda _: (1 << 63) - 1),
        "offers choices that are not those",
        **REPLICATED,
    ),
    "more bytes than there are choices": _Damage(
        False,
        0,
        _set(OFFERED_BYTES_AT, lambda _: 1 << 40),
        "offers choices that are not those",
        **REPLICATED,
    ),
    "row of a rank that nobody pulls from here": _Damage(
        True,
        1,
        _set(0, lambda _: 1 << ROW_BITS),
        r"asked rank 0 for row 0 of rank 1",
        avoids_rank_1=True,
    ),
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
    config = ep_config(
        NUM_EXPERTS,
        damage.num_topk,
        HIDDEN,
        NUM_TOKENS,
        dtype=torch.bfloat16,
        node_reduction=damage.node_reduction,
        placement=damage.placement,
    )

    def body(comm: moe_comm.Communicator) -> Exception:
        draw = torch.Generator().manual_seed(comm.rank_idx)
        x = torch.randn(NUM_TOKENS, HIDDEN, generator=draw).bfloat16()
        wish = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=draw)
        if damage.avoids_rank_1 and comm.rank_idx % 2 == 0:
            wish[:, 2:4] = 0.0  # its experts
        topk_idx = wish.topk(damage.num_topk).indices
        weights = torch.ones(NUM_TOKENS, damage.num_topk) if damage.with_weights else None

        def call(watch: bool) -> torch.Tensor:
            def begin() -> None:
                comm.bootstrap.all_gather(None)
                if comm.rank_idx == 0:
                    first.append(len(rails.sizes[2, 0]))
                comm.bootstrap.all_gather(None)

            if watch and not damage.in_combine:
                begin()
            result = buffer.dispatch(x, topk_idx, weights, **damage.dispatch)
            if watch and damage.in_combine:
                begin()
            return buffer.combine(result.x.to(torch.bfloat16), result.handle)

        with EpBuffer(comm, config) as buffer:
            # After these no rank is short of a window, so the messages of a call are always the same.
            for _ in range(2):
                expected = call(watch=False).clone()
            # A rank that is through with the call before the damage is found hears of it in the next.
            with pytest.raises((RuntimeError, moe_comm.PeerFailedError)) as caught:
                for is_first in (True, False):
                    call(watch=is_first)
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


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Operations of ranks whose messages are damaged.

    Args:
        dispatch: Arguments of the dispatch.
        with_weights: Rows are dispatched with weights, which the combine pulls.
        node_reduction: Of the configuration.
        placement: Of the configuration.
    """

    dispatch: dict[str, Any] = dataclasses.field(default_factory=dict)
    with_weights: bool = False
    node_reduction: bool = False
    placement: moe_comm.Placement | None = None

    @property
    def config(self) -> EpConfig:
        return ep_config(
            NUM_EXPERTS,
            4,
            HIDDEN,
            NUM_TOKENS,
            dtype=torch.bfloat16,
            node_reduction=self.node_reduction,
            placement=self.placement,
        )

    def run(self, buffer: EpBuffer) -> list[torch.Tensor]:
        """Sums of rows that experts have changed, and what else came back."""
        rank_idx = buffer.communicator.rank_idx
        draw = torch.Generator().manual_seed(rank_idx)
        x = torch.randn(NUM_TOKENS, HIDDEN, generator=draw).bfloat16()
        topk_idx = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=draw).topk(4).indices
        weights = torch.rand(NUM_TOKENS, 4, generator=draw) if self.with_weights else None
        result = buffer.dispatch(x, topk_idx, weights, **self.dispatch)
        rows = (result.x.float() + rank_idx).bfloat16()
        if weights is None:
            return [buffer.combine(rows, result.handle).clone()]
        back = buffer.combine(rows, result.handle, row_weights=result.topk_weights)
        return [back.x.clone(), back.topk_weights.clone()]


LAYERS = {
    "rows": _Layer(),
    "weights": _Layer(with_weights=True),
    "rank-major": _Layer({"layout": Layout.RANK_MAJOR}, with_weights=True),
    "choices": _Layer(**REPLICATED),
    "quantized": _Layer({"quantization": Quantization(format=QuantizationFormat.MXFP8)}),
    "sums": _Layer(node_reduction=True),
}
NUM_FLIPS = 8  # of each layer


@pytest.mark.parametrize("name", LAYERS)
def test_every_flipped_bit_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    layer = LAYERS[name]

    def run(comm: moe_comm.Communicator) -> list[torch.Tensor]:
        with EpBuffer(comm, layer.config) as buffer:
            return layer.run(buffer)

    rails = ScriptedRails(monkeypatch)
    options = {"num_local_ranks": 2, "check_messages": True}
    expected = on_ranks(4, run, **options)
    dice = random.Random(name)
    for _ in range(NUM_FLIPS):
        src_rank, dst_rank = pair = dice.choice(sorted(rails.sizes))
        message_idx = dice.randrange(len(rails.sizes[pair]))
        bit = dice.randrange(8 * rails.sizes[pair][message_idx])

        def rewrite(
            message: Message,
            received: memoryview,
            damaged: Message = (src_rank, dst_rank, message_idx),
            bit: int = bit,
        ) -> None:
            if message == damaged:
                received[bit // 8] ^= 1 << bit % 8

        def run_damaged(comm: moe_comm.Communicator) -> moe_comm.PeerFailedError:
            with EpBuffer(comm, layer.config) as buffer:

                def check_layer() -> None:
                    found = layer.run(buffer)
                    assert all(map(torch.equal, found, expected[comm.rank_idx]))

                # A rank that is through with the call before the damage is found hears of it in the next.
                with pytest.raises(moe_comm.PeerFailedError) as caught:
                    for _ in range(2):
                        check_layer()
                comm.recover()
                check_layer()
                return caught.value

        ScriptedRails(monkeypatch, rewrite=rewrite)
        for error in on_ranks(4, run_damaged, **options):
            assert error.ranks == (src_rank,)
            assert re.search(
                rf"rank {dst_rank} and rank {src_rank} failed in (dispatch|combine) of buffer \d+, epoch \d+: "
                rf"scripted: message \d+ of rank {src_rank}, {rails.sizes[pair][message_idx] - 4} bytes, was "
                rf"damaged on the way to rank {dst_rank}: its checksum is \d+, the one that came with it \d+$",
                str(error),
            ), str(error)

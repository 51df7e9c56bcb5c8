"""Words of ranks on gradients: every rank hears all of them, or raises what it finds wrong with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from moe_comm.ep.backends.base import CombineOutput, DispatchOutput
from moe_comm.ep.config import Layout
from moe_comm.ep.gradient_word import (
    ENABLED,
    LEAVES_DISPATCH,
    NEEDS_ROWS,
    NEEDS_WEIGHTS,
    REACHES_DISPATCH,
)
from moe_comm.testing import calls
from moe_comm.testing.case_data import CaseData
from moe_comm.testing.cases import Case, case_inputs
from moe_comm.testing.compare import Expectations
from moe_comm.testing.launch import RankContext
from moe_comm.testing.scripts import compare_dispatch
from moe_comm.testing.target import Target

_OFF, _ON, _ROWS = 0, ENABLED, ENABLED | NEEDS_ROWS
_WEIGHTS, _BOTH = ENABLED | NEEDS_WEIGHTS, ENABLED | NEEDS_ROWS | NEEDS_WEIGHTS

# Words of three ranks.
_WORDS = [
    *itertools.product((_OFF, _ON, _ROWS), repeat=3),
    (_WEIGHTS, _ON, _ON),
    (_ON, _BOTH, _ROWS),
    (_WEIGHTS, _OFF, _ON),
    (_ON, _OFF, _WEIGHTS),
    (_ROWS, _ON, _WEIGHTS),
]

_REACHES, _LEAVES = _ROWS | REACHES_DISPATCH, _ROWS | LEAVES_DISPATCH

# Origins of the rows of three ranks in a combine.
_ORIGINS = [
    (_REACHES, _LEAVES, _ON),
    (_ROWS, _ON, _REACHES),
    (_LEAVES, _ON, _LEAVES),
    (_REACHES, _OFF, _LEAVES),
]


def run_gradients(context: RankContext, target: Target) -> list[str]:
    """Every combination of words, in operations of every kind; after each of them the buffer works."""
    expected = Expectations()
    rank_idx = context.rank_idx
    case = Case(name="gradients", num_ranks=context.num_ranks, num_tokens=(3, 0, 4))
    data = CaseData(case, case_inputs(case))
    mine = data.inputs[rank_idx]
    rows = [rank.x for rank in data.inputs]
    weights = [rank.topk_weights for rank in data.inputs]
    want = data.received(rank_idx, rows, weights)
    with target.communicator(context) as communicator:
        backend = target.backend(communicator, case.config)
        plan = calls.dispatch(backend, case, rank_idx, mine).wait().plan

        def dispatch(word: int, **changes: Any) -> DispatchOutput:
            return calls.dispatch(backend, case, rank_idx, mine, gradients=word, **changes).wait()

        def cached(word: int) -> DispatchOutput:
            return calls.dispatch_cached(backend, mine.x, plan, gradients=word)

        def combine(word: int) -> CombineOutput:
            out = torch.zeros(plan.num_recv_tokens, case.hidden)
            return calls.combine(backend, out, plan, gradients=word).wait()

        operations: list[tuple[Callable[[int], DispatchOutput | CombineOutput], int]] = [
            (dispatch, _BOTH),
            (lambda word: dispatch(word, layout=Layout.RANK_MAJOR), _BOTH),
            (lambda word: dispatch(word, layout=Layout.LOW_LATENCY), _BOTH),
            (lambda word: dispatch(word, async_op=True), _BOTH),
            (cached, _ROWS),  # of rows alone
            (combine, _ROWS),
        ]
        for origins in _ORIGINS:
            what = f"combine of rows with an origin, words {origins}"
            # Rows that reach the dispatch decide for all ranks: others need not be heard then.
            bits = _ROWS | REACHES_DISPATCH if _REACHES in origins else _ROWS | LEAVES_DISPATCH
            _expect(expected, what, combine, origins, rank_idx, bits)
        for idx, words in enumerate(_WORDS):
            for operation_idx in range(idx % 2, len(operations), 2):
                what = f"operation {operation_idx}, words {words}"
                operation, bits = operations[operation_idx]
                _expect(expected, what, operation, words, rank_idx, bits)
            if idx % 4 == 0:
                output = calls.dispatch(backend, case, rank_idx, mine).wait()
                compare_dispatch(expected, f"after words {words}", output, want)
        _expect_weights(expected, backend, plan, mine.topk_weights, rank_idx)
        backend.destroy()
    return [f"rank {rank_idx}: {text}" for text in expected.result()]


def _expect(
    expected: Expectations,
    what: str,
    operation: Callable[[int], DispatchOutput | CombineOutput],
    words: tuple[int, ...],
    rank_idx: int,
    bits: int,
) -> None:
    """`bits`: those of a word that say something in the operation."""
    is_needed = any(word > _ON for word in words)
    named = [rank for rank, word in enumerate(words) if word == _OFF]
    try:
        united = operation(words[rank_idx]).gradients
    except ValueError as error:
        expected.true(what, is_needed and bool(named), f"raised {error!r}")
        told = all(str(rank) in str(error).partition("disabled on")[2] for rank in named)
        expected.true(what, told, f"{str(error)!r} does not say that {named} are disabled")
    else:
        is_fine = not (is_needed and named)
        together = 0 if named else words[0] | words[1] | words[2]
        heard = united & bits == together & bits
        expected.true(what, is_fine and heard, f"heard {united} on rank {rank_idx}")


def _expect_weights(
    expected: Expectations, backend: Any, plan: Any, weights: torch.Tensor, rank_idx: int
) -> None:
    """Weights that a combine applies are each rank's own unless some rank needs a gradient."""
    rows = torch.zeros(plan.num_recv_tokens, 64)
    for word, who_needs in itertools.product((_ON, _ROWS), range(3)):
        own = word if rank_idx == who_needs else _ON
        for given_on in ((0,), (1,), (0, 2), (0, 1, 2), ()):
            what = f"weights on {given_on}, rank {who_needs} says {word}"
            given = weights if rank_idx in given_on else None
            try:
                calls.combine(backend, rows, plan, given, gradients=own).wait()
            except ValueError as error:
                is_wrong = word == _ROWS and len(given_on) in (1, 2)
                is_told = "no weights" in str(error) and "float32 weights" in str(error)
                expected.true(what, is_wrong and is_told, f"raised {error!r}")
            else:
                expected.true(what, word == _ON or len(given_on) in (0, 3), "raised nothing")

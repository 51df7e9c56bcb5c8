from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from moe_comm.errors import CapacityError
from moe_comm.peers.agree import (
    FirstError,
    Problem,
    agree,
    decode_problem,
    encode_problem,
    mismatched_transfers,
    name_ranks,
    raise_different,
    raise_together,
    raise_unequal,
)
from moe_comm.peers.bootstrap import Bootstrap, RankThreads


def test_every_wrong_rank_is_named() -> None:
    raise_together([None, None])
    with pytest.raises(TypeError, match=r"^rank 1: x is a list; rank 2: no; rank 3: a text$"):
        raise_together([None, TypeError("x is a list"), ValueError("no"), "a text"])
    with pytest.raises(ValueError, match=r"^rank 0: a text; rank 1: x is a list$"):
        raise_together(["a text", TypeError("x is a list")])
    with pytest.raises(CapacityError, match="rank 0: short"):
        raise_together([CapacityError("short", needed_bytes=3)])


def test_a_message_names_some_of_many() -> None:
    with pytest.raises(ValueError, match=r"rank 6: no; rank 7: no; and 2 more ranks$"):
        raise_together(["no"] * 10)
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1]) == "ranks 0, 1"
    assert name_ranks(range(9)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and more"


def test_what_this_rank_found_is_the_cause() -> None:
    own = KeyError("w")
    with pytest.raises(KeyError) as caught:
        raise_together([own], own)
    assert caught.value.__cause__ is own


class TwoArgumentsError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)


class UnspeakableError(TypeError):
    def __str__(self) -> str:
        raise RuntimeError


def test_errors_of_others_become_their_base() -> None:
    with pytest.raises(Exception, match=r"^rank 0: ") as caught:
        raise_together([TwoArgumentsError("a", "b")])
    assert type(caught.value) is Exception
    with pytest.raises(UnspeakableError) as unspeakable:
        raise_together([UnspeakableError("no")])
    assert unspeakable.value.args == ("rank 0: UnspeakableError",)


def test_a_difference_names_both_values() -> None:
    said: list[Any] = [None, {"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 3}]
    raise_different("ranks differ", said[:3])
    with pytest.raises(ValueError, match=r"^ranks differ: b is 2 on rank 1 and 3 on rank 3$"):
        raise_different("ranks differ", said)


def test_things_that_meet_are_named() -> None:
    raise_unequal("ranks disagree", [None, "x", "x"])
    with pytest.raises(ValueError, match=r"^ranks disagree: x on rank 0 met y on rank 2$"):
        raise_unequal("ranks disagree", ["x", None, "y"])
    # Their texts may be the same.
    with pytest.raises(ValueError, match=r"^ranks disagree: x on rank 0 met x on rank 1$"):
        raise_unequal("ranks disagree", ["xy", "xz"], lambda text: text[:1])


@pytest.mark.parametrize(
    ("problem", "kind", "text"),
    [
        ("a text", ValueError, "a text"),
        (TypeError("of\ntwo lines"), TypeError, "of\ntwo lines"),
        (NotImplementedError(""), NotImplementedError, "NotImplementedError"),
        (CapacityError("short"), CapacityError, "short"),
        (ArithmeticError("of a user"), ValueError, "of a user"),
    ],
)
def test_problems_travel_as_text(problem: Problem, kind: type[Exception], text: str) -> None:
    heard = decode_problem(encode_problem(problem))
    assert type(heard) is kind
    assert str(heard) == text
    assert decode_problem(encode_problem(None)) is None


def test_all_agree_or_all_raise() -> None:
    class NoPickle:
        def __reduce__(self) -> str:
            raise TypeError

    def take_part(rank_idx: int, ranks: Bootstrap) -> tuple[list[int], str]:
        told = agree(ranks.all_gather, None, 10 + rank_idx)
        problem = "no" if rank_idx == 1 else None
        # An error of a rank may not even travel.
        mine = NoPickle() if rank_idx == 1 else None
        seen: list[Any] = []

        def all_gather(item: Any) -> list[Any]:
            seen.append(item)
            return ranks.all_gather(item)

        with pytest.raises(ValueError, match="rank 1: no") as caught:
            agree(all_gather, problem, mine)
        assert seen == [(problem, None)]
        return told, str(caught.value)

    ranks = RankThreads(2)
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(take_part, range(2), [ranks[0], ranks[1]]))
    assert ended == [([10, 11], "rank 1: no")] * 2


def test_the_first_error_is_kept_until_it_is_raised() -> None:
    first = FirstError()
    first.raise_own()
    with first:
        pass
    assert not first
    for text in ("one", "two"):
        with first:
            raise TypeError(text)
    first.keep(ValueError("three"))
    assert encode_problem(first.error) == "TypeError\none"
    with pytest.raises(TypeError, match=r"^one$"):
        first.raise_own()
    assert not first
    with pytest.raises(KeyboardInterrupt), first:
        raise KeyboardInterrupt
    assert FirstError(ValueError("four")).take() is not None


def test_ends_that_are_not_alike() -> None:
    assert mismatched_transfers({}, {}) == []
    assert mismatched_transfers({1: 8, 5: 4}, {5: 4, 1: 8}) == []
    assert mismatched_transfers({1: 8, 2: 4}, {3: 6, 2: 5}) == [
        (1, 8, None),
        (2, 4, 5),
        (3, None, 6),
    ]
    assert mismatched_transfers({1: "aa", 2: "b"}, {1: [2, 2], 2: [1, 1]}, len) == [
        (2, "b", [1, 1])
    ]

"""Marks on models that a failed refit may have torn."""

from __future__ import annotations

import copy
import pickle

from torch import nn

from moe_comm.resharding.move.stale import clear_stale, is_stale, mark_stale, stale_reason


def test_a_mark_is_seen_from_outside_and_taken_away() -> None:
    inner = nn.Linear(1, 1)
    outer = nn.Sequential(nn.Sequential(inner))
    assert not is_stale(outer)
    assert stale_reason(outer) is None
    mark_stale(inner, "first")
    mark_stale(inner, "second")
    assert stale_reason(outer) == stale_reason(inner) == "second"
    assert is_stale(outer)
    assert not is_stale(nn.Linear(1, 1))
    clear_stale(outer)
    assert not is_stale(inner)
    clear_stale(inner)


def test_a_copy_of_a_stale_model_is_stale() -> None:
    model = nn.Linear(1, 1)
    mark_stale(model, "torn")
    assert stale_reason(copy.deepcopy(model)) == "torn"
    assert stale_reason(pickle.loads(pickle.dumps(model))) == "torn"
    assert model.state_dict().keys() == {"weight", "bias"}


def test_a_replaced_submodule_is_looked_at() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    assert not is_stale(model)
    model[0] = nn.Linear(1, 1)
    mark_stale(model[0], "torn")
    assert stale_reason(model) == "torn"
    clear_stale(model)
    assert not is_stale(model[0])

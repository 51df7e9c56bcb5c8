"""The rule for subjects of commits."""

from __future__ import annotations

import pytest

from tools.commit_subjects import problem_of


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("[ep] take a placement", None),
        ("[copy] bring rows home", None),
        ("[ops] pass counts on", None),
        ("[ep] the placement of experts", '"the", which is no verb'),
        ("[ep] adds a placement", '"adds", which is no verb'),
        ("[ep] added a placement", '"added", which is no verb'),
        ("[ep] adding a placement", '"adding", which is no verb'),
        ("add a placement", "not of the form"),
        ("[ep] Add a placement", "not of the form"),
        ("[ep] take", "not of the form"),
        (f"[ep] take {'x' * 62}", None),
        (f"[ep] take {'x' * 63}", "has 73 characters"),
    ],
)
def test_subjects(subject: str, problem: str | None) -> None:
    found = problem_of(subject)
    assert found is None if problem is None else problem in str(found)

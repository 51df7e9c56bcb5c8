"""A stand-in for where transformers publishes how weights are converted."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest


def publish_conversion(monkeypatch: pytest.MonkeyPatch, revert: Callable[..., Any]) -> None:
    """Have `transformers.core_model_loading` publish `revert` as its `revert_weight_conversion`."""
    loading = types.ModuleType("transformers.core_model_loading")
    loading.revert_weight_conversion = revert  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", loading)

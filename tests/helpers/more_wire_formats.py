"""A plugin of pytest: the package with the formats of tests/cpp/more_wire_formats.cpp in its table.

It has to be loaded (`-p tests.helpers.more_wire_formats`) before anything imports `moe_comm`.
"""

from __future__ import annotations

import importlib.util
import sys

from tests.helpers.native_programs import build_program

TARGET = "_host_more_wire_formats"


def _load() -> None:
    assert "moe_comm" not in sys.modules
    (file,) = (build_program(TARGET).parent / "more_wire_formats").glob("_host.*.so")
    spec = importlib.util.spec_from_file_location("moe_comm._host", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["moe_comm._host"] = module


_load()

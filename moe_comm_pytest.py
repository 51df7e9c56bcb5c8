"""A pytest plugin: ranks, and `import deep_ep` on the CPU, for the tests of frameworks.

Beside the package and not in it: pytest loads this in every session, and the package where a fixture asks for it.
`docs/testing.md` shows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

__all__ = ["moe_comm_deep_ep", "moe_comm_ranks", "pytest_configure"]


def pytest_configure(config: pytest.Config) -> None:
    """Provide what `MOE_COMM_COMPAT` names before test modules are imported."""
    del config
    if os.environ.get("MOE_COMM_COMPAT"):  # noqa: TID251 - whether to import what reads it
        from moe_comm import compat

        compat.install_from_environment()


@pytest.fixture(scope="session")
def _moe_comm_workers() -> Iterator[None]:
    """End the processes of ranks with the session."""
    yield
    from moe_comm.testing import close_workers

    close_workers()


@pytest.fixture
def moe_comm_ranks(_moe_comm_workers: None) -> Callable[..., list[Any]]:
    """`moe_comm_ranks(fn, num_ranks, *args, mode="processes")`: see `moe_comm.testing.run_ranks`.

    What `moe_comm.compat` provides in this process, it provides in processes of ranks too.
    """
    from moe_comm.testing.compat_ranks import run_ranks_alike

    return run_ranks_alike


@pytest.fixture
def moe_comm_deep_ep() -> Iterator[Any]:
    """The module that `import deep_ep` gives on CPU ranks, also in place of an installed one."""
    from moe_comm import compat

    is_new = "deep_ep" not in compat.installed()
    compat.install("deep_ep", replace=True)
    import deep_ep

    yield deep_ep
    if is_new:
        compat.uninstall("deep_ep")

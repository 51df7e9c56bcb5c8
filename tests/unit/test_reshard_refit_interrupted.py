"""A rank that a signal takes out of a refit and into `recover()`: the others hear of it and come, too."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from moe_comm import PeerFailedError
from moe_comm.resharding import SymmetricCopyService, refit
from moe_comm.resharding.hold import refit_pass
from moe_comm.testing import RankContext
from tests.helpers.threaded_refits import nets, threads

NUM_RANKS = 3


class _TerminatedError(BaseException):
    """Error that a handler of SIGTERM raises."""


pytestmark = pytest.mark.usefixtures("no_refit_caches")


def test_peers_that_compare_checksums_hear_of_a_rank_in_recover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verify = refit_pass.prove_refit
    interrupted: list[int] = []

    def verify_unless_terminated(plan: Any, *args: Any, **options: Any) -> Any:
        if plan.rank == 1 and not interrupted:
            interrupted.append(1)
            raise _TerminatedError
        return verify(plan, *args, **options)

    monkeypatch.setattr(refit_pass, "prove_refit", verify_unless_terminated)

    def run(context: RankContext) -> str:
        src, dst = nets(context, "single", "single")
        with contextlib.closing(SymmetricCopyService(context.group)) as service:

            def swap() -> None:
                refit.swap_model_weights(src, dst, service, group=context.group, verify="checksum")

            text = "terminated"
            try:
                swap()
            except _TerminatedError:
                pass
            except PeerFailedError as error:
                text = str(error)
            assert service.communicator.recover().failed_ranks == ()
            swap()
            return text

    first, second, third = threads(run, NUM_RANKS)
    assert second == "terminated"
    for text in (first, third):
        assert "rank 1 left the operations of this communicator to recover" in text

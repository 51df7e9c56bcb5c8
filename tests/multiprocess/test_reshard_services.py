"""Every copy service is held to the same behavior."""

from __future__ import annotations

import contextlib
import datetime as dt
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_comm import CommunicationError, Communicator, RankThreads
from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.copy_services.gloo_copy_service import GlooCopyService
from moe_comm.resharding.copy_services.matched_transfers import agree
from moe_comm.resharding.copy_services.nvshmem_copy_service import NVSHMEMCopyService
from moe_comm.resharding.copy_services.process_group import timeout_of
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.testing import RankContext, run_ranks
from tests.helpers import copy_service_scripts as scripts
from tests.helpers.copy_services import (
    PATTERNS,
    SERVICES,
    NcclOverGloo,
    move,
    pattern,
    random_tasks,
    unregistered_group,
)
from tests.helpers.failing_ranks import (
    HANG_S,
    SHORT_S,
    die,
    die_after,
    error_of,
    wait_for,
)

TIMEOUT_S = 5 * HANG_S


def run(script: object, num_ranks: int, name: str, *args: object) -> list[object]:
    return run_ranks(
        script,  # type: ignore[arg-type]
        num_ranks,
        name,
        *args,
        mode=SERVICES[name].mode,
        timeout_s=TIMEOUT_S,
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_patterns(num_ranks: int, name: str) -> None:
    run(scripts.run_patterns, num_ranks, name, PATTERNS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize(("num_ranks", "num_tasks"), [(1, 20), (2, 100), (3, 60), (4, 150)])
def test_random_batches(num_ranks: int, num_tasks: int, name: str) -> None:
    run(scripts.run_random, num_ranks, name, (num_ranks, 100 + num_ranks), num_tasks)


@pytest.mark.parametrize("name", [name for name in SERVICES if SERVICES[name].takes_no_task_ids])
def test_transfers_without_ids_match_by_order(name: str) -> None:
    run(scripts.run_without_ids, 3, name)


@pytest.mark.parametrize("name", SERVICES)
def test_models(name: str) -> None:
    run(scripts.run_models, 4, name, ("tp2.ep2", "tp4.ep1", "pp2.ep2"))


@pytest.mark.parametrize("name", SERVICES)
def test_autograd_knows_what_was_written(name: str) -> None:
    run(scripts.run_counted, 2, name)


@pytest.mark.parametrize("name", SERVICES)
def test_two_services(name: str) -> None:
    run(scripts.run_two_services, 3, name)


# ---------------------------------------------------------------------------------------------
# Bad input: every rank is told the same, nothing moves, and the service goes on.

SAID_BY_RUN = {
    "no receiver": ("rank 0", "task 5", "rank 1"),
    "no sender": ("rank 1", "task 6", "rank 0"),
    "sizes": ("task 9", "16 bytes", " 12"),
    "dtypes": ("task 9", "float32", "int32"),
    "duplicate": ("task_id 4", "twice"),
    "fake": ("rank 0", "(4,)", "no memory"),
    "freed": ("rank 0", "task 9", "(4,)", "bytes [0, 16) of a storage of 0 bytes"),
    "freed view": ("rank 1", "(4,)", "bytes [16, 32) of a storage of 0 bytes, which was freed"),
    "some ids": ("task_id", "none"),
    "ids on one side": ("rank 0", "rank 1"),
    "local": ("rank 1", "17"),
    "overlap": ("rank 1", "4", "5"),
    "overlap with oneself": ("rank 1", "two elements in one place", "(2, 1)"),
    "no such rank": ("rank 1", "dest_rank", "got 3"),
    "sparse": ("rank 0", "sparse"),
    "no tensor": ("rank 0", "list"),
    "expanded": ("rank 1", "two elements in one place"),
}
RAISED_BY_SUBMIT = {
    "no such rank": (1, "ValueError"),
    "sparse": (0, "ValueError"),
    "fake": (0, "ValueError"),
    "freed view": (1, "ValueError"),
    "no tensor": (0, "TypeError"),
    "expanded": (1, "ValueError"),
    "overlap with oneself": (1, "ValueError"),
}


NEEDS_IDS = [name for name in SERVICES if not SERVICES[name].takes_no_task_ids]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        (mistake, name)
        for mistake in SAID_BY_RUN
        for name in SERVICES
        if not (mistake in ("some ids", "ids on one side") and name in NEEDS_IDS)
    ],
)
def test_bad_input_is_told_to_every_rank(mistake: str, name: str) -> None:
    results = run(scripts.run_bad, 3, name, mistake)
    said = SAID_BY_RUN[mistake]
    for rank_idx, (submitted, (kind, text)) in enumerate(results):  # type: ignore[misc]
        culprit, submit_kind = RAISED_BY_SUBMIT.get(mistake, (-1, ""))
        if mistake in RAISED_BY_SUBMIT or submitted[0] == "":
            assert submitted[0] == (submit_kind if rank_idx == culprit else ""), submitted
        assert kind == "ValueError", text
        assert all(word in text for word in said), text


@pytest.mark.parametrize("name", SERVICES)
def test_a_rank_that_gives_up_tells_the_others(name: str) -> None:
    results = run(scripts.run_bad, 3, name, "abandon")
    assert results[0] == [("", ""), ("", "")]
    for (submitted, _), (kind, text) in results[1:]:  # type: ignore[misc]
        assert (submitted, kind) == ("", "ValueError")
        assert "rank 0" in text
        assert "out of luck" in text


@pytest.mark.parametrize(
    ("reason", "said"), [("", "gave up, without a reason"), ("no \udcff", r"no \udcff")]
)
def test_reasons_that_cannot_be_told_as_they_are(reason: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^rank 0: {re.escape(said)}$"):
        agree(0, [[]], [[]], reason, lambda payload: [payload])


@pytest.mark.parametrize("name", NEEDS_IDS)
@pytest.mark.parametrize("mistake", ["some ids", "ids on one side"])
def test_ids_are_required(mistake: str, name: str) -> None:
    results = run(scripts.run_bad, 3, name, mistake)
    for rank_idx, (submitted, (kind, text)) in enumerate(results):  # type: ignore[misc]
        if rank_idx == 1 or (mistake == "some ids" and rank_idx == 0):
            assert submitted[0] == "RuntimeError"
            assert "requires a task_id" in submitted[1]
        assert (kind, "requires a task_id" in text) == ("ValueError", True)


@pytest.mark.parametrize(
    "name", ["nvshmem", "symmetric", "symmetric_in_heap", "symmetric_small_slots"]
)
def test_a_prepared_batch_runs_again(name: str) -> None:
    run(scripts.run_prepared, 3, name)


# ---------------------------------------------------------------------------------------------
# Groups whose ranks are not those of the default group.


MAKERS = {
    "gloo": GlooCopyService,
    "nccl_over_gloo": NcclOverGloo,
    "nvshmem": NVSHMEMCopyService,
    "symmetric": SymmetricCopyService,
}


def _in_groups(context: RankContext, name: str, folder: str) -> None:
    make = MAKERS[name]
    halves = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 2], [1, 3])]
    mine = halves[context.rank_idx % 2]
    service = make(mine)
    assert (service.rank, service.world_size) == (context.rank_idx // 2, 2)
    for seed in range(3):
        move(service, random_tasks(2, 30, 10 * (context.rank_idx % 2) + seed))
    service.close()
    if name != "nccl_over_gloo":
        # A group that torch.distributed has no list of, with ranks counted backwards.
        group = unregistered_group(
            context, context.num_ranks - 1 - context.rank_idx, f"{folder}/store"
        )
        service = make(group)
        assert service.rank == 3 - context.rank_idx
        move(service, random_tasks(4, 60, 9))
        move(service, pattern("ring", 4))
        service.close()
    dist.destroy_process_group(mine)


@pytest.mark.parametrize("name", MAKERS)
def test_ranks_are_those_of_the_group(name: str, tmp_path: Path) -> None:
    run_ranks(_in_groups, 4, name, str(tmp_path), timeout_s=TIMEOUT_S)


def _out_of_order(context: RankContext, ranks: RankThreads, name: str) -> None:
    rank_idx = (2 * context.rank_idx + 1) % 3
    make = MAKERS[name]
    with Communicator(ranks[rank_idx]) as communicator:
        service = make(communicator=communicator)
        assert (service.rank, service.world_size) == (rank_idx, 3)
        move(service, random_tasks(3, 60, 9))
        service.close()
        service.close()
        # The communicator is its owner's.
        other = make(communicator=communicator)
        move(other, pattern("ring", 3))
        with pytest.raises(ValueError, match="both say who the ranks are"):
            make(ranks[rank_idx], communicator=communicator)


@pytest.mark.parametrize("name", ["symmetric", "nvshmem"])
def test_a_communicator_that_exists(name: str) -> None:
    run_ranks(_out_of_order, 3, RankThreads(3), name, mode="threads", timeout_s=TIMEOUT_S)


# ---------------------------------------------------------------------------------------------
# A rank that dies.


def _move_together(service: CopyService, num_ranks: int) -> None:
    """After it no rank is in a call of the service, where it would hear what others meet in the next."""
    move(service, pattern("ring", num_ranks))
    dist.barrier()


def _heap_peer_dies(context: RankContext, name: str, is_in_time: bool) -> list[object]:
    communicator = Communicator(None, stall_timeout_s=20.0, arrival_timeout_s=40.0)
    service = MAKERS[name](communicator=communicator)
    _move_together(service, context.num_ranks)
    if context.rank_idx == 1:
        if is_in_time:
            die_after(0.2)
            while True:
                move(service, pattern("large", context.num_ranks))
        die()
    try:
        while True:
            move(service, pattern("large", context.num_ranks))
    except CommunicationError as error:
        told = [type(error).__name__, error.ranks, str(error)]
    assert communicator.recover().failed_ranks == (1,)
    tasks = [
        task for task in random_tasks(context.num_ranks, 50, 2) if 1 not in (task.src, task.dst)
    ]
    move(service, tasks)
    return told


@pytest.mark.parametrize(
    ("name", "is_in_time"), [("symmetric", False), ("symmetric", True), ("nvshmem", True)]
)
def test_the_dead_are_named_and_the_living_go_on(name: str, is_in_time: bool) -> None:
    results = run_ranks(
        _heap_peer_dies, 3, name, is_in_time, fresh=True, expect_dead=[1], timeout_s=TIMEOUT_S
    )
    for rank_idx in (0, 2):
        kind, ranks, text = results[rank_idx]
        assert (kind, ranks) == ("PeerFailedError", (1,)), text


def _patient_group() -> dist.ProcessGroup:
    """A Gloo group of all ranks; to make one takes as long as it takes."""
    return dist.new_group(backend="gloo", timeout=dt.timedelta(seconds=TIMEOUT_S))


def _set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Of what this rank begins from now on."""
    backend = group._get_backend(torch.device("cpu"))
    backend._set_default_timeout(dt.timedelta(seconds=seconds))  # type: ignore[attr-defined]


def _does_not_come(context: RankContext, name: str, folder: str) -> list[object]:
    """Rank 1 does not run until the others have given up."""
    group = _patient_group()
    if name == "gloo":
        service = GlooCopyService(group)
    else:
        service = SymmetricCopyService(communicator=Communicator(None, arrival_timeout_s=SHORT_S))
    _move_together(service, context.num_ranks)
    target = torch.zeros(4)
    _set_timeout(group, SHORT_S)
    if context.rank_idx == 1:
        wait_for(lambda: len(list(Path(folder).iterdir())) == 2)
        return []
    service.submit_send(torch.ones(4), 2 - context.rank_idx, 1)
    service.submit_recv(target, 2 - context.rank_idx, 1)
    error = error_of(service.run)
    (Path(folder) / str(context.rank_idx)).touch()
    assert torch.equal(target, torch.zeros(4))
    return [type(error).__name__, getattr(error, "ranks", None), str(error)]


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
@pytest.mark.parametrize("name", ["gloo", "symmetric"])
def test_a_rank_that_does_not_run(name: str, tmp_path: Path) -> None:
    results = run_ranks(_does_not_come, 3, name, str(tmp_path), fresh=True, timeout_s=TIMEOUT_S)
    for kind, ranks, text in results[0], results[2]:
        if name == "gloo":
            # An all-gather of Gloo does not tell who is late, and a rank whose limit ran out first has
            # closed its connections.
            assert kind in ("PeerTimeoutError", "PeerFailedError"), text
            assert kind == "PeerFailedError" or ranks == (), text
        else:
            assert (kind, ranks) == ("PeerTimeoutError", (1,)), text


def _gloo_peer_dies(context: RankContext, is_late: bool) -> list[object]:
    service = GlooCopyService(_patient_group())
    _move_together(service, context.num_ranks)
    if context.rank_idx == 1:
        if not is_late:
            die()
        # Once all have agreed.
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(service, "_move", lambda *args: die())
    service.submit_send(torch.ones(4), (context.rank_idx + 1) % 3, 1)
    service.submit_recv(torch.ones(4), (context.rank_idx - 1) % 3, 1)
    error = error_of(service.run)
    later = error_of(service.run)
    return [type(error).__name__, getattr(error, "ranks", None), str(error), str(later)]


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "during"])
def test_gloo_names_what_failed_when_a_peer_dies(is_late: bool) -> None:
    results = run_ranks(
        _gloo_peer_dies, 3, is_late, fresh=True, expect_dead=[1], timeout_s=TIMEOUT_S
    )
    for rank_idx in (0, 2):
        kind, ranks, text, later = results[rank_idx]
        assert (kind, ranks) == ("PeerFailedError", (1,)), text
        assert f"GlooCopyService, rank {rank_idx}: " in text
        assert "must be made anew" in later


def _gloo_peers_stop(context: RankContext, dies: bool, folder: str) -> list[object]:
    """Rank 0 waits for 1, which has agreed and moves nothing, and for 2, which may die instead."""
    group = _patient_group()
    service = GlooCopyService(group)
    move(service, pattern("ring", context.num_ranks))
    ended = Path(folder) / "ended"
    patch = pytest.MonkeyPatch()
    if context.rank_idx == 1:
        patch.setattr(service, "_move", lambda *args: wait_for(ended.exists))
    elif context.rank_idx == 2:
        patch.setattr(service, "_move", lambda *args: die() if dies else wait_for(ended.exists))
    peers = [1, 2] if context.rank_idx == 0 else [0]
    for peer in peers:
        service.submit_send(torch.ones(4 << 20), peer, context.rank_idx)
        service.submit_recv(torch.ones(8 << 20)[::2], peer, peer)
    dist.barrier()
    if context.rank_idx != 0:
        service.run()
        return []
    if not dies:
        _set_timeout(group, SHORT_S)
    errors = [error_of(service.run), error_of(service.run)]
    ended.touch()
    return [[type(e).__name__, getattr(e, "ranks", None), str(e)] for e in errors]


@pytest.mark.parametrize(
    "dies",
    [
        pytest.param(False, id="stopped", marks=pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)),
        pytest.param(True, id="died"),
    ],
)
def test_gloo_waits_for_all_peers_at_once(dies: bool, tmp_path: Path) -> None:
    results = run_ranks(
        _gloo_peers_stop,
        3,
        dies,
        str(tmp_path),
        fresh=True,
        expect_dead=[2] if dies else [],
        timeout_s=TIMEOUT_S,
    )
    ranks = (2,) if dies else (1, 2)
    kind = "PeerFailedError" if dies else "PeerTimeoutError"
    assert results[0][0][:2] == [kind, ranks], results[0]
    assert results[0][1][:2] == ["CommunicationError", ranks], results[0]
    assert "must be made anew" in results[0][1][2]


def _default_timeout(context: RankContext) -> list[float]:
    group = dist.group.WORLD
    assert group is not None
    _set_timeout(group, 77.0)
    with contextlib.closing(GlooCopyService()) as service:
        dist.barrier()  # a rank that still connects cannot do so with one that has closed
        return [timeout_of(group).total_seconds(), timeout_of(service._wire_group).total_seconds()]


def test_the_group_of_a_service_has_the_timeout_of_the_default_group() -> None:
    assert run_ranks(_default_timeout, 2, fresh=True) == [[77.0, 77.0]] * 2

"""`verify_refit` between ranks as threads, after copies made by hand."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import moe_comm
from moe_comm import errors
from moe_comm.resharding.hold import verification
from moe_comm.resharding.hold.verification import RefitProof, verify_refit
from moe_comm.resharding.move import stale
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.resharding.plan.transfer_op import TransferOp
from moe_comm.resharding.plan.transform_protocol import ReshardTransform
from tests.helpers.loopback_service import module_of

ROWS = (slice(0, 4), slice(0, 6))
REST = (slice(4, 8), slice(0, 6))
HERE = (slice(0, 4), slice(0, 6))


def source() -> torch.Tensor:
    return torch.arange(48, dtype=torch.float32).view(8, 6)


@dataclasses.dataclass
class Refit:
    """Rank 0 has `w`; ranks 1 and 2 take its upper and lower half as `part`."""

    plans: list[ReshardPlan]
    sources: list[nn.Module | None]
    targets: list[nn.Module | None]

    def verify(self, **options: Any) -> list[RefitProof | BaseException]:
        ranks = moe_comm.RankThreads(3)
        outcomes: list[Any] = [None] * 3

        def be_rank(i: int) -> None:
            try:
                outcomes[i] = verify_refit(
                    self.plans[i], self.sources[i], self.targets[i], ranks[i], **options
                )
            except (errors.RefitError, ValueError) as error:
                outcomes[i] = error
            except BaseException as error:  # noqa: BLE001 - looked at by the caller
                outcomes[i] = error
                ranks.abort()

        threads = [threading.Thread(target=be_rank, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def error(self, **options: Any) -> Any:
        """Error of every rank."""
        outcomes = self.verify(**options)
        assert all(isinstance(outcome, Exception) for outcome in outcomes), outcomes
        assert len({(type(outcome), str(outcome)) for outcome in outcomes}) == 1
        return outcomes[0]

    @property
    def stale_ranks(self) -> list[int]:
        return [i for i, target in enumerate(self.targets) if target and stale.is_stale(target)]


def make(
    src: torch.dtype = torch.float32,
    wire: torch.dtype | None = None,
    dst: torch.dtype = torch.float32,
) -> Refit:
    sends, receives = [], []
    for rank, rows in ((1, ROWS), (2, REST)):
        task_id = rank << 42
        sends.append(
            TransferOp(
                "w", rank, True, rows, HERE, task_id, my_dtype=src, peer_dtype=dst, wire_dtype=wire
            )
        )
        receives.append(
            TransferOp(
                "part", 0, False, HERE, rows, task_id, my_dtype=dst, peer_dtype=src, wire_dtype=wire
            )
        )
    values = source().to(src)
    arrived = values.to(wire or src).to(dst)
    return Refit(
        [ReshardPlan(sends, []), ReshardPlan([], receives[:1]), ReshardPlan([], receives[1:])],
        [module_of(w=values), None, None],
        [None, module_of(part=arrived[:4].clone()), module_of(part=arrived[4:].clone())],
    )


def test_a_whole_refit_is_proven() -> None:
    assert make().verify() == [
        RefitProof(0, 0, ()),
        RefitProof(1, 96, ()),
        RefitProof(1, 96, ()),
    ]


@pytest.mark.parametrize(
    ("src", "wire", "dst"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float16, torch.float64),
    ],
)
def test_a_change_of_dtype_is_repeated_at_the_source(
    src: torch.dtype, wire: torch.dtype, dst: torch.dtype
) -> None:
    refit = make(src=src, wire=wire, dst=dst)
    assert [proof.num_pieces for proof in refit.verify()] == [0, 1, 1]
    refit.targets[2].part.data[0, 0] += 1
    assert isinstance(refit.error(), errors.RefitError)


def test_one_wrong_element_is_told_on_every_rank() -> None:
    refit = make()
    refit.targets[2].part.data[3, 5] += 1
    error = refit.error()
    assert error.ranks == (2,)
    assert "rank 2: part, piece 0 [0:4, 0:6], from rank 0 (w): the source has checksum" in str(
        error
    )
    assert refit.stale_ranks == [2]
    reason = stale.stale_reason(refit.targets[2])
    assert reason.startswith("verification failed: rank 2: part")


def test_two_swapped_rows_are_found() -> None:
    refit = make()
    refit.targets[1].part.data = refit.targets[1].part.data[[1, 0, 2, 3]]
    assert refit.error().ranks == (1,)


def test_a_stale_target_is_told_on_every_rank() -> None:
    refit = make()
    stale.mark_stale(refit.targets[1], "torn")
    error = refit.error()
    assert isinstance(error, errors.RefitError)
    assert str(error) == "the target on rank 1 is stale: torn"
    assert error.ranks == (1,)


def test_many_differences_are_counted() -> None:
    refit = make()
    cells = [(slice(i, i + 1), slice(j, j + 1)) for i in range(4) for j in range(6)]
    for plan, mine, peer in ((refit.plans[0], True, 1), (refit.plans[1], False, 0)):
        ops = [
            TransferOp("w" if mine else "part", peer, mine, cell, cell, (1 << 42) + i)
            for i, cell in enumerate(cells)
        ]
        if mine:
            plan.send_ops = ops + plan.send_ops[1:]
        else:
            plan.recv_ops = ops
    refit.targets[1].part.data += 1
    text = str(refit.error())
    assert text.count("checksum") == 6
    assert text.endswith("; and 18 more")
    assert "piece 5 [0:1, 5:6]" in text


@pytest.mark.parametrize(("rank", "name"), [(0, "w"), (2, "part")])
def test_a_missing_parameter_is_told_on_every_rank(rank: int, name: str) -> None:
    refit = make()
    side = refit.sources if rank == 0 else refit.targets
    side[rank] = module_of(other=source())
    error = refit.error()
    assert isinstance(error, ValueError)
    assert str(error).startswith(f"rank {rank}: the plan ")
    assert f"{name}, which this rank does not have" in str(error)
    side[rank] = None
    assert isinstance(refit.error(), ValueError)
    assert refit.stale_ranks == []


@pytest.mark.parametrize("is_sent", [False, True])
def test_plans_that_do_not_fit_are_told(is_sent: bool) -> None:
    refit = make()
    if is_sent:
        refit.plans[2].recv_ops.clear()
    else:
        refit.plans[0].send_ops.pop()
    expected = "sends w, piece 0 [4:8, 0:6], to rank 2" if is_sent else "does not send task"
    assert expected in str(refit.error())


class _Only(ReshardTransform):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def should_transform(self, param_name: str) -> bool:
        return param_name in self.names


@pytest.mark.parametrize("name", ["w", "part"])
def test_a_transformed_parameter_is_not_proven(name: str) -> None:
    """Also where only one end has the transform."""
    refit = make()
    refit.targets[1].part.data += 1
    proofs = refit.verify(transform=_Only({name}))
    assert proofs[1:] == [RefitProof(0, 0, ("part",))] * 2
    refit.plans[1].transform = _Only({"part"})
    proofs = refit.verify()
    assert proofs[1:] == [RefitProof(0, 0, ("part",)), RefitProof(1, 96, ())]


def test_a_piece_without_an_id_is_refused() -> None:
    refit = make()
    for op in (*refit.plans[0].send_ops, *refit.plans[1].recv_ops):
        op.task_id = None
    assert "w: a piece without a task id" in str(refit.error())


def test_one_rank_with_itself() -> None:
    op = make().plans[0].send_ops[0]
    send = dataclasses.replace(op, peer_rank=0, peer_slice=REST)
    receive = dataclasses.replace(op, peer_rank=0, is_send=False, my_slice=REST, peer_slice=ROWS)
    values = source()
    values[4:] = values[:4]
    plan = ReshardPlan([send], [receive])
    ranks = moe_comm.RankThreads(1)
    src, dst = module_of(w=source()), module_of(w=values)
    assert verify_refit(plan, src, dst, ranks[0]) == RefitProof(1, 96, ())
    with pytest.raises(errors.RefitError, match="rank 0: w, piece 0"):
        verify_refit(plan, src, module_of(w=source()), ranks[0])


# ---------------------------------------------------------------------------------------------
# Pieces of equal shape between the same ranks, which change places: every byte is there.

NUM_PIECES = 4


def _many_pieces() -> Refit:
    """Rank 0 has `w` and `v`; rank 1 takes their rows as `part` and `more`, rank 2 those of `w`."""
    sends: list[TransferOp] = []
    receives: dict[int, list[TransferOp]] = {1: [], 2: []}
    for rank, name, mine in ((1, "w", "part"), (1, "v", "more"), (2, "w", "part")):
        for row in range(NUM_PIECES):
            cells = (slice(row, row + 1), slice(0, 6))
            task_id = (rank << 42) + (NUM_PIECES if name == "v" else 0) + row
            sends.append(TransferOp(name, rank, True, cells, cells, task_id))
            receives[rank].append(TransferOp(mine, 0, False, cells, cells, task_id))
    w, v = source()[:NUM_PIECES], source()[:NUM_PIECES] + 100
    return Refit(
        [ReshardPlan(sends, []), ReshardPlan([], receives[1]), ReshardPlan([], receives[2])],
        [module_of(w=w, v=v), None, None],
        [None, module_of(part=w.clone(), more=v.clone()), module_of(part=w.clone())],
    )


def _swap(left: torch.Tensor, right: torch.Tensor) -> None:
    kept = left.clone()
    left.copy_(right)
    right.copy_(kept)


def _swap_rows(refit: Refit) -> None:
    part = refit.targets[1].part.data
    _swap(part[0], part[3])


def _swap_parameters(refit: Refit) -> None:
    _swap(refit.targets[1].part.data[2], refit.targets[1].more.data[2])


def _swap_whole_parameters(refit: Refit) -> None:
    _swap(refit.targets[1].part.data, refit.targets[1].more.data)


def _turn_rows(refit: Refit) -> None:
    refit.targets[1].part.data.copy_(refit.targets[1].part.data.roll(1, dims=0))


@pytest.mark.parametrize(
    ("change", "num_pieces"),
    [
        (_swap_rows, 2),
        (_swap_parameters, 2),
        (_swap_whole_parameters, 2 * NUM_PIECES),
        (_turn_rows, NUM_PIECES),
    ],
)
def test_pieces_that_change_places_are_found(
    change: Callable[[Refit], None], num_pieces: int
) -> None:
    refit = _many_pieces()
    assert [proof.num_pieces for proof in refit.verify()] == [0, 2 * NUM_PIECES, NUM_PIECES]
    change(refit)
    error = refit.error()
    assert isinstance(error, errors.RefitError)
    assert error.ranks == (1,)
    text = str(error)
    assert text.count("the source has checksum") == min(num_pieces, 6)
    assert ("; and 2 more" in text) == (num_pieces > 6)
    assert refit.stale_ranks == [1]


def test_pieces_of_two_ranks_that_change_places_are_found() -> None:
    refit = _many_pieces()
    _swap(refit.targets[1].part.data[0], refit.targets[2].part.data[1])
    assert refit.error().ranks == (1, 2)


def test_a_hash_of_checksums_alone_would_miss_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that ranks compare first say which piece has which checksum."""

    def without_ids(
        bootstrap: Any, sent: Any, received: Any, skipped: set[Any]
    ) -> list[tuple[int, int]]:
        def sums_by_pair(end: Any) -> dict[tuple[int, int], list[int]]:
            sums: dict[tuple[int, int], list[int]] = {}
            for key, piece in end.pieces().items():
                sums.setdefault(key[:2], []).append(*piece.checksums.values())
            return {pair: sorted(values) for pair, values in sums.items()}

        gathered = bootstrap.all_gather((sums_by_pair(sent), sums_by_pair(received)))
        all_sent: dict[Any, Any] = {}
        all_received: dict[Any, Any] = {}
        for theirs_sent, theirs_received in gathered:
            all_sent |= theirs_sent
            all_received |= theirs_received
        return [pair for pair in all_sent if all_sent[pair] != all_received.get(pair)]

    monkeypatch.setattr(verification, "_mismatched_pairs", without_ids)
    with pytest.raises(AssertionError):
        test_pieces_that_change_places_are_found(_swap_rows, 2)

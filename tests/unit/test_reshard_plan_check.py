"""Plans that are wrong in one place, and what the checks say about them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch

from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.metadata import ParameterMetadata
from moe_comm.resharding.plan import plan_check
from moe_comm.resharding.plan.planner import build_plan_from_rosters, index_metadata_rosters
from moe_comm.resharding.plan.reshard_plan import PartialReduction, ReshardPlan, TensorSpec
from moe_comm.resharding.plan.transfer_op import TransferOp, pack_task_id


def meta(rank: int, rows: int, ranks: list[int]) -> ParameterMetadata:
    return ParameterMetadata(
        name="w",
        shape=(rows, 3),
        dtype=torch.bfloat16,
        element_size=2,
        owner_rank=rank,
        is_tp=len(ranks) > 1,
        tensor_parallel_group_ranks=ranks,
    )


def sound_plans() -> dict[int, ReshardPlan]:
    """Two ranks with halves; rank 1 and rank 2 want all of it."""
    rosters = index_metadata_rosters(
        [
            ([meta(0, 4, [0, 1])], []),
            ([meta(1, 4, [0, 1])], [meta(1, 8, [1])]),
            ([], [meta(2, 8, [2])]),
        ]
    )
    return {rank: build_plan_from_rosters(*rosters, rank) for rank in range(3)}


def test_sound_plans() -> None:
    plans = sound_plans()
    plan_check.verify_plans(plans)
    assert plan_check.bytes_per_pair(plans[0]) == {(0, 1): 24, (0, 2): 24}
    assert plan_check.bytes_per_pair(plans[1]) == {(0, 1): 24, (1, 1): 24, (1, 2): 24}
    assert plan_check.bytes_per_pair(plans[2]) == {(0, 2): 24, (1, 2): 24}


def test_the_text_of_a_plan() -> None:
    plan = sound_plans()[2]
    plan.reductions.append(PartialReduction("v", (0,), "sum"))
    lines = plan_check.format_plan(plan).splitlines()
    assert lines[0] == "rank 2 of 3: 0 sends, 2 receives, 48 bytes"
    assert lines[1].split() == ["0", "->", "2", "24", "bytes"]
    assert lines[3] == (
        f"  w[0:4],[0:3] <- rank 0 [0:4],[0:3] bfloat16 task {pack_task_id(2, 0, 0)}"
    )
    assert lines[5] == "  v: sum over mesh dimensions (0,) first"
    assert plan_check.format_plan(plan, max_ops=1).splitlines()[4] == "  and 1 more pieces"


def recv(plan: ReshardPlan, **fields: object) -> None:
    plan.recv_ops[0] = dataclasses.replace(plan.recv_ops[0], **fields)  # type: ignore[arg-type]


def send(plan: ReshardPlan, **fields: object) -> None:
    plan.send_ops[0] = dataclasses.replace(plan.send_ops[0], **fields)  # type: ignore[arg-type]


ALL_ROWS = slice(0, 3)
# Changes of one rank's plan, and what the check of that plan alone says.
LOCAL_FAULTS: list[tuple[int, Callable[[ReshardPlan], object], str]] = [
    (
        2,
        lambda p: p.recv_ops.pop(),
        r"w: elements \[\[4, 8\], \[0, 3\]\] of shape \(8, 3\) .* never",
    ),
    (2, lambda p: p.recv_ops.pop(0), r"w: elements \[\[0, 4\], \[0, 3\]\] .* are written never"),
    (
        2,
        lambda p: recv(p, my_slice=(slice(2, 6), ALL_ROWS)),
        r"w: elements \[\[0, 2\], \[0, 3\]\] of shape \(8, 3\) are written never",
    ),
    (
        2,
        lambda p: recv(p, my_slice=(slice(0, 5), ALL_ROWS), peer_slice=(slice(0, 5), ALL_ROWS)),
        r"w: elements \[\[4, 5\], \[0, 3\]\] of shape \(8, 3\) are written more than once",
    ),
    (2, lambda p: recv(p, my_slice=(slice(6, 10), ALL_ROWS)), r"w: \[6:10\] of dimension 0"),
    (2, lambda p: recv(p, my_slice=(slice(0, 4, 2), ALL_ROWS)), r"w: \[0:4:2\] of dimension 0"),
    (2, lambda p: recv(p, my_slice=(slice(0, 4),)), r"w: 1 slices for a tensor of shape \(8, 3\)"),
    (
        2,
        lambda p: recv(p, my_slice=(slice(0, 2), ALL_ROWS)),
        r"w: .* \(2, 3\), that of rank 0 \(4, 3\)",
    ),
    (2, lambda p: recv(p, my_view=(4, 5)), r"w: destination .* cannot be viewed as \(4, 5\)"),
    (
        2,
        lambda p: recv(p, my_view=(24,), my_slice=(slice(0, 12),), peer_slice=(slice(0, 12),)),
        r"w: pieces are of different views \[\(8, 3\), \(24,\)\]",
    ),
    (
        2,
        lambda p: recv(p, my_dtype=torch.float32),
        "w: .* torch.float32, but the destination is torch.bf",
    ),
    (2, lambda p: recv(p, wire_dtype=None), "w: task id .* does not state its dtypes"),
    (2, lambda p: recv(p, peer_rank=3), "w: rank 3 is not in a group of 3 ranks"),
    (2, lambda p: recv(p, task_id=None), "w: a piece has no task id"),
    (2, lambda p: recv(p, task_id=p.recv_ops[1].task_id), "w: task id .* does not come after"),
    (2, lambda p: recv(p, task_id=0), "w: task id 0 is of destination rank 0, but .* rank 2"),
    (2, lambda p: recv(p, is_send=True), "w: a send is among the others"),
    (2, lambda p: p.destinations.clear(), "w: is received, but is none of the plan's destinations"),
    (
        2,
        lambda p: p.destinations.update(v=TensorSpec((2,), torch.int8)),
        r"v: elements \[\[0, 2\]\]",
    ),
    (2, lambda p: setattr(p, "rank", -1), "the plan does not say whose it is: rank -1 of 3"),
    (0, lambda p: p.sources.clear(), "w: is sent, but is none of the plan's sources"),
    (0, lambda p: send(p, my_slice=(slice(1, 5), ALL_ROWS)), r"w: \[1:5\] of dimension 0"),
    (
        0,
        lambda p: send(p, my_dtype=torch.float32),
        "w: .* torch.float32, but the source is torch.bf",
    ),
]


@pytest.mark.parametrize(("rank", "spoil", "message"), LOCAL_FAULTS)
def test_a_fault_in_one_plan(
    rank: int, spoil: Callable[[ReshardPlan], object], message: str
) -> None:
    plans = sound_plans()
    plan_check.verify_plan(plans[rank])
    spoil(plans[rank])
    with pytest.raises(PlanError, match=f"^{message}"):
        plan_check.verify_plan(plans[rank])
    with pytest.raises(PlanError):
        plan_check.verify_plans(plans)


# Each plan is sound by itself.
PAIR_FAULTS: list[tuple[int, Callable[[ReshardPlan], object], str]] = [
    (0, lambda p: p.send_ops.pop(), "rank 0 to 2: is received, but not sent"),
    (0, lambda p: send(p, peer_rank=2, task_id=pack_task_id(2, 1, 0)), "is sent, but not received"),
    (1, lambda p: recv(p, peer_rank=2), "states source rank 0, the receiver 2"),
    (
        0,
        lambda p: send(p, peer_slice=(slice(4, 8), ALL_ROWS)),
        r"destination elements \(slice\(4, 8",
    ),
    (
        1,
        lambda p: recv(p, peer_slice=(slice(1, 5), ALL_ROWS)),
        r"source elements .*er \(slice\(1, 5",
    ),
    (0, lambda p: send(p, peer_dtype=torch.float32), "destination dtype torch.float32, .*bfloat16"),
    (1, lambda p: recv(p, peer_dtype=torch.float16), "source dtype torch.bfloat16, .*float16"),
    (1, lambda p: recv(p, wire_dtype=torch.float16), "wire dtype torch.bfloat16, .*float16"),
    (0, lambda p: send(p, peer_view=(24,)), r"destination view \(24,\), the receiver None"),
    (1, lambda p: recv(p, peer_view=(12,)), r"source view None, the receiver \(12,\)"),
]


@pytest.mark.parametrize(("rank", "spoil", "message"), PAIR_FAULTS)
def test_two_ends_that_disagree(
    rank: int, spoil: Callable[[ReshardPlan], object], message: str
) -> None:
    plans = sound_plans()
    spoil(plans[rank])
    plans[rank].send_ops.sort(key=lambda op: op.task_id or 0)
    plan_check.verify_plan(plans[rank])
    with pytest.raises(PlanError, match=f"^w: task id .*{message}"):
        plan_check.verify_plans(plans)


def test_plans_of_other_ranks() -> None:
    plans = sound_plans()
    with pytest.raises(PlanError, match="rank 0 of 2 says that it is of rank 0 of 3"):
        plan_check.verify_plans({rank: plans[rank] for rank in range(2)})
    plans[0] = copy.deepcopy(plans[1])
    with pytest.raises(PlanError, match="rank 0 of 3 says that it is of rank 1 of 3"):
        plan_check.verify_plans(plans)


def test_slices_without_bounds_are_the_whole_dimension() -> None:
    everything = (slice(None), slice(None))
    spec = TensorSpec((2, 2), torch.float32)
    op = TransferOp("w", 0, True, everything, everything, pack_task_id(0, 0, 0))
    op.my_dtype = op.peer_dtype = op.wire_dtype = torch.float32
    plan = ReshardPlan(
        [op],
        [dataclasses.replace(op, is_send=False)],
        sources={"w": spec},
        destinations={"w": spec},
        num_ranks=1,
        rank=0,
    )
    plan_check.verify_plans({0: plan})
    with pytest.raises(PlanError, match=r"w: .* does not state its bounds"):
        plan_check.bytes_per_pair(plan)


def test_errors_are_of_both_kinds_that_callers_expect() -> None:
    assert issubclass(PlanError, ValueError)
    assert issubclass(PlanError, RuntimeError)

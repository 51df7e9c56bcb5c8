"""The host backend for tensors of a device whose memory the host cannot read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_comm import Communicator, Layout
from moe_comm.compat.deep_ep.allocator import storage_of
from moe_comm.testing.case_list import CASES, RANK_REDUCTION_CASES
from moe_comm.testing.cases import Case
from moe_comm.testing.conformance import CHECKS, check_case
from moe_comm.testing.launch import RankContext, close_workers, run_ranks
from moe_comm.testing.target import Target
from tests.helpers import guarded_device
from tests.helpers.staged_calls import CALLS_AND_KINDS, compare, connect, given_to, make

TARGET = Target(name="host", make=make, connect=connect)


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    """Processes of ranks know the device for good, and from before their first backward: none is shared."""
    close_workers()
    yield
    close_workers()


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize(
    "case", [*CASES, *RANK_REDUCTION_CASES], ids=lambda case: f"ranks{case.num_ranks}-{case.name}"
)
def test_case(case: Case) -> None:
    check_case(TARGET, case)


@pytest.mark.parametrize("check", CHECKS)
def test_check(check: str) -> None:
    CHECKS[check](TARGET)


@pytest.mark.parametrize(("name", "kind"), CALLS_AND_KINDS)
def test_calls_give_on_a_device_what_they_give_on_the_cpu(name: str, kind: str) -> None:
    run_ranks(compare, 3, name, kind, guarded_device.DEVICE, timeout_s=200.0)


def test_rows_of_a_device_reach_other_nodes() -> None:
    run_ranks(compare, 3, "routed", "", guarded_device.DEVICE, 1, timeout_s=200.0)


def cross(context: RankContext) -> None:
    """Bytes of a low-latency dispatch and combine are those of the rows that there are."""
    given = given_to(connect(context.group))
    x, ids = given.x, given.topk_idx
    row_bytes = x.shape[1] * x.element_size()
    before = guarded_device.bytes_across()
    there = given.buffer.dispatch(x, ids, layout=Layout.LOW_LATENCY)
    num_rows = int(there.num_tokens_per_expert.sum())
    assert 0 < num_rows < len(there.x)
    offsets = there.expert_offsets.numel() * 4
    sent = len(x) * row_bytes + ids.numel() * 8
    assert guarded_device.bytes_across() - before == sent + num_rows * row_bytes + offsets
    before = guarded_device.bytes_across()
    given.buffer.combine(there.x, there.handle)
    assert guarded_device.bytes_across() - before == (num_rows + len(x)) * row_bytes


def test_of_a_low_latency_window_only_rows_that_were_sent_cross() -> None:
    run_ranks(cross, 3, timeout_s=100.0)


def told(context: RankContext) -> list[str]:
    """Texts of what this rank hears of mistakes of one rank; the buffer works afterwards."""
    given = given_to(connect(context.group))
    buffer, x, ids = given.buffer, given.x, given.topk_idx
    there = buffer.dispatch(x, ids)
    rows = given.rows(len(there.x))
    is_wrong = context.rank_idx == 2
    cpu = x.cpu() if is_wrong else x
    texts = []
    for call in (
        lambda: buffer.dispatch(cpu, ids),
        lambda: buffer.dispatch(x, ids.cpu() if is_wrong else ids),
        lambda: buffer.combine(rows, there.handle, out=torch.empty_like(cpu)),
    ):
        with pytest.raises(ValueError, match="must be on") as found:
            call()
        texts.append(str(found.value))
    guarded_device.set_capturing(is_wrong)
    for call in (
        lambda: buffer.dispatch(x, ids),
        lambda: buffer.dispatch(x, None, handle=there.handle),
        lambda: buffer.combine(rows, there.handle),
    ):
        with pytest.raises(ValueError, match="cannot be captured") as found:
            call()
        texts.append(str(found.value))
    guarded_device.set_capturing(False)
    if is_wrong:
        buffer._backend._pins = True  # type: ignore[attr-defined]  # torch has no such memory for this device
    with pytest.raises(ValueError, match="rank 2") as found:
        buffer.dispatch(x, ids)
    texts.append(str(found.value))
    buffer._backend._pins = False  # type: ignore[attr-defined]
    y = buffer.combine(buffer.dispatch(x, ids).x, there.handle)
    num_choices = (ids.cpu() >= 0).sum(1, keepdim=True)
    assert torch.equal(y.cpu(), (x.cpu().float() * num_choices).bfloat16())
    return texts


def test_what_one_rank_cannot_do_every_rank_refuses() -> None:
    by_rank = run_ranks(told, 3, timeout_s=100.0)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    texts = by_rank[0]
    device = f"{guarded_device.DEVICE}:0"
    assert texts[:3] == [
        f"rank 2: {name} must be on {device}, got cpu" for name in ("x", "topk_idx", "out")
    ]
    assert set(texts[3:6]) == {
        f"rank 2: the host backend cannot be captured into a graph: rows on {device} pass through the "
        "host's memory, and the call waits for their copies; call it outside of the capture"
    }
    assert "rank 2: " in texts[6]


def refused(context: RankContext) -> list[str]:
    guarded_device.register()
    device = guarded_device.DEVICE
    texts = []
    for wishes in (
        {"device": device if context.rank_idx else "cpu", "backend": "host"},
        {"device": device, "backend": "reference"},
        {"device": device},
        {"device": device, "backend": "host", "num_sms": 4},
        {"device": f"{device}:3", "backend": "host"},
        {"device": "meta", "backend": "host"},
    ):
        with pytest.raises(ValueError, match=r"device|num_sms") as found:
            Communicator(context.group, **wishes)  # type: ignore[arg-type]
        texts.append(str(found.value))
    with connect(context.group) as parent:
        child = Communicator(context.group, device, parent)
        assert (child.backend, child.device) == ("host", parent.device)
        assert parent.empty(3, dtype=torch.int64).is_cpu
        assert storage_of(parent, 8).device == parent.device
        parent.use_on(None)  # type: ignore[arg-type]  # results are no windows
    return texts


def test_communicators_of_a_device() -> None:
    by_rank = run_ranks(refused, 2, timeout_s=100.0)
    assert by_rank[0] == by_rank[1]
    device, version = guarded_device.DEVICE, torch.__version__
    both = "rank {0}: {2}; rank {1}: {2}".format
    only = f'device must be cpu or cuda, or the backend "host", got {device} with '
    assert by_rank[0][:5] == [
        f"ranks ask for different communicators: device is cpu on rank 0 and {device} on rank 1",
        both(0, 1, f"{only}'reference'"),
        both(0, 1, f"{only}'auto'"),
        both(0, 1, "num_sms is for kernels of a GPU, got 4 with the host backend"),
        both(0, 1, f"device {device}:3 is not among the 1 of its kind that torch {version} finds"),
    ]
    assert f"torch {version} cannot use device meta" in by_rank[0][5]

"""Parts of `deep_ep` that need no peers: sizes, configurations, events, one rank's buffer."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from moe_comm import RankThreads
from moe_comm.compat import deep_ep
from moe_comm.compat.deep_ep import (
    Buffer,
    BufferAllocator,
    Config,
    EventHandle,
    EventOverlap,
    handle_counts,
)
from moe_comm.compat.deep_ep.utils import align, calc_diff, ceil_div, per_token_cast_to_fp8
from moe_comm.ep.config import default_expert_rank

# DeepEP's recommendations: ranks -> dispatch, combine; the last value rounded up to whole chunks.
RECOMMENDED = {
    2: ((24, 256, 6, 132), (10, 256, 6, 132)),
    8: ((6, 256, 6, 132), (4, 256, 6, 132)),
    16: ((36, 288, 20, 140), (4, 288, 12, 132)),
    64: ((32, 288, 8, 128), (1, 288, 8, 128)),
    160: ((28, 720, 12, 132), (2, 720, 8, 128)),
}


def values(config: Config) -> tuple[int, ...]:
    return (
        config.num_max_nvl_chunked_send_tokens,
        config.num_max_nvl_chunked_recv_tokens,
        config.num_max_rdma_chunked_send_tokens,
        config.num_max_rdma_chunked_recv_tokens,
    )


@pytest.fixture
def buffer() -> Buffer:
    return Buffer(RankThreads(1)[0], 1024, 256)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 7, 8, 9, 12, 64, 100, 161, 1000])
def test_configurations_for_any_number_of_ranks(num_ranks: int) -> None:
    for config in (Buffer.get_dispatch_config(num_ranks), Buffer.get_combine_config(num_ranks)):
        assert config.num_sms == Buffer.num_sms
        assert config.get_nvl_buffer_size_hint(4096, num_ranks) % 128 == 0
        assert (config.get_rdma_buffer_size_hint(4096, num_ranks) > 0) == (num_ranks > 8)


def test_size_hints_are_those_of_the_formulas() -> None:
    config = Config(20, 6, 256, 6, 128)
    # Per slot: the row, source metadata, 128 ids, weights and scales.
    slot = 14336 + 8 + 128 * 8 + 128 * 4 + 128 * 4
    within = 10 * 8 * (2 * 1 + 3) * 4 + 10 * 8 * 256 * slot
    assert config.get_nvl_buffer_size_hint(14336, 8) == align(within, 128)
    within = 10 * 8 * (2 * 4 + 3) * 4 + 10 * 8 * 256 * slot
    assert config.get_nvl_buffer_size_hint(14336, 32) == align(within, 128)
    assert config.get_rdma_buffer_size_hint(14336, 8) == 0
    between = 10 * 4 * (18 * 2 * 4) + 10 * 4 * 132 * 2 * (slot + 16)  # 128 rounded up to sixes
    assert config.get_rdma_buffer_size_hint(14336, 32) == align(between, 128)

    num_max, hidden, num_experts = 128, 7168, 256
    dispatch = 16 + max(2 * hidden, hidden + 4 * hidden // 128)
    combine = 4 * hidden // 128 + 2 * hidden
    send = max(num_max * dispatch, num_experts * num_max * combine)
    recv = num_experts * num_max * max(dispatch, combine)
    total = 2 * (send + recv + align(4 * num_experts, 128))
    hint = Buffer.get_low_latency_rdma_size_hint(num_max, hidden, 8, num_experts)
    assert 0 < hint - total <= 128
    assert hint % 128 == 0


@pytest.mark.parametrize("num_ranks", RECOMMENDED)
def test_recommended_values(num_ranks: int) -> None:
    dispatch, combine = RECOMMENDED[num_ranks]
    assert values(Buffer.get_dispatch_config(num_ranks)) == dispatch
    assert values(Buffer.get_combine_config(num_ranks)) == combine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "num_sms must be >= 0, got -1"),
        ((20, 256, 256), "must be less than num_max_nvl_chunked_recv_tokens, got 256 and 256"),
        ((20, 6, 256, 128, 128), "must be less than num_max_rdma_chunked_recv_tokens"),
        ((20, 6, 256, 0, 128), "num_max_rdma_chunked_send_tokens must be >= 1, got 0"),
    ],
)
def test_configurations_that_cannot_be(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Config(*arguments)


def test_configuration_rounds_up_to_whole_chunks() -> None:
    assert Config(20, 6, 256, 6, 128).num_max_rdma_chunked_recv_tokens == 132
    assert Config(20, 6, 256, 64, 65).num_max_rdma_chunked_recv_tokens == 128
    with pytest.raises(TypeError, match=re.escape("num_sms must be an int, got 2.0")):
        Config(2.0)  # type: ignore[arg-type]


def test_num_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffer, "num_sms", 20)
    Buffer.set_num_sms(24)
    assert Buffer.get_dispatch_config(4).num_sms == 24
    for bad in (7, 0):
        with pytest.raises(ValueError, match=f"got {bad}"):
            Buffer.set_num_sms(bad)


def test_events() -> None:
    seen = []
    overlap = EventOverlap(EventHandle(), (torch.zeros(1),))
    overlap.register_hook_after_wait(lambda: seen.append("hook"))
    with overlap:
        seen.append("body")
    overlap.current_stream_wait()
    assert seen == ["body", "hook"]  # the hook runs once
    with overlap(release_handle=True):
        pass
    assert (overlap.event, overlap.extra_tensors) == (None, None)
    with overlap:  # nothing to wait for
        pass
    with pytest.raises(ValueError, match="no event"):
        overlap.current_stream_wait()


def test_one_rank_without_a_launcher(buffer: Buffer) -> None:
    assert (buffer.rank, buffer.group_size) == (0, 1)
    assert Buffer.is_sm90_compiled() is True
    topk_idx = torch.tensor([[0, 2], [-1, -1], [1, -1]])
    x = torch.arange(24.0).view(3, 8)
    weights = torch.ones(3, 2)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 3)
    assert (per_rank.tolist(), per_expert.tolist()) == ([2], [1, 1, 1])
    recv_x, *_, counts, handle, _ = buffer.internode_dispatch(
        x, None, per_rank, None, in_rank, per_expert, topk_idx, weights
    )
    assert torch.equal(recv_x, x[[0, 2]])
    assert counts == [1, 1, 1]
    assert torch.equal(buffer.internode_combine(recv_x, handle)[0], x * in_rank)
    stream = buffer.get_comm_stream()
    with torch.cpu.stream(stream):
        pass
    buffer.clean_low_latency_buffer(8, 64, 3)
    for call in (buffer.dispatch_pcie, buffer.combine_pcie):
        with pytest.raises(NotImplementedError, match="NVLink"):
            call(x)


def test_local_buffer_tensor(buffer: Buffer) -> None:
    whole = buffer.get_local_buffer_tensor(torch.int32)
    assert whole.shape == (256,)
    whole.copy_(torch.arange(256))
    view = buffer.get_local_buffer_tensor(torch.int32, (2, 3), offset=4)
    assert view.tolist() == [[4, 5, 6], [7, 8, 9]]
    assert buffer.get_local_buffer_tensor(torch.bfloat16, None, 28, True).shape == (100,)
    for size, offset in (((256,), 1), (None, 257)):
        with pytest.raises(ValueError, match="do not fit into 256"):
            buffer.get_local_buffer_tensor(torch.int32, size, offset)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"num_nvl_bytes": -1}, ValueError, "num_nvl_bytes must be >= 0, got -1"),
        ({"allow_mnnvl": 2}, TypeError, "allow_mnnvl must be a bool, got 2"),
        ({"num_qps_per_rank": "x"}, TypeError, "num_qps_per_rank must be an int, got 'x'"),
        ({"comm": object()}, ValueError, "a group or an mpi4py comm, got both"),
    ],
)
def test_options_without_effect_are_validated(
    options: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        Buffer(RankThreads(1)[0], **options)  # type: ignore[arg-type]


def test_a_buffer_over_mpi_ranks() -> None:
    class Comm:
        """Answers of mpi4py's communicator of one rank."""

        def Get_rank(self) -> int:  # noqa: N802
            return 0

        def Get_size(self) -> int:  # noqa: N802
            return 1

        def allgather(self, item: object) -> list[object]:
            return [item]

    buffer = Buffer(comm=Comm(), explicitly_destroy=True)
    assert buffer.get_dispatch_layout(torch.tensor([[0]]), 1)[0].tolist() == [1]
    buffer.destroy()
    assert buffer.runtime is None
    with pytest.raises(ValueError, match="destroyed"):
        buffer.get_dispatch_layout(torch.tensor([[0]]), 1)


def test_destroy_must_be_asked_for(buffer: Buffer) -> None:
    with pytest.raises(ValueError, match="explicitly_destroy=True"):
        buffer.destroy()


def test_layout_names_a_bad_expert() -> None:
    placement = default_expert_rank(5, 2)
    for bad in (5, -2):
        with pytest.raises(ValueError, match=re.escape(f"[-1, 5), got {bad}")):
            handle_counts.dispatch_layout(torch.tensor([[0, bad]]), placement, 2)


def test_layout_range_past_2_to_31() -> None:
    counts = torch.tensor([[3, 2**31 + 5, 1]])
    packed = handle_counts.packed_layout_range(counts)[0].tolist()
    assert [value & 0xFFFFFFFF for value in packed] == counts[0].tolist()
    assert [value >> 32 for value in packed[:2]] == [0, 3]


def test_math() -> None:
    assert (ceil_div(7, 3), align(7, 3), ceil_div(0, 3)) == (3, 9, 0)
    x = torch.randn(4, 100)
    assert calc_diff(x, x) == pytest.approx(0.0, abs=1e-12)
    assert calc_diff(torch.zeros(2), torch.full((2,), 2.0)) == pytest.approx(1 - 2 * 3 / 10)
    data, scales = per_token_cast_to_fp8(x)
    assert (data.shape, scales.shape) == ((4, 100), (4, 1))
    assert torch.equal(scales[:, 0], x.abs().amax(1) / torch.full((4,), 448.0))
    _, packed = per_token_cast_to_fp8(torch.randn(4, 1024), True, True)
    assert (packed.dtype, packed.shape) == (torch.int32, (4, 2))
    with pytest.raises(ValueError, match="needs round_scale=True"):
        per_token_cast_to_fp8(x, use_ue8m0=True)


def test_a_plan_becomes_tensors_of_the_storage() -> None:
    plan = BufferAllocator()
    first, scalar, empty = (plan.allocate(shape, torch.float32) for shape in ((3, 5), (), (0, 4)))
    second = plan.allocate((7,), torch.bfloat16)
    objects = [first, scalar, empty, second]
    assert all(each.is_meta for each in objects)
    assert plan.alignment == deep_ep.get_num_allocation_alignment() == 2 << 20
    assert plan.num_bytes == 3 * plan.alignment  # nothing for the tensor without elements
    with torch.inference_mode():
        storage = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    plan.materialize(storage)
    assert plan.materialized
    places = [(each.data_ptr() - storage.data_ptr()) // plan.alignment for each in (first, scalar)]
    assert [*places, (second.data_ptr() - storage.data_ptr()) / plan.alignment] == [0, 1, 2]
    assert [each.shape for each in objects] == [(3, 5), (), (0, 4), (7,)]
    second.fill_(1)
    assert torch.equal(storage[2 * plan.alignment :][:14].view(torch.bfloat16), second)
    for again in (lambda: plan.materialize(storage), lambda: plan.allocate((1,), torch.int8)):
        with pytest.raises(ValueError, match="this one's 4 tensors have their storage already"):
            again()


def test_a_plan_that_cannot_be_made_stays_a_plan() -> None:
    plan = BufferAllocator()
    with pytest.raises(ValueError, match="must plan tensors with elements, got 0 bytes"):
        plan.check()
    tensor = plan.allocate((4,), torch.int64)
    storage = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    for wrong, text in (
        (storage.view(torch.int8), "got torch.int8"),
        (storage[1:], rf"got torch.uint8 of shape \({len(storage) - 1},\)"),
        (torch.zeros(1, dtype=torch.uint8).expand(plan.num_bytes), r"strides \(0,\)"),
    ):
        with pytest.raises(ValueError, match=text):
            plan.materialize(wrong)
    watched = weakref.ref(tensor)
    with pytest.raises(ValueError, match="tensor 0 of a BufferAllocator must have no weak refer"):
        plan.materialize(storage)
    assert tensor.is_meta
    del watched
    plan.materialize(storage)
    assert tensor.data_ptr() == storage.data_ptr()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: deep_ep.PPBuffer(None, 32, 4), r"PPBuffer .*torch\.distributed\.send and recv"),
        (lambda: deep_ep.EngramBuffer(None, 0, 0), r"^EngramBuffer reads .*dispatch and combine"),
        (
            lambda: deep_ep.EngramBuffer.get_storage_size_hint(None, [4], 64, 8, 2),
            r"^EngramBuffer.get_storage_size_hint .*BucketBuffer\.all_gather",
        ),
        (
            lambda: deep_ep.EngramBuffer.get_theoretical_config(None, 1, 8, 2),
            r"^EngramBuffer.get_theoretical_config reads",
        ),
    ],
)
def test_what_is_not_there_says_what_is(call: Callable[[], object], text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        call()


def test_handles_of_nccl_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        def _comm_ptr(self) -> int:
            return address

    class Group(dist.ProcessGroup):
        def _get_backend(self, device: torch.device) -> Backend:
            assert device.type == "cuda"
            return Backend()

    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    group = Group(0, 1)
    handle = deep_ep.comm.get_nccl_comm_handle(group)
    assert deep_ep.comm.get_nccl_comm_handle(group) is handle
    assert not handle.managed
    address = 1 << 40
    assert handle.get() == 1 << 40
    address = 0  # of a communicator that torch has not made yet
    with pytest.raises(ValueError, match="torch has no NCCL communicator of"):
        handle.get()
    address = 1
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo")
    for one in (handle, deep_ep.comm.get_nccl_comm_handle(RankThreads(1)[0])):
        with pytest.raises(ValueError, match="torch has no NCCL communicator of"):
            one.get()
    with pytest.raises(NotImplementedError, match=r"force_new_comm must be False.*new_group"):
        deep_ep.comm.get_nccl_comm_handle(group, True)
    deep_ep.destroy_all_managed_nccl_comm()
    assert deep_ep.comm.get_nccl_comm_handle(group) is not handle
    deep_ep.destroy_all_managed_nccl_comm()


def test_alignments() -> None:
    assert deep_ep.get_num_tma_alignment() == 32
    assert deep_ep.get_num_rdma_alignment() % deep_ep.get_num_tma_alignment() == 0


def test_names() -> None:
    assert deep_ep.topk_idx_t is torch.int64
    for name in deep_ep.__all__:
        assert hasattr(deep_ep, name)

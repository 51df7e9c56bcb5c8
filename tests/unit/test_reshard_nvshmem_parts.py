"""The executor of the copy pipeline by itself, and what it stands on."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_comm import Communicator
from moe_comm.resharding import nvshmem_copy_service
from moe_comm.resharding.nvshmem_copy_service import (
    DoubleBufferManager,
    GPUResourceManager,
    KernelLauncher,
    PipelineExecutor,
    RemoteCopyService,
    validation,
)
from moe_comm.resharding.nvshmem_copy_service.core.gpu_resource_manager import HostEvent, HostStream
from moe_comm.resharding.nvshmem_copy_service.logger import PELogger
from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import (
    IterationSchedule,
    ReceiveRequest,
    ScheduledBatch,
    SendRequest,
)
from moe_comm.resharding.plan.transfer_op import pack_task_id
from tests.helpers.failing_ranks import PROGRAM_S
from tests.helpers.rank_threads import on_ranks

SLOT = 4096


class Slots:
    """A buffer manager without memory."""

    def __init__(self, calls: list[str], error: Exception | None = None) -> None:
        self._calls = calls
        self._error = error

    def exchange(
        self, iteration: int, sent: ScheduledBatch | None, received: ScheduledBatch | None
    ) -> None:
        to = "nobody" if sent is None else sent.dest_pe
        source = "nobody" if received is None else received.src_pe
        self._calls.append(f"exchange {iteration} to {to} from {source}")
        if self._error is not None:
            raise self._error

    def give_up(self, reason: str) -> None:
        self._calls.append(f"give up: {reason}")


ROLES = ("pack", "unpack", "send", "copy")


def recording_executor(calls: list[str], error: Exception | None = None) -> PipelineExecutor:
    launcher: Any = types.SimpleNamespace(
        launch_pack=lambda plan, *rest: calls.append(f"pack {plan[0]} {rest}"),
        launch_unpack=lambda plan, *rest: calls.append(f"unpack {plan[0]} {rest}"),
    )
    executor = PipelineExecutor(launcher, Slots(calls, error), 0)  # type: ignore[arg-type]
    executor.set_streams(*"abcd", *ROLES)
    executor.set_events((1, 2), (3, 4))
    return executor


def batch(src_pe: int, dest_pe: int, label: str) -> ScheduledBatch:
    plan: Any = (label, None, None, 1)
    return ScheduledBatch(src_pe, dest_pe, 0, 0, gpu_plan=plan, total_size=9)


def schedule_of(*iterations: tuple[ScheduledBatch | None, ScheduledBatch | None]) -> Any:
    return [IterationSchedule(send=sent, recv=received) for sent, received in iterations]


def test_bytes_within_a_pe() -> None:
    source, target = torch.arange(4, dtype=torch.int16), np.zeros(4, dtype=np.int16)
    recording_executor([]).process_self_moves(
        [SendRequest(1, source, 2, 4, 0), SendRequest(2, source.data_ptr(), 0, 2, 0)],
        [ReceiveRequest(2, target, 0, 2, 0), ReceiveRequest(1, target, 4, 4, 0)],
    )
    assert target.tolist() == [0, 0, 1, 2]


def test_order_of_packing_moving_and_unpacking() -> None:
    """A slot is packed before it moves, and unpacked before a peer may write it again."""
    calls: list[str] = []
    recording_executor(calls).execute_pipeline(
        schedule_of(
            (None, batch(1, 0, "r0")),
            (batch(0, 2, "s1"), batch(2, 0, "r1")),
            (batch(0, 1, "s2"), None),
            (None, None),
            (None, batch(2, 0, "not run")),
        ),
        4,
    )
    assert calls == [
        "pack s1 ('a', 'pack', 2)",
        "exchange 0 to nobody from 1",
        "pack s2 ('a', 'pack', 1)",
        "unpack r0 ('b', 'unpack', 3)",
        "exchange 1 to 2 from 2",
        "unpack r1 ('b', 'unpack', 4)",
        "exchange 2 to 1 from nobody",
        "exchange 3 to nobody from nobody",
    ]


def test_peers_hear_of_what_fails_between_exchanges_and_of_nothing_else() -> None:
    calls: list[str] = []
    executor = recording_executor(calls)
    executor.kernel_launcher.launch_pack = lambda *args: 1 // 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        executor.execute_pipeline(schedule_of((batch(0, 1, "a"), None)), 1)
    assert calls[-1].startswith("give up: ZeroDivisionError: ")
    executor = recording_executor(calls, error=ValueError("rank 1: no"))
    with pytest.raises(ValueError, match="rank 1: no"):
        executor.execute_pipeline(schedule_of((batch(0, 1, "a"), None)), 1)
    assert calls[-1] == "exchange 0 to 1 from nobody"


def blank_executor() -> PipelineExecutor:
    return PipelineExecutor(KernelLauncher(), DoubleBufferManager(SLOT), 0)


RAW = dict(zip(("pack_stream", "unpack_stream", "send_stream", "copy_stream"), "abcd", strict=True))


@pytest.mark.parametrize("suffix", ["", "_wrapper"])
@pytest.mark.parametrize("roles", [ROLES, ("pack", "unpack", "copy")])
def test_streams_by_name(suffix: str, roles: tuple[str, ...]) -> None:
    executor = blank_executor()
    executor.set_streams(**RAW, **{f"torch_{role}_stream{suffix}": role for role in roles})
    assert [getattr(executor, name) for name in RAW] == list("abcd")
    by_position = blank_executor()
    by_position.set_streams(*"abcd", *roles)
    for role in ROLES:
        expected = role if role in roles else None
        for made in (executor, by_position):
            assert getattr(made, f"torch_{role}_stream_wrapper") == expected


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ("abcdef", {}, "missing streams"),
        ("abcdefghi", {}, "takes 7 or 8 streams, got 9"),
        ("abcdefgh", {"torch_copy_stream": 1}, "takes 7 or 8 streams, got 9"),
        ("abcdef", {"torch_pack_stream": 1, "torch_copy_stream": 1}, "twice"),
        ("abcd", {"torch_pack_stream": 1, "torch_pack_stream_wrapper": 2}, "twice"),
        ("abcdef", {"torch_copy_stream": 1, "torch_put_stream": 1}, "unknown streams"),
    ],
)
def test_bad_streams(args: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        blank_executor().set_streams(*args, **kwargs)


def test_too_few_events() -> None:
    with pytest.raises(ValueError, match="unpack_events must have at least 2, got 1"):
        blank_executor().set_events([1, 2], [1])
    with pytest.raises(ValueError, match="barrier_events must have at least 2, got 1"):
        blank_executor().set_events([1, 2], [1, 2], [1])
    with pytest.raises(RuntimeError, match=r"set_streams\(\) and set_events\(\)"):
        blank_executor().execute_pipeline([], 0)


def test_self_moves_need_partners() -> None:
    executor = recording_executor([])
    with pytest.raises(ValueError, match=r"without a partner: \[5, 6\]"):
        executor.process_self_moves([SendRequest(5, 0, 0, 4, 0)], [ReceiveRequest(6, 0, 0, 4, 0)])
    with pytest.raises(ValueError, match="task 5: PE 0 sends itself 4 bytes and receives 3"):
        executor.process_self_moves([SendRequest(5, 0, 0, 4, 0)], [ReceiveRequest(5, 0, 0, 3, 0)])
    # Those of other PEs are none of its business.
    executor.process_self_moves([SendRequest(5, 0, 0, 4, 1)], [ReceiveRequest(6, 0, 0, 4, 1)])


# ---------------------------------------------------------------------------------------------
# Parts.


def test_host_streams_and_events() -> None:
    stream, event = HostStream("pack"), HostEvent()
    assert event.query()
    assert not event.is_recorded
    event.record(stream)
    assert event.is_recorded
    stream.wait_event(event)
    stream.wait_stream(HostStream("other"))
    stream.synchronize()
    stream.sync()
    event.synchronize()


def test_a_launch_records_its_event_and_an_empty_one_does_not() -> None:
    launcher = KernelLauncher()
    src, dst = torch.arange(50, dtype=torch.uint8), torch.zeros(50, dtype=torch.uint8)
    plan = (
        torch.tensor([src.data_ptr(), src.data_ptr() + 30]),
        torch.tensor([dst.data_ptr(), dst.data_ptr() + 30]),
        torch.tensor([20, 20]),
        2,
    )
    event = HostEvent()
    with pytest.raises(RuntimeError, match=r"call load_kernels\(\) first"):
        launcher.launch_pack(plan, None, None, event)
    launcher.load_kernels()
    launcher.launch_unpack(None, None, None, event)
    launcher.launch_pack((*plan[:3], 0), None, None, event)
    assert not event.is_recorded
    for launch in (launcher.launch_pack, launcher.launch_unpack):
        dst.zero_()
        launch(plan, None, None, event)
        assert event.is_recorded
        expected = torch.where((src < 20) | (src >= 30), src, 0)
        assert torch.equal(dst, expected)
    with pytest.raises(ValueError, match="chunk 1 has -1 bytes"):
        launcher.launch_pack((*plan[:2], torch.tensor([1, -1]), 2), None, None, event)


def test_devices_without_kernels_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"it moves CPU tensors, got device cuda"):
        KernelLauncher(device="cuda").load_kernels()
    with pytest.raises(RuntimeError, match="device must be cpu, got cuda"):
        GPUResourceManager("cuda").init()
    with pytest.raises(RuntimeError, match="needs a communicator to allocate"):
        DoubleBufferManager().allocate()
    with pytest.raises(RuntimeError, match=r"call allocate\(\) first"):
        DoubleBufferManager().get_send_slot(0)
    assert DoubleBufferManager().slot_size == 256 * 1024 * 1024


def test_slots_by_iteration() -> None:
    def body(communicator: Communicator) -> None:
        manager = DoubleBufferManager(1000, communicator)
        manager.allocate()
        slots = [manager.get_send_slot(i) for i in range(2)]
        slots += [manager.get_recv_slot(i) for i in range(2)]
        assert [slot.numel() for slot in slots] == [1000] * 4
        assert len({slot.data_ptr() for slot in slots}) == 4
        for value, slot in enumerate(slots):
            slot.fill_(10 * communicator.rank_idx + value)
        assert manager.get_recv_slot(7).data_ptr() == slots[3].data_ptr()
        rank_idx = communicator.rank_idx
        sent, received = batch(rank_idx, 1 - rank_idx, "s"), batch(1 - rank_idx, rank_idx, "r")
        sent.total_size = received.total_size = 999
        manager.exchange(1, sent, received)
        assert slots[3].tolist() == [10 * (1 - rank_idx) + 1] * 999 + [10 * rank_idx + 3]
        sent.total_size = 1001
        with pytest.raises(ValueError, match="rank 0: a slot has 1000 bytes, got a batch of 1001"):
            manager.exchange(1, sent if rank_idx == 0 else None, None)
        sent.total_size = 9
        with pytest.raises(ValueError, match="9 bytes of uint8 to rank 1, which does not receive"):
            manager.exchange(1, sent if rank_idx == 0 else None, None)
        if rank_idx == 0:
            manager.give_up("no room")
        else:
            with pytest.raises(ValueError, match="rank 0: gave up: no room"):
                manager.exchange(0, None, None)
        manager.free()
        manager.free()
        other = DoubleBufferManager(64 << rank_idx, communicator)
        with pytest.raises(
            ValueError, match=r"slot_size=64 on rank 0 met .*slot_size=128 on rank 1"
        ):
            other.allocate()

    on_ranks(2, body)


def test_resources() -> None:
    with Communicator(backend="host") as communicator:
        resources = GPUResourceManager(communicator=communicator)
        assert resources.get_stream("pack") is None
        resources.init()
        resources.init()
        assert (resources.my_pe, resources.n_pes) == (0, 1)
        for name in ROLES:
            stream = resources.get_stream(name)
            assert isinstance(stream, HostStream)
            assert stream is resources.get_torch_stream(name)
            assert stream is getattr(resources, f"{name}_stream")
        assert resources.get_stream("other") is None
        assert [len(events) for events in resources.create_events(3)] == [3, 3, 3]
        resources.finalize()
        with pytest.raises(ValueError, match="group must be None"):
            resources.init(communicator.bootstrap)
        with pytest.raises(ValueError, match="both say who the PEs are"):
            RemoteCopyService(communicator.bootstrap, communicator=communicator)
        assert (resources.my_pe, resources.initialized) == (-1, False)
        communicator.require_native()  # was given, so it lives


def test_names_that_are_gone_say_what_to_write() -> None:
    for name, hint in (("FullDuplexScheduler", "CommunicationScheduler"), ("compat", "nvshmem4py")):
        with pytest.raises(ImportError, match=f"has no {name}: .*{hint}"):
            getattr(nvshmem_copy_service, name)
    assert not hasattr(nvshmem_copy_service, "other")
    with pytest.raises(TypeError, match="takes no alignment, packing: it packs and orders no"):
        RemoteCopyService(packing="first_fit", alignment=16)


@pytest.mark.full
def test_import_brings_in_no_device_library() -> None:
    code = (
        "import sys, moe_comm.resharding.nvshmem_copy_service as s; "
        "bad = {'nvshmem', 'cupy', 'megatron'} & {name.split('.')[0] for name in sys.modules}; "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PROGRAM_S)


def test_documented_pattern() -> None:
    data = validation.generate_deterministic_data(9, 300, "cpu")
    assert data.tolist() == [(9 * 31 + p) % 256 for p in range(300)]
    assert validation.validate_received_data(9, data, 300).passed
    data[257] += 1
    data[299] += 3
    result = validation.validate_received_data(9, data, 300, src_pe=4)
    assert result == validation.ValidationResult(
        9,
        300,
        passed=False,
        src_pe=4,
        mismatches=2,
        first_mismatch_idx=257,
        first_mismatch_expected=(9 * 31 + 257) % 256,
        first_mismatch_actual=(9 * 31 + 257) % 256 + 1,
    )


@pytest.mark.parametrize(
    ("linear_passes", "displace"),
    [
        (True, lambda data, make: torch.cat([data[256:], data[:256]])),
        (True, lambda data, make: make(7 + 256, 4096, "cpu")),
        (False, lambda data, make: torch.cat([data[8:], data[:8]])),
        (False, lambda data, make: torch.cat([data[:4088], data[:8]])),
    ],
)
def test_the_mixed_pattern_sees_displaced_bytes(
    linear_passes: bool, displace: Callable[..., torch.Tensor]
) -> None:
    for pattern, make, passes in (
        ("linear", validation.generate_deterministic_data, linear_passes),
        ("mixed", validation.generate_mixed_data, False),
    ):
        data = make(7, 4096, "cpu")
        assert validation.validate_received_data(7, data, 4096, pattern=pattern).passed
        displaced = displace(data, make)
        assert displaced.shape == data.shape
        result = validation.validate_received_data(7, displaced, 4096, pattern=pattern)
        assert result.passed == passes


def test_mixed_pattern_is_even_and_stable() -> None:
    data = validation.generate_mixed_data(pack_task_id(5, 6, 7), 1 << 18, "cpu")
    counts = torch.bincount(data.long(), minlength=256)
    assert 900 < int(counts.min()) <= int(counts.max()) < 1150
    assert torch.equal(validation.generate_mixed_data(pack_task_id(5, 6, 7), 77, "cpu"), data[:77])
    with pytest.raises(ValueError, match="task 1: 5 bytes to compare, got 4"):
        validation.validate_received_data(1, data[:4], 5)
    with pytest.raises(ValueError, match="pattern must be one of"):
        validation.validate_received_data(1, data, 5, pattern="other")


def test_summaries_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    good = validation.ValidationResult(1, 10, passed=True, src_pe=0)
    bad = validation.ValidationResult(
        2, 10, passed=False, src_pe=3, mismatches=1, first_mismatch_idx=4, first_mismatch_actual=9
    )
    PELogger.init(0, "INFO", logs_dir=None)
    with caplog.at_level(logging.INFO):
        validation.log_validation_summary(validation.ValidationSummary(1, 1, 0, 10, [good]))
        summary = validation.ValidationSummary(2, 1, 1, 20, [good, bad])
        validation.log_validation_summary(summary)
    PELogger.shutdown()
    assert not summary.all_passed
    assert "all 1 tasks are right, 10 bytes" in caplog.text
    assert "1 of 2 tasks are wrong" in caplog.text
    assert "from PE 3, 1 tasks: 2 (byte 4: expected 0, got 9)" in caplog.text


def test_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PELogger.info("to nobody")
    PELogger.init(3, "WARN")
    PELogger.info("unheard")
    PELogger.warn("heard %d", 7)
    assert PELogger.is_enabled_for(logging.ERROR)
    assert not PELogger.is_enabled_for(logging.INFO)
    PELogger.set_level("TRACE")
    PELogger.trace("low")
    PELogger.summary("all in all")
    PELogger.shutdown()
    PELogger.critical("to nobody")
    text = (tmp_path / "logs" / "pe_3.log").read_text()
    assert "[PE 3]" in text
    assert "[WARNING] heard 7" in text
    assert "low" in text
    assert "[SUMMARY] all in all" in text
    assert "unheard" not in text
    assert "nobody" not in text
    with pytest.raises(ValueError, match=r"level must be one of .*, got 'LOUD'"):
        PELogger.init(3, "loud".upper())


def test_a_service_writes_no_files_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def body(communicator: Communicator) -> None:
        service = RemoteCopyService(communicator=communicator, slot_bytes=SLOT)
        service.init()
        service.finalize()
        communicator.bootstrap.all_gather(None)
        assert list(tmp_path.iterdir()) == []
        communicator.bootstrap.all_gather(None)
        service = RemoteCopyService(
            communicator=communicator, slot_bytes=SLOT, logs_dir=tmp_path / "here"
        )
        service.init()
        service.finalize()

    on_ranks(2, body)
    for pe in range(2):
        assert f"PE {pe} of 2" in (tmp_path / "here" / f"pe_{pe}.log").read_text()

"""Ranks as threads that run every operation for a while; run as a program under ThreadSanitizer."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable

import torch

import moe_comm
from moe_comm.ep.backends.simt import Stream, use_stream
from moe_comm.resharding.copy_services.batched_copy import BatchedCopy, CopyItem
from moe_comm.resharding.nvshmem_copy_service import RemoteCopyService

NUM_RANKS = 3
NUM_ROUNDS = 20
NUM_STREAM_ROUNDS = 6
# This is run by its path, and so finds no other helper.
CONFIG = moe_comm.EpConfig(
    num_experts=8, num_topk=3, hidden=64, num_max_tokens_per_rank=64, dtype=torch.float32
)


def exchange(
    buffer: moe_comm.EpBuffer,
    round_idx: int,
    generator: torch.Generator,
    await_results: Callable[[], object] = lambda: None,
) -> None:
    """One dispatch and combine, in another mode every round; results may be read after `await_results`."""
    num_tokens = 5 + (buffer.communicator.rank_idx + round_idx) % 40
    x = torch.randn(num_tokens, CONFIG.hidden, generator=generator)
    topk_idx = torch.rand(num_tokens, CONFIG.num_experts, generator=generator).topk(3).indices
    topk_weights = torch.rand(num_tokens, CONFIG.num_topk, generator=generator)
    layout = moe_comm.Layout(round_idx % 2)
    result = buffer.dispatch(
        x,
        topk_idx,
        topk_weights,
        layout=layout,
        expert_alignment=4,
        async_op=round_idx % 3 == 0,
    )
    result.event.wait()
    await_results()
    if round_idx % 5 == 0:
        expert_out = buffer.empty_expert_output(result.handle)
        expert_out.copy_(result.x)
    else:
        expert_out = result.x.clone()
    combined = buffer.combine(
        expert_out,
        result.handle,
        topk_weights=topk_weights if layout is moe_comm.Layout.EXPERT_MAJOR else None,
        row_weights=result.topk_weights,
        async_op=round_idx % 4 == 1,
    )
    combined.event.wait()
    await_results()
    assert torch.equal(combined.topk_weights, topk_weights)


def exchange_in_streams(group: moe_comm.Bootstrap, generator: torch.Generator) -> None:
    """The same by emulated kernels whose caller is a stream."""
    with (
        use_stream(Stream()) as stream,
        moe_comm.Communicator(group, backend="simt") as communicator,
        moe_comm.EpBuffer(communicator, CONFIG) as buffer,
    ):
        for round_idx in range(NUM_STREAM_ROUNDS):
            exchange(buffer, round_idx, generator, stream.synchronize)


def copy_batch(engine: BatchedCopy, round_idx: int) -> None:
    """Tensors of every rank to every rank, through slots and in place, some of them strided."""
    comm = engine.communicator
    sends: list[CopyItem] = []
    recvs: list[CopyItem] = []
    for task_id in range(12):
        peer = (comm.rank_idx + task_id) % comm.num_ranks
        size = 1 + (round_idx * 37 + task_id * 101) % 400
        sends.append((task_id, torch.full((size,), task_id + comm.rank_idx), peer))
        sender = (comm.rank_idx - task_id) % comm.num_ranks
        if task_id % 3 == 0:
            target = comm.empty(size, dtype=torch.int64)
        else:
            target = torch.zeros(2 * size, dtype=torch.int64)[:: 1 + task_id % 2][:size]
        recvs.append((task_id, target, sender))
    prepared = engine.prepare(sends, recvs)
    for _ in range(2):
        engine.run(prepared)
        for task_id, target, sender in recvs:
            assert bool((target == task_id + sender).all())
            target.zero_()
        comm.all_gather(b"")  # nobody writes what others still look at


def copy_through_slots(communicator: moe_comm.Communicator) -> None:
    """Every rank sends every other one more than fits in the slots, a few times."""
    service = RemoteCopyService(communicator=communicator, slot_bytes=4096)
    service.init("WARNING")
    num_bytes = 30_000
    source = torch.zeros(num_bytes, dtype=torch.uint8)
    targets = [torch.zeros_like(source) for _ in range(NUM_RANKS)]
    for peer_idx, target in enumerate(targets):
        service.register_send(service.my_pe, source, 0, num_bytes, peer_idx)
        service.register_receive(peer_idx, target, 0, num_bytes, peer_idx)
    service.schedule()
    for round_idx in range(NUM_ROUNDS):
        source.fill_(10 * service.my_pe + round_idx)
        service.run()
        for peer_idx, target in enumerate(targets):
            assert bool((target == 10 * peer_idx + round_idx).all())
    service.finalize()


def main() -> int:
    torch.set_num_threads(1)
    ranks = moe_comm.RankThreads(NUM_RANKS)
    failures: list[str] = []

    def be_rank(rank_idx: int) -> None:
        try:
            generator = torch.Generator().manual_seed(rank_idx)
            with moe_comm.Communicator(ranks[rank_idx], backend="host", num_threads=2) as comm:
                with (
                    moe_comm.EpBuffer(comm, CONFIG) as buffer,
                    BatchedCopy(comm, slot_bytes=256, num_slots=2) as engine,
                ):
                    for round_idx in range(NUM_ROUNDS):
                        exchange(buffer, round_idx, generator)
                        copy_batch(engine, round_idx)
                copy_through_slots(comm)
                exchange_in_streams(ranks[rank_idx], generator)
        except BaseException:  # noqa: BLE001 - reported by main; the other ranks must not wait
            failures.append(traceback.format_exc())
            ranks.abort()

    threads = [threading.Thread(target=be_rank, args=(i,)) for i in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        sys.stderr.write(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

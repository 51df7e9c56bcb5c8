"""From chunks to buckets, and the loop that moves them."""

from __future__ import annotations

import collections
import functools
import hashlib
import time
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from moe_comm.peers.gather_objects import gather_objects_of_group
from moe_comm.resharding.copy_services.matched_transfers import Transfer, agree
from moe_comm.resharding.ir import groups
from moe_comm.resharding.ir.transfer import TransferType
from moe_comm.resharding.ir.units import ENTRY_ALIGNMENT, Bucket, BucketEntry, Chunk, logger

_POLL_S = 20e-6


def chunk_to_bucket_ops(chunks: Iterable[Chunk], bucket_size: int) -> list[Bucket]:
    """Pack chunks that go one way into buckets of about `bucket_size` bytes.

    Chunks of equal `bucket_key` accumulate until they reach `bucket_size`; one that reaches it alone
    gets its own bucket. So does a chunk of a `Partial` source, on both ends: the ranks of a reduction
    ship its cells to different places, and must all the same reduce them in one order.

    Buckets come in the order of their first chunks. Chunks of one key are the same, in the same
    order, on all ranks that have it; hence these form the same buckets, and all ranks meet theirs in
    the order of one list: which is what keeps `bucket_comm` from waiting in circles.

    Args:
        chunks: Chunks of any number of tensors, which all ranks take in one order.
        bucket_size: Bytes of a bucket; equal on all ranks.

    Raises:
        ValueError: `bucket_size` is not positive, or chunks of one way lie on different devices.
    """
    if bucket_size < 1:
        raise ValueError(f"bucket_size must be >= 1, got {bucket_size}")
    packed: list[list[BucketEntry]] = []
    is_open: dict[tuple[object, ...], list[BucketEntry]] = {}
    for chunk in chunks:
        nbytes = chunk.nbytes
        key = (id(chunk.group), chunk.transfer_type, chunk.is_source, *chunk.bucket_key)
        is_alone = chunk.no_coalesce or bool(chunk.source_partial_groups) or nbytes >= bucket_size
        entries = [] if is_alone else is_open.setdefault(key, [])
        if not entries:
            packed.append(entries)
        offset = _end(entries)
        entries.append(BucketEntry(offset=offset, nbytes=nbytes, chunk=chunk))
        if not is_alone and offset + nbytes >= bucket_size:
            del is_open[key]
    return [_bucket(entries) for entries in packed]


def bucket_comm(buckets: Sequence[Bucket], max_in_flight: int = 2) -> None:
    """Move buckets, in their order, and return when all of this rank's have arrived.

    All ranks that have a part in a bucket call it. Of `buckets` of any kind, no more than
    `max_in_flight` hold memory at a time: the next is prepared when the oldest has ended. A rank
    whose oldest bucket has ended can begin its next one, and all ranks have their buckets in one
    order, so that the first bucket that has not ended can always proceed.

    Args:
        buckets: Buckets from `chunk_to_bucket_ops`.
        max_in_flight: Most buckets in flight, at least 1; may differ between ranks.

    Raises:
        PeerFailedError, PeerTimeoutError: A transfer failed or did not end within the timeout of
            its process group; the message names its source and destinations. Buckets that ended
            before have been written.
        ValueError: `max_in_flight` is not positive.
    """
    if max_in_flight < 1:
        raise ValueError(f"max_in_flight must be >= 1, got {max_in_flight}")
    waiting = collections.deque(buckets)
    in_flight: collections.deque[Bucket] = collections.deque()
    while waiting or in_flight:
        while waiting and len(in_flight) < max_in_flight:
            bucket = waiting.popleft()
            logger.debug("launching %r", bucket)
            bucket.prepare()
            while not bucket.launch():
                time.sleep(_POLL_S)
            in_flight.append(bucket)
        oldest = in_flight.popleft()
        while not oldest.is_complete():
            time.sleep(_POLL_S)
        oldest.finalize()
    for device in {bucket.device for bucket in buckets}:
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)


def check_buckets(
    buckets: Sequence[Bucket],
    group: dist.ProcessGroup | None = None,
    error: BaseException | str | None = None,
) -> None:
    """Find out, before anything is moved, whether all ranks agree on the buckets. Collective.

    Every rank of the group calls it, those without buckets too. It is worth a call when buckets were
    made, not before every move of the same ones.

    Args:
        buckets: This rank's.
        group: The group of the maps that they come from.
        error: Reason why this rank has none: what `get_m2m_map`, `m2m_to_chunks` or `chunk_to_bucket_ops`
            raised. Every rank then raises.

    Raises:
        ValueError: Some rank gave an `error`, a tensor has lost its memory, or two ranks that share buckets
            have other ones; on every rank. The message names both and what each has.
    """
    try:
        for bucket in buckets:
            for entry in bucket.entries:
                entry.chunk.check_memory()
    except ValueError as lost:
        error = error or lost
    group = groups.resolve_group(group)
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sends: list[list[Transfer]] = [[] for _ in range(num_ranks)]
    recvs: list[list[Transfer]] = [[] for _ in range(num_ranks)]
    for bucket in buckets:
        if bucket.transfer_type in (TransferType.P2P, TransferType.BROADCAST):
            transfer = (None, bucket.total_bytes, _contents(bucket))
            ends = [recvs[bucket.src_rank]]
            if bucket.is_source:
                ends = [sends[dst] for dst in bucket.dst_ranks]
            for end in ends:
                end.append(transfer)
    problem = None if error is None else f"no buckets: {error}"
    agree(rank, sends, recvs, problem, functools.partial(gather_objects_of_group, group))


def _contents(bucket: Bucket) -> str:
    """Return what both ends of a bucket must have alike, besides its bytes; of many chunks, shortened."""
    chunks = [
        f"{entry.chunk.transfer_dtype} {tuple(entry.chunk.chunk_shape)} at {entry.offset}"
        for entry in bucket.entries
    ]
    text = ", ".join(chunks)
    if len(chunks) > 4:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        text = f"{', '.join(chunks[:3])} and {len(chunks) - 3} more chunks (digest {digest})"
    return f"{text} to ranks {bucket.dst_ranks}"


def _bucket(entries: list[BucketEntry]) -> Bucket:
    first = entries[0].chunk
    devices = {entry.chunk.tensor.device for entry in entries if entry.chunk.tensor is not None}
    if len(devices) > 1:
        raise ValueError(
            f"chunks that travel from rank {first.src_rank} to ranks {first.dst_ranks} lie on "
            f"different devices: {sorted(map(str, devices))}"
        )
    last = entries[-1]
    return Bucket(
        transfer_type=first.transfer_type,
        is_source=first.is_source,
        src_rank=first.src_rank,
        dst_ranks=first.dst_ranks,
        group=first.group,
        total_bytes=last.offset + last.nbytes,
        key=first.bucket_key,
        entries=entries,
        device=next(iter(devices), None),
    )


def _end(entries: list[BucketEntry]) -> int:
    """Return the offset at which the next entry begins."""
    if not entries:
        return 0
    end = entries[-1].offset + entries[-1].nbytes
    return -(-end // ENTRY_ALIGNMENT) * ENTRY_ALIGNMENT

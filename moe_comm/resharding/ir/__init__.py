"""Chunks and buckets: a tensor from one device mesh to another.

`get_m2m_map` says who sends which cell to whom, `m2m_to_chunks` what this rank has to do for one
tensor, `chunk_to_bucket_ops` packs the chunks of many tensors, `bucket_comm` moves them. The names are
those of Etha.

A map is equal on all ranks. The meshes may be equal, overlap or be disjoint, with their ranks in any order;
parts lie in the order of the mesh. With `global_shape` cells are the pieces that two ranks have in common,
however unevenly DTensor cuts (`_StridedShard`, several mesh dimensions on one of the tensor, ranks that hold
nothing). Without it the map is even and serves every tensor whose dimensions the cells divide; `m2m_to_chunks`
refuses others by name, but of plain tensors sees its own rank's part alone: give the shape where parts may differ.

`Partial` sources are reduced before they are cast, in their own dtype, on a copy, over the groups of their mesh;
`source_partial_groups` gives others, and is needed where the mesh is none of torch's. What a rank copies within
itself is rounded as if it had travelled.

Knows: copy_services, describe.

Example:
    # torchrun --nproc-per-node 4 example.py: ranks 0 and 1 hold a sum that is still pending in float32, ranks
    # 1 to 3 receive it in bfloat16, cut along its columns.
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    from moe_comm.resharding import ir

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    shape = (4, 7)

    # Making a mesh is collective: all ranks make both.
    trainer = DeviceMesh("cpu", [0, 1])
    server = DeviceMesh("cpu", [1, 2, 3])
    placements = [Partial("sum")], [Shard(1)]

    # 1. Every rank computes the same routes.
    m2m = ir.get_m2m_map(
        trainer, placements[0], server, placements[1], dist.group.WORLD, global_shape=shape
    )

    # The tensors: each rank has its part of the source, of the target, of both or of neither.
    source = target = None
    if rank in (0, 1):
        source = DTensor.from_local(torch.full(shape, 1.0 + rank), trainer, placements[0])
    if rank in (1, 2, 3):
        target = torch.empty(4, 3 if rank < 3 else 1, dtype=torch.bfloat16)

    # 2. What this rank does. The dtypes differ, so that all ranks are told what travels.
    chunks = ir.m2m_to_chunks(
        m2m,
        rank,
        source_tensor=source,
        target_tensor=target,
        transfer_dtype=ir.choose_transfer_dtype(torch.float32, torch.bfloat16),
    )

    # 3. Packed, with the chunks of further tensors, were there any; and compared between ranks.
    buckets = ir.chunk_to_bucket_ops(chunks, bucket_size=8 << 20)
    ir.check_buckets(buckets)

    # 4. As often as the values change.
    ir.bucket_comm(buckets, max_in_flight=2)
    if target is not None:
        assert (target == 3.0).all()

    dist.destroy_process_group()
"""

from __future__ import annotations

from moe_comm.resharding.ir.buckets import bucket_comm, check_buckets, chunk_to_bucket_ops
from moe_comm.resharding.ir.chunks import m2m_to_chunks
from moe_comm.resharding.ir.routes import Endpoint, M2MMap, Route, Side, get_m2m_map
from moe_comm.resharding.ir.transfer import Transferable, TransferType
from moe_comm.resharding.ir.units import (
    Bucket,
    BucketEntry,
    Chunk,
    choose_transfer_dtype,
    logger,
)

__all__ = [
    "Bucket",
    "BucketEntry",
    "Chunk",
    "Endpoint",
    "M2MMap",
    "Route",
    "Side",
    "TransferType",
    "Transferable",
    "bucket_comm",
    "check_buckets",
    "choose_transfer_dtype",
    "chunk_to_bucket_ops",
    "get_m2m_map",
    "logger",
    "m2m_to_chunks",
]

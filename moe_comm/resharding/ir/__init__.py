"""Chunks and buckets: a tensor from one device mesh to another.

`get_m2m_map` says who sends which cell to whom, `m2m_to_chunks` what this rank has to do for one
tensor, `chunk_to_bucket_ops` packs the chunks of many tensors, `bucket_comm` moves them. The names are
those of Etha.

Knows: copy_services, describe.
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

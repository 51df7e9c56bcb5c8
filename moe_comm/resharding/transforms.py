"""Megatron's `core.resharding.transforms`: its names, and the transform of FP8 blocks."""

from moe_comm.resharding.formats.transforms import (
    FP8BlockReshardTransform,
    MXFP8ReshardTransform,
    _ensure_sendable,
    _scale_slice_from_data_slice,
)
from moe_comm.resharding.plan.transform_protocol import ReshardTransform, as_reshard_transform

__all__ = [
    "FP8BlockReshardTransform",
    "MXFP8ReshardTransform",
    "ReshardTransform",
    "_ensure_sendable",
    "_scale_slice_from_data_slice",
    "as_reshard_transform",
]

"""Megatron's `core.resharding.execution`: its names, of `moe_comm.resharding.move.execution`."""

import torch.distributed as dist  # Megatron's tests replace what it has by this path

from moe_comm.resharding.move.execution import (
    _get_mxfp8_accumulator,
    _refresh_module_caches,
    execute_reshard_plan,
)

__all__ = ["_get_mxfp8_accumulator", "_refresh_module_caches", "dist", "execute_reshard_plan"]

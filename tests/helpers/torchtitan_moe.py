"""The MoE layer of torchtitan's DeepSeek-V3 debug model on CPU ranks, with any of its dispatchers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from moe_comm.testing import RankContext

Override = str | tuple[str, dict[str, Any]]
MOE_COMM = "moe_comm.dispatcher.torchtitan.moe_comm_dispatcher"


@functools.cache
def use_cpu() -> None:
    """Let torchtitan build its meshes for the CPU: it takes CUDA where it finds no accelerator."""
    import torchtitan.distributed.parallel_dims
    import torchtitan.distributed.utils
    import torchtitan.tools.utils

    torchtitan.tools.utils.device_type = "cpu"
    torchtitan.distributed.parallel_dims.device_type = "cpu"
    torchtitan.distributed.utils.set_spmd_backend("partial_dtensor")


@functools.cache
def use_deep_ep_on_cpu() -> None:
    """Let torchtitan's `deepep` and `hybridep` modules run over `moe_comm.compat` on CPU tensors.

    They register their operators' kernels for CUDA alone, and one imports a base class that torch calls
    by another name up to 2.13. The functions are torchtitan's own.
    """
    import torch._library.opaque_object as opaque_object

    import moe_comm.compat

    moe_comm.compat.install("deep_ep")
    if not hasattr(opaque_object, "CustomClassBase"):
        opaque_object.CustomClassBase = opaque_object.OpaqueBase
    from torchtitan.distributed.deepep import deepep, hybridep

    for operator in (
        hybridep._dispatch_impl,
        hybridep._combine_impl,
        hybridep._dispatch_bwd_impl,
        hybridep._combine_bwd_impl,
    ):
        operator.register_kernel("cpu")(operator._init_fn)
    torch.library.impl(deepep._lib, "dispatch", "CPU")(deepep._dispatch_op_impl)
    torch.library.impl(deepep._lib, "combine", "CPU")(deepep._combine_op_impl)


def model_config(comm_backend: str = "standard", **options: Any) -> Any:
    """The configuration tree of the debug model, sharded for expert parallelism."""
    from torchtitan.models.deepseek_v3 import model_registry
    from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config

    config = model_registry("debugmodel", moe_comm_backend=comm_backend, **options).model
    set_deepseek_v3_sharding_config(config, enable_sp=True, enable_ep=True)
    return config


def override(config: Any, overrides: Sequence[Override]) -> list[str]:
    """Apply torchtitan's overrides to the tree; what was replaced."""
    from torchtitan.config import OverrideConfig, apply_overrides

    return list(apply_overrides(OverrideConfig(imports=list(overrides)), config))


def first_moe(config: Any) -> Any:
    """The configuration of the first MoE layer of the tree."""
    return next(layer.moe for layer in config.layers if layer.moe is not None)


@functools.cache
def parallel_dims(num_ranks: int) -> Any:
    """torchtitan's meshes of `num_ranks`, all of them expert-parallel; made once per process."""
    from torchtitan.distributed import ParallelDims

    use_cpu()
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=num_ranks,
        cp=1,
        tp=1,
        pp=1,
        ep=num_ranks,
        world_size=num_ranks,
        spmd_backend="partial_dtensor",
    )
    dims.build_mesh()
    return dims


def build_moe(context: RankContext, moe_config: Any) -> torch.nn.Module:
    """torchtitan's MoE module, the same parameters on any dispatcher, parallelized by torchtitan."""
    use_cpu()
    moe: torch.nn.Module = moe_config.build()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.05)
    moe._init_self_buffers(buffer_device=torch.device("cpu"))
    moe.parallelize(parallel_dims(context.num_ranks))
    return moe


def forward_backward(moe: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and every gradient, of this rank's shards, as plain tensors."""
    x = x.clone().requires_grad_()
    y = moe(x)
    draw = torch.Generator().manual_seed(5)
    y.backward(torch.randn(y.shape, generator=draw).to(y.dtype))
    gradients = {
        name: parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        for name, parameter in moe.named_parameters()
    }
    return {"y": y.detach(), "x": x.grad, **gradients}

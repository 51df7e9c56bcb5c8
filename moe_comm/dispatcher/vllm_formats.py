"""Names that vLLM's fused experts know: its own where it can be imported, the same words elsewhere."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch


class _ActivationFormat(enum.Enum):
    """Form of dispatched rows: `[M, hidden]`, or `[num_local_experts, n, hidden]`."""

    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


@dataclasses.dataclass
class _TokensMetadata:
    """Choices of every local expert, int32 `[num_local_experts]`, on the device and on the host."""

    expert_num_tokens: torch.Tensor | None
    expert_num_tokens_cpu: torch.Tensor | None
    psum_recv_per_rank: torch.Tensor | None = None


class _PrepareAndFinalize:
    """Stands in for vLLM's abstract base."""


class _All2AllManager:
    """Stands in for vLLM's base."""


class _CpuCommunicator:
    """Stands in for vLLM's communicator of CPU ranks."""


def vllm_module(name: str) -> Any:
    """A module of vLLM, or None where it cannot be imported."""
    if importlib.util.find_spec("vllm") is None:
        return None
    try:
        return importlib.import_module(f"vllm.{name}")
    except (ImportError, RuntimeError, OSError, AttributeError):
        # It imports its kernels, which fail in many ways on a machine without a GPU.
        return None


def current_ubatch_id() -> Callable[[], int]:
    """VLLM's number of the micro-batch that runs in this thread; 0 without vLLM."""
    module = vllm_module("v1.worker.ubatching")
    if module is None:
        return lambda: 0
    function: Callable[[], int] = module.dbo_current_ubatch_id
    return function


def parallel_groups() -> tuple[Any, Any] | None:
    """VLLM's data-parallel and tensor-parallel groups; None where it has made none."""
    module = vllm_module("distributed.parallel_state")
    try:
        return None if module is None else (module.get_dp_group(), module.get_tp_group())
    except AssertionError:  # how vLLM says that there are none
        return None


def num_experts_of_model() -> int | None:
    """Experts, with redundant ones, of the model that vLLM loads or runs; None where there is none."""
    module = vllm_module("config")
    config = None if module is None else module.get_current_vllm_config_or_none()
    if config is None or config.model_config is None:
        return None
    redundant: int = config.parallel_config.eplb_config.num_redundant_experts
    return redundant + int(config.model_config.get_num_experts())


_kernel = vllm_module("model_executor.layers.fused_moe.modular_kernel")
FusedMoEActivationFormat: Any = _ActivationFormat
ExpertTokensMetadata: Any = _TokensMetadata
PrepareAndFinalizeBase: Any = _PrepareAndFinalize
if _kernel is not None:
    FusedMoEActivationFormat = _kernel.FusedMoEActivationFormat
    ExpertTokensMetadata = _kernel.ExpertTokensMetadata
    PrepareAndFinalizeBase = _kernel.FusedMoEPrepareAndFinalizeModular
_communicator = vllm_module("distributed.device_communicators.base_device_communicator")
All2AllManagerBase: Any = _All2AllManager
if _communicator is not None:
    All2AllManagerBase = _communicator.All2AllManagerBase
_cpu = vllm_module("distributed.device_communicators.cpu_communicator")
CpuCommunicatorBase: Any = _CpuCommunicator if _cpu is None else _cpu.CpuCommunicator

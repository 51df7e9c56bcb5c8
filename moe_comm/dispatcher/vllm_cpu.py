"""Expert parallelism of vLLM on CPUs: the communicator that vLLM makes where `vllm_plugin` is asked for.

Import it where vLLM can be imported. It follows vLLM 0.32.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.dispatcher.vllm import VllmPrepareAndFinalize
from moe_comm.dispatcher.vllm_formats import CpuCommunicatorBase
from moe_comm.dispatcher.vllm_manager import VllmAll2AllManager

__all__ = ["VllmCpuCommunicator"]

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"


class VllmCpuCommunicator(CpuCommunicatorBase):  # type: ignore[misc]
    """VLLM's `CpuCommunicator`, whose tokens reach experts of other ranks by `VllmAll2AllManager`.

    vLLM makes one for every group of ranks, alike on all of them.

    Raises:
        ImportError: This release of vLLM lacks what expert parallelism is put in the place of.
    """

    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device: torch.device | None = None,
        device_group: dist.ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        # vLLM's own manager would only stand in the way of this one.
        super().__init__(cpu_group, device, device_group, unique_name, use_all2all=False)
        self.use_all2all = self.is_ep_communicator and use_all2all
        if self.use_all2all:
            manager = VllmAll2AllManager(cpu_group)
            self.all2all_manager = manager
            _bring_tokens_by(manager)

    def destroy(self) -> None:
        """End the manager, and with it the communicator of the group."""
        if self.all2all_manager is not None:
            self.all2all_manager.destroy()
        super().destroy()


def _bring_tokens_by(manager: VllmAll2AllManager) -> None:
    """Let vLLM make this package's prepare and finalize where it would make its own.

    vLLM keeps no registry of them, so that functions of its modules are replaced in this process.
    """
    factory = "make_moe_prepare_and_finalize_naive_dp_ep"
    module = _expect(f"{_FUSED_MOE}.all2all_utils", factory)
    runner = _expect(f"{_FUSED_MOE}.runner.moe_runner", "MoERunner").MoERunner
    _expect_attribute(runner, "_select_forward")
    gathers_whole_batches = getattr(module, factory)
    config = importlib.import_module("vllm.config")

    def make(use_monolithic: bool, *args: Any, **kwargs: Any) -> Any:
        parallel = config.get_current_vllm_config().parallel_config
        if not parallel.enable_expert_parallel:
            # Every rank has a part of every expert, and needs all tokens.
            return gathers_whole_batches(use_monolithic, *args, **kwargs)
        if parallel.enable_eplb:
            raise NotImplementedError(
                "MOE_COMM_VLLM=1 takes no load balancing of experts (enable_eplb): on CPUs vLLM's router "
                "leaves the ids of logical experts as they are, where its experts are slots"
            )
        if use_monolithic:
            raise NotImplementedError(
                "MOE_COMM_VLLM=1 is for experts that are given their tokens' choices, not for those that "
                "choose themselves (monolithic)"
            )
        return VllmPrepareAndFinalize(manager.get_handle({}), has_local_ids=True)

    setattr(module, factory, make)

    # On CPUs vLLM lets torch.compile look into its MoE layers, where nothing depends on what tokens
    # choose. How many rows arrive does: so the layer is one operation, as on GPUs.
    def select_forward(layer: Any) -> Any:
        operations = torch.ops.vllm
        is_alone = layer._shared_experts is None
        return operations.moe_forward if is_alone else operations.moe_forward_shared

    runner._select_forward = select_forward


def _expect(name: str, attribute: str) -> Any:
    """The module of that name of vLLM, which has to have the attribute."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # something that vLLM itself needs
        module = None
    _expect_attribute(module, attribute, name)
    return module


def _expect_attribute(holder: Any, attribute: str, name: str | None = None) -> None:
    if not hasattr(holder, attribute):
        raise ImportError(
            f"MOE_COMM_VLLM=1 needs {name or holder.__qualname__}.{attribute} as vLLM 0.32 has it, and "
            f"there is none in {importlib.import_module('vllm').__version__}"
        )

"""Function that vLLM calls in each of its processes: this package names it under `vllm.general_plugins`.

Importing this imports nothing of vLLM: it happens whenever vLLM starts beside this package.
"""

from __future__ import annotations

import importlib

from moe_comm import env
from moe_comm.resharding.clients.vllm_names import register_weight_transfer

__all__ = ["register"]

_COMMUNICATOR = "moe_comm.dispatcher.vllm_cpu.VllmCpuCommunicator"


def register() -> None:
    """Offer vLLM a weight transfer; with `MOE_COMM_VLLM=1`, make it bring tokens to experts by this package.

    For the latter, on CPUs, it says only which class vLLM makes communicators of, for as long as this
    process lives. What more there is to do that class does, in the processes that have experts. vLLM may
    call this many times.

    Raises:
        NotImplementedError: vLLM runs on something else than CPUs, with `MOE_COMM_VLLM=1`.
        ValueError: Another package has registered a weight transfer called "moe_comm".
    """
    register_weight_transfer()
    if not env.vllm_is_asked():
        return
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_cpu():
        raise NotImplementedError(
            f"MOE_COMM_VLLM=1 is for vLLM's CPU platform, this is {type(platform).__name__}"
        )
    platform.get_device_communicator_cls = lambda: _COMMUNICATOR

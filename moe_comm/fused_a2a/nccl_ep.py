"""The names around Transformer Engine's NCCL EP that Megatron's module has since core_r0.19.

Megatron imports them whether or not they can be used, and without Transformer Engine they are what they
are here: nothing can be made by them, and there is nothing to end.
"""

from __future__ import annotations

from typing import Any, NoReturn

HAVE_TE_EP = False
alloc_ep_symm_buffer = None
new_nccl_ep_buffer = None
nccl_ep_dispatch = None
nccl_ep_combine = None


def ensure_nccl_ep_bootstrapped(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse, as Megatron does without Transformer Engine.

    Raises:
        RuntimeError: Always, with the backends that there are.
    """
    raise RuntimeError(
        "the flex backend 'ncclep' is Transformer Engine's, which moe_comm.fused_a2a does not offer: "
        "use 'hybridep' or 'deepep'"
    )


def is_nccl_ep_bootstrapped() -> bool:
    """False: nothing is ever to be ended."""
    return False


def nccl_ep_finalize() -> None:
    """Nothing to do. Megatron calls it when it leaves its parallel state."""

"""Names of the classes of `vllm` beside this, in the factories of vLLM."""

from __future__ import annotations

import functools
import importlib

__all__ = ["register_weight_transfer"]

_MODULE = "moe_comm.resharding.clients.vllm"


@functools.cache
def register_weight_transfer() -> None:
    """Offer vLLM a weight transfer called "moe_comm", at both ends; the classes are imported when used.

    A release of vLLM that has no such factories has no weight transfer by name: nothing is done. Of many
    calls in a process the first counts.

    Raises:
        ValueError: Another package has registered a weight transfer of this name.
    """
    try:
        factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
        engines = factory.WeightTransferEngineFactory
        trainers = factory.WeightTransferTrainerFactory
    except (ModuleNotFoundError, AttributeError):
        return
    engines.register_engine("moe_comm", _MODULE, "MoeCommWeightTransferEngine")
    trainers.register_engine("moe_comm", _MODULE, "MoeCommTrainerWeightTransferEngine")

"""What verl and TRL call, called by their own classes.

`make test-refit-clients` installs them and runs this. The ends of a stream are threads.
"""

from __future__ import annotations

import importlib.util
import inspect
import time
import types
from typing import Any

import pytest
import torch

from moe_comm.resharding.clients.tensor_stream import TensorStream
from moe_comm.resharding.clients.trl import TrlWeightTransfer
from tests.unit.test_reshard_tensor_stream import TENSORS, Update, assert_same, run_ends, taken


def _needs(framework: str) -> pytest.MarkDecorator:
    """Skip a test where a framework is not installed, before its release is looked up."""
    is_there = importlib.util.find_spec(framework) is not None
    return pytest.mark.skipif(not is_there, reason=f"needs {framework}")


@_needs("verl")
@pytest.mark.client(
    "verl",
    way="`custom_backend_module`",
    ran="updates through its registry, as its manager calls it: two, a rollout rank started anew, one gone",
)
def test_updates_by_the_registry_of_verl() -> None:
    from verl.checkpoint_engine import base
    from verl.utils.import_utils import import_external_libs
    from verl.workers.rollout.utils import ensure_async_iterator

    import_external_libs("moe_comm.resharding.clients.verl")
    registry = base.CheckpointEngineRegistry
    update = Update(registry.get("moe_comm"))
    assert issubclass(update.engine_class, base.CheckpointEngine)

    def new(is_master: bool) -> Any:
        # As verl does: only actors are told.
        said = {"is_master": True} if is_master else {}
        return registry.new("moe_comm", bucket_size=100, host="127.0.0.1", timeout_s=30, **said)

    update.actors = [new(True), new(False)]
    rollouts = [new(False), new(False)]
    for step in (1, 2):
        ended = update.run(rollouts, lambda: iter(TENSORS), step)
        for each in ended[2:]:
            assert_same(each, TENSORS)
    rollouts[0] = new(False)
    assert_same(update.run(rollouts, lambda: iter(TENSORS), 3)[2], TENSORS)
    assert_same(update.run(rollouts[1:], lambda: iter(TENSORS), 4)[2], TENSORS)

    # What its worker hands on: an iterator that its own helper takes.
    async def handed_on(end: Any, step: int) -> list[tuple[str, torch.Tensor]]:
        weights = ensure_async_iterator(end.receive_weights(step))
        return [(name, tensor.clone()) async for name, tensor in weights]

    update.receive = handed_on  # type: ignore[method-assign]
    assert_same(update.run(rollouts[1:], lambda: iter(TENSORS), 5)[2], TENSORS)


@_needs("trl")
@pytest.mark.client(
    "TRL",
    way="`weight_transfer=`",
    ran="a synchronization of its asynchronous GRPO trainer, by names on disk",
)
def test_a_synchronization_of_trl() -> None:
    from accelerate import PartialState
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion
    from trl.experimental.async_grpo import async_grpo_trainer as trainer

    from tests.helpers import transformers_models as models

    wanted = {
        name: inspect.signature(method).parameters.keys()
        for name, method in vars(trainer.WeightTransferProtocol).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    assert len(wanted) == 5
    for name, parameters in wanted.items():
        assert inspect.signature(getattr(TrlWeightTransfer, name)).parameters.keys() == parameters
    PartialState(cpu=True)  # the trainer's messages ask it
    models.quiet()
    model = AutoModelForCausalLM.from_config(models.CONFIGS["qwen3_moe"]())
    steps: list[str] = []

    def synchronize(stream: TensorStream) -> int:
        transfer = TrlWeightTransfer(
            model,
            lambda: stream,
            pause=lambda: steps.append("pause"),
            resume=lambda: steps.append("resume"),
        )
        transfer.init_weight_transfer()
        grpo = trainer.AsyncGRPOTrainer
        accelerator = types.SimpleNamespace(
            device=torch.device("cpu"),
            is_main_process=True,
            unwrap_model=lambda wrapped: wrapped,
            wait_for_everyone=lambda: None,
        )
        own = types.SimpleNamespace(
            accelerator=accelerator,
            model=model,
            model_version=0,
            rollout_worker=None,
            weight_transfer=transfer,
        )
        own._streaming_iter = lambda: grpo._streaming_iter(own)
        grpo._sync_weight_merged(own, time.time())
        transfer.destroy()
        return transfer.version

    version, found = run_ends(synchronize, taken, bucket_bytes=1 << 14)
    assert version == 1
    assert steps == ["pause", "resume"]
    expected = revert_weight_conversion(model, model.state_dict())
    assert len(expected) == 69
    assert_same(sorted(found), sorted(expected.items()))

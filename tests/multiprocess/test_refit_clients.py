"""Calls of verl, TRL, SGLang and miles, made by their own classes.

`make test-refit-clients` installs them and runs this; of miles, which has no releases, a checkout in PYTHONPATH. The ends of a stream are threads.
"""

from __future__ import annotations

import importlib.util
import inspect
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm import ExpertTables, Placement, plan_placement
from moe_comm.errors import CommunicationError
from moe_comm.resharding.clients.sglang import SglangStream
from moe_comm.resharding.clients.tensor_stream import StreamError, TensorStream
from moe_comm.resharding.clients.trl import TrlWeightTransfer
from moe_comm.resharding.describe.transformers_views import disk_tensors
from tests.helpers.sglang_rank import SglangServer
from tests.unit.test_reshard_sglang_stream import (
    MilesUpdates,
    a_world_of_one,
    check_updates_of_miles,
    miles_arguments,
)
from tests.unit.test_reshard_tensor_stream import TENSORS, Update, assert_same, run_ends, taken

__all__ = ["a_world_of_one"]


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
        # Only actors are told, as verl does.
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

    # The argument that its worker hands on: an iterator that its own helper takes.
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


@_needs("sglang")
@pytest.mark.client(
    "SGLang",
    way="`--custom-weight-loader`",
    ran="{family}, {tp_size} ranks: versions by its `WeightUpdater` and its model's loader, a rank that is killed; nothing generates",
)
@pytest.mark.parametrize(("family", "tp_size"), [("qwen3_moe", 2), ("mixtral", 1)])
def test_versions_by_the_loader_of_sglang(family: str, tp_size: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tests.helpers import transformers_models as models

    models.quiet()
    model = AutoModelForCausalLM.from_config(models.CONFIGS[family]())
    model.save_pretrained(tmp_path)
    servers = [SglangServer(tmp_path, tp_size)]
    stream = SglangStream(
        "127.0.0.1:0", [tp_size], lambda at, body: servers[at].post(body), timeout_s=60
    )

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        return disk_tensors(model, model.named_parameters())

    def assert_served() -> None:
        assert servers[0].call("difference", path=str(tmp_path / "version.pt")) == [""] * tp_size

    try:
        for version in ("1", "2"):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter))
            torch.save({name: each.clone() for name, each in weights()}, tmp_path / "version.pt")
            stream.send(weights(), version)
            assert_served()
        # A version that is not the model's, and one that ends in the middle: the one before stays.
        dropped = [name for name, _ in weights()][-4]
        with pytest.raises(ValueError, match="the loader fills it from no tensor"):
            stream.send(((name, each * 2) for name, each in weights() if name != dropped), "3")
        assert_served()

        def killing() -> Iterator[tuple[str, torch.Tensor]]:
            for number, (name, each) in enumerate(weights()):
                if number == 9:
                    servers[0].ranks[-1].kill()
                yield name, each * 2

        with pytest.raises((CommunicationError, StreamError)):
            stream.send(killing(), "4")
        if tp_size == 2:
            assert servers[0].ranks[0].poll() is None
        servers[0].close()
        servers[0] = SglangServer(tmp_path, tp_size)
        stream.send(weights(), "5")
        assert_served()
    finally:
        servers[0].close()


@_needs("sglang")
@pytest.mark.client(
    "SGLang",
    way="`ExpertTables`",
    ran="tables of its builders, and placements as its maps",
)
@pytest.mark.parametrize("algorithm", ["deepseek", "deepseek_vec", "deepseek_hierarchical"])
def test_tables_of_the_builders_of_sglang_and_back(algorithm: str) -> None:
    from sglang.srt.eplb import eplb_algorithms, expert_location

    draw = torch.Generator().manual_seed(5)
    loads = (torch.rand(4, 16, generator=draw) ** 3 * 100).round()
    built = eplb_algorithms.rebalance_experts(
        tokens_per_expert=loads[None],
        num_physical_experts=24,
        num_local_physical_experts=6,
        num_groups=4,
        num_nodes=2,
        algorithm=eplb_algorithms.EplbAlgorithm[algorithm],
    )
    placements = ExpertTables(*built).placements(4)
    for placement, of_layer in zip(placements, built[0], strict=True):
        assert placement == Placement.of_table(of_layer, 4, 16)
    planned = plan_placement(loads, 4, 7, present=placements)
    planned[0] = Placement(
        [[*of_rank[:-1], -1] for of_rank in Placement.in_blocks(16, 4, 3).slots], 16
    )
    ours = ExpertTables.of_placements(planned, num_max_replicas=28, fills_empty_slots=True)
    physical = ours.physical_to_logical_map
    listed = expert_location._compute_logical_to_all_physical_map(physical, 16, 4, None)
    assert torch.equal(ours.logical_to_all_physical_map[..., : listed.shape[2]], listed)
    metadata = expert_location.ExpertLocationMetadata(
        physical_to_logical_map=physical,
        physical_to_logical_map_cpu=physical,
        logical_to_all_physical_map=ours.logical_to_all_physical_map,
        logical_to_all_physical_map_cpu=ours.logical_to_all_physical_map,
        logical_to_all_physical_map_num_valid=ours.logical_replica_count,
        ep_size=4,
        logical_to_rank_dispatch_physical_map=None,
    )
    assert (metadata.num_physical_experts, metadata.num_logical_experts) == (28, 16)
    for layer_idx, placement in enumerate(planned):
        for expert_idx, slots in enumerate(placement.slots_of_expert):
            assert {*slots} <= {*metadata.logical_to_all_physical(layer_idx, expert_idx)}


@_needs("miles")
@pytest.mark.client(
    "miles",
    way="`--custom-weight-transfer-protocol-path`",
    ran="updates by its factory and base class, as its updater calls it; servers are threads",
)
@pytest.mark.usefixtures("a_world_of_one")
def test_updates_by_the_factory_of_miles() -> None:
    from miles.backends.training_utils.weight_update import protocol
    from miles.utils.distributed_utils import init_gloo_group

    init_gloo_group()
    made = protocol.get_weight_transfer_protocol(miles_arguments())
    assert isinstance(made, protocol.WeightTransferProtocol)
    check_updates_of_miles(MilesUpdates(made))

"""torchtitan's own configuration, meshes and MoE module around the dispatcher of this package.

The oracle is torchtitan's all-to-all dispatcher over Gloo.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

pytest.importorskip("torchtitan")

from moe_comm.dispatcher.torchtitan import (
    SelectiveAC,
    TorchtitanTokenDispatcher,
    balance_experts,
)
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.moe_layer import recorded_operations

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
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


def test_the_override_replaces_every_dispatcher_of_the_tree() -> None:
    config = model_config()
    replaced = override(config, [MOE_COMM])
    layers = [layer.moe for layer in config.layers if layer.moe is not None]
    assert len(replaced) == len(layers) > 1
    for moe in layers:
        dispatcher = moe.routed_experts.token_dispatcher
        assert type(dispatcher) is TorchtitanTokenDispatcher.Config
        assert (dispatcher.num_experts, dispatcher.top_k) == (moe.num_experts, moe.router.top_k)


def test_the_override_keeps_what_other_dispatchers_were_told() -> None:
    config = model_config("hybridep", non_blocking_capacity_factor=0.5)
    override(config, [(MOE_COMM, {"pad_multiple": 16})])
    dispatcher = first_moe(config).routed_experts.token_dispatcher
    assert dispatcher.non_blocking_capacity_factor == 0.5
    assert dispatcher.pad_multiple == 16


def test_torchtitan_knows_the_class() -> None:
    from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher

    assert issubclass(TorchtitanTokenDispatcher, BaseEPTokenDispatcher)


DISPATCHER_OF_BACKEND = {
    "standard": "TorchtitanTokenDispatcher",
    "hybridep": "HybridEPTokenDispatcher",
    "deepep": "DeepEPTokenDispatcher",
}


def compare_with_all_to_all(
    context: RankContext, dtype: torch.dtype, comm_backend: str, fields: dict[str, Any]
) -> list[str]:
    moe_config = first_moe(model_config())
    expected_moe = build_moe(context, moe_config)
    config = model_config(comm_backend)
    if comm_backend == "standard":
        override(config, [(MOE_COMM, fields)])
    else:
        use_deep_ep_on_cpu()
        dispatcher = first_moe(config).routed_experts.token_dispatcher
        fields = {"hidden_dim": config.dim, "num_max_tokens_per_rank": 22, **fields}
        for name, value in fields.items():
            setattr(dispatcher, name, value)
    moe = build_moe(context, first_moe(config))
    assert type(moe.routed_experts.token_dispatcher).__name__ == DISPATCHER_OF_BACKEND[comm_backend]
    draw = torch.Generator().manual_seed(context.rank_idx)
    faults = []
    for step, num_tokens in enumerate((6, 11)):
        x = torch.randn(2, num_tokens, 256, generator=draw).to(dtype)
        want = forward_backward(expected_moe.to(dtype), x)
        got = forward_backward(moe.to(dtype), x)
        assert got.keys() == want.keys()
        # Sums are rounded once here, and after every term there.
        tolerance = 8 * torch.finfo(dtype).eps
        for name in want:
            size = want[name].float().norm()
            error = (got[name].float() - want[name].float()).norm()
            if not error <= tolerance * size or size == 0:
                faults.append(
                    f"rank {context.rank_idx}, step {step}: {name} is off by {error / size}"
                )
        expected_moe.zero_grad()
        moe.zero_grad()
    return faults


@pytest.mark.client(
    "torchtitan",
    way="`--override.imports`",
    ran="the MoE layer of DeepSeek-V3, forward and backward",
)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="dropless"),
        pytest.param({"pad_multiple": 8}, id="padded"),
        pytest.param({"non_blocking_capacity_factor": 1.0}, id="fixed-rows"),
    ],
)
def test_moe_layer_computes_what_it_does_with_all_to_all(
    dtype: torch.dtype, fields: dict[str, Any]
) -> None:
    faults = run_ranks(compare_with_all_to_all, 2, dtype, "standard", fields)
    assert [text for rank in faults for text in rank] == []


def compare_over_deep_ep(context: RankContext) -> list[str]:
    runs: list[tuple[str, dict[str, Any]]] = [
        ("hybridep", {}),
        ("hybridep", {"pad_multiple": 8}),
        ("hybridep", {"non_blocking_capacity_factor": 1.0}),
        ("deepep", {}),
    ]
    faults = []
    for comm_backend, fields in runs:
        found = compare_with_all_to_all(context, torch.float32, comm_backend, fields)
        faults += [f"{comm_backend} {fields}: {text}" for text in found]
    # Without gradients torchtitan's DeepEP dispatcher may take a layout of fixed shape.
    with torch.no_grad():
        outputs = []
        x = torch.randn(2, 6, 256, generator=torch.Generator().manual_seed(context.rank_idx))
        for comm_backend in ("standard", "deepep"):
            config = model_config(comm_backend)
            moe_config = first_moe(config)
            if comm_backend == "deepep":
                dispatcher = moe_config.routed_experts.token_dispatcher
                dispatcher.hidden_dim, dispatcher.num_max_tokens_per_rank = config.dim, 22
                dispatcher.cudagraphable = True
            outputs.append(build_moe(context, moe_config)(x))
    if not torch.allclose(*outputs, rtol=1e-5, atol=1e-5):
        faults.append(f"fixed shape: off by {(outputs[0] - outputs[1]).abs().max()}")
    return faults


@pytest.mark.client(
    "torchtitan",
    way='`compat.install("deep_ep")`',
    ran="its own HybridEP and DeepEP dispatchers",
)
def test_torchtitans_own_dispatchers_run_over_the_deep_ep_module() -> None:
    # Fresh processes: it installs a module and registers kernels.
    faults = run_ranks(compare_over_deep_ep, 2, fresh=True)
    assert [text for rank in faults for text in rank] == []


def count_operations_under_checkpointing(context: RankContext, with_policy: bool) -> list[str]:
    config = model_config()
    override(config, [MOE_COMM])
    moe = build_moe(context, first_moe(config))
    if with_policy:
        policy = SelectiveAC.Config().build()
    else:
        from torchtitan.distributed.activation_checkpoint import FullAC

        policy = FullAC.Config().build()
    block = policy._wrap_block(moe, base_fqn="layers.0.moe")
    x = torch.randn(1, 5, 256)
    with recorded_operations(moe.routed_experts.token_dispatcher._buffer) as operations:
        forward_backward(block, x)
    return operations


@pytest.mark.client(
    "torchtitan",
    way="`--override.imports`",
    ran="an MoE layer under activation checkpointing",
)
@pytest.mark.parametrize("with_policy", [True, False])
def test_selective_checkpointing_communicates_once(with_policy: bool) -> None:
    for operations in run_ranks(count_operations_under_checkpointing, 2, with_policy):
        assert operations.count("dispatch") == (1 if with_policy else 2), operations


def test_the_policy_can_be_an_override() -> None:
    from torchtitan.config import Configurable
    from torchtitan.distributed import activation_checkpoint

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Tree(Configurable.Config):
        ac: activation_checkpoint.ActivationCheckpointing.Config

    tree = Tree(ac=activation_checkpoint.SelectiveAC.Config(preserve_rng_state=False))
    target = "moe_comm.dispatcher.torchtitan.moe_comm_selective_ac"
    assert len(override(tree, [target])) == 1
    assert type(tree.ac) is SelectiveAC.Config
    assert tree.ac.preserve_rng_state is False


def as_plain(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor that may be a `DTensor`."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def build_twins(context: RankContext, fields: dict[str, Any]) -> list[Any]:
    """Two MoE layers with the same parameters, over dispatchers of this package."""
    twins = []
    for _ in range(2):
        config = model_config()
        override(config, [(MOE_COMM, fields)])
        twins.append(build_moe(context, first_moe(config)))
    return twins


def train_with_replicas(
    context: RankContext, fields: dict[str, Any], wrapped_by: str
) -> tuple[list[str], int]:
    """Train a layer with replicas, and its twin without, on batches that all want few experts.

    Returns:
        What differs, and how many steps had replicas.
    """
    plain, balanced = build_twins(context, fields)
    if wrapped_by == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = parallel_dims(context.num_ranks).get_optional_mesh(
            "efsdp", include_singleton_axes=True
        )
        fully_shard(balanced.routed_experts.inner_experts, mesh=mesh)
    balancer = balance_experts(balanced, num_steps=2)
    run = balanced
    if wrapped_by == "recompute":
        from torchtitan.distributed.activation_checkpoint import FullAC

        run = FullAC.Config().build()._wrap_block(balanced, base_fqn="layers.0.moe")
    faults, num_with_replicas = [], 0
    names = [name for name, _ in plain.named_parameters()]
    if names != [name for name, _ in balanced.named_parameters()]:
        faults.append("other parameters")
    dispatcher = balanced.routed_experts.token_dispatcher
    for step in range(8):
        num_with_replicas += dispatcher.buffer.config.placement.has_replicas
        # Fixed rows are sized by this rank's tokens, as if all had as many.
        shift = 0 if fields.get("non_blocking_capacity_factor") else context.rank_idx
        draw = torch.Generator().manual_seed(10 * step + context.rank_idx)
        num_tokens = (40, 3, 24, 11)[(step + shift) % 4]
        x = torch.randn(1, num_tokens, 256, generator=draw)
        for moe in (plain, balanced):
            moe.zero_grad()
            moe.expert_bias_E.zero_()[step // 4] = 5.0  # chosen by every token
        want = forward_backward(plain, x)
        got = forward_backward(run, x)
        balancer.reduce_gradients()
        for name, expected in want.items():
            ours = got[name]
            error = (ours - expected).norm()
            # Sums over the rows of an expert are rounded to bfloat16, on each of its ranks.
            tolerance = 0.01 * expected.norm() if "inner_experts" in name else 0.0
            if not error <= tolerance or not expected.norm():
                faults.append(f"rank {context.rank_idx}, step {step}: {name} is off by {error}")
        with torch.no_grad():
            for one, other in zip(plain.parameters(), balanced.parameters(), strict=True):
                one.sub_(one.grad.sign() * 0.01)
                as_plain(other).copy_(as_plain(one))
        balancer.step()
    return faults, num_with_replicas


@pytest.mark.client(
    "torchtitan",
    way="`balance_experts`",
    ran="the MoE layer of DeepSeek-V3 with replicas, trained: the same bits as without",
)
@pytest.mark.parametrize(
    ("fields", "wrapped_by"),
    [
        pytest.param({}, "", id="dropless"),
        pytest.param({}, "fsdp", id="fsdp"),
        pytest.param({"pad_multiple": 8}, "recompute", id="padded-recomputed"),
        pytest.param({"non_blocking_capacity_factor": 1.0}, "", id="fixed-rows"),
    ],
)
def test_a_layer_with_replicas_has_the_bits_of_one_without(
    fields: dict[str, Any], wrapped_by: str
) -> None:
    for faults, num_with_replicas in run_ranks(train_with_replicas, 2, fields, wrapped_by):
        assert faults == []
        assert num_with_replicas >= 4


def balance_what_cannot_be(context: RankContext) -> None:
    plain, cut = build_twins(context, {})
    with pytest.raises(ValueError, match="over TorchtitanTokenDispatcher, got none"):
        balance_experts(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="num_spare_slots must be"):
        balance_experts(plain, 0 if context.rank_idx else 1)
    experts = cut.routed_experts.inner_experts
    if context.rank_idx:
        experts.w1_EFD = torch.nn.Parameter(experts.w1_EFD.to_local()[1:])
    with pytest.raises(
        ValueError, match=r"w1_EFD must hold 4 experts on this rank, got shape \(3,"
    ):
        balance_experts(cut)
    held = plain.routed_experts.inner_experts.w2_EDF
    plain.routed_experts.inner_experts.w2_EDF = torch.nn.Parameter(
        DTensor.from_local(as_plain(held.detach()), held.device_mesh, [Replicate()])
    )
    with pytest.raises(ValueError, match=r"w2_EDF must hold 4 experts.*Replicate.*dp_replicate"):
        balance_experts(plain)
    plain.routed_experts.inner_experts.w2_EDF = held
    balance_experts(plain)
    with pytest.raises(ValueError, match="the layers have spare slots already"):
        balance_experts(plain)


def test_what_cannot_be_balanced_is_refused_on_every_rank() -> None:
    run_ranks(balance_what_cannot_be, 2)

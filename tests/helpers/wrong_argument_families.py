"""Right calls of every face of the package, for `wrong_arguments` to spoil."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from moe_comm import EpBuffer, fused_a2a
from moe_comm.compat.deep_ep import Buffer, ElasticBuffer, HybridEPBuffer
from moe_comm.dispatcher import TokenDispatcher
from moe_comm.dispatcher.megatron_manager import MegatronManager
from moe_comm.dispatcher.sglang import SglangDispatcher
from moe_comm.dispatcher.torchtitan import TorchtitanTokenDispatcher
from moe_comm.dispatcher.vllm import VllmPrepareAndFinalize
from moe_comm.dispatcher.vllm_manager import VllmAll2AllManager
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.nn import MoELayer
from moe_comm.resharding import refit
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.testing import RankContext
from tests.helpers import deep_ep_oracle as oracle
from tests.helpers.sharded_nets import ShardedNet
from tests.helpers.wrong_arguments import Entry, same_as_first

CASE = oracle.Case("wrong", 6, 2, 64, (5, 4), share_unused=0.0)
NUM_MAX = 8
# The function stands for a call of the package, which would never be made.
UNBOUND = frozenset({"unbound"})
# A RuntimeError of that rank alone, which its next call tells.
NO_ROUTING = frozenset({"routing_map: None", "probs: None"})
# The buffer follows from these, which peers wait for in another one: an error of its own kind.
OTHER_SIZE = frozenset(
    {
        "num_tokens_per_expert: a row more",
        "num_tokens_per_expert: a row less",
        "num_max_dispatch_tokens_per_rank: 0",
        "num_max_dispatch_tokens_per_rank: 2**40",
        "num_experts: 2**40",
        "num_local_experts: 2**40",
        "num_of_experts_per_rank: 7",
    }
)


def routed(mine: oracle.Given) -> dict[str, torch.Tensor]:
    return {"x": mine.x, "topk_idx": mine.topk_idx, "topk_weights": mine.topk_weights}


def mapped(mine: oracle.Given) -> dict[str, torch.Tensor]:
    empty = torch.zeros(mine.num_tokens, 6, dtype=torch.bool)
    routing_map = empty.scatter_(1, mine.topk_idx, True)
    return {"routing_map": routing_map, "probs": routing_map.float()}


def compat_calls(context: RankContext) -> Mapping[str, Entry]:
    mine = oracle.given(CASE, context.rank_idx)
    buffer = Buffer(context.group)
    sending = {**routed(mine), **oracle.routing(buffer, mine.topk_idx, 6)}
    rows, _, weights, _, handle, _ = buffer.dispatch(**sending)
    sending_ll = {
        "x": mine.x,
        "topk_idx": mine.topk_idx,
        "num_max_dispatch_tokens_per_rank": NUM_MAX,
        "num_experts": 6,
        "use_fp8": False,
    }
    rows_ll, _, handle_ll, _, _ = buffer.low_latency_dispatch(**sending_ll)
    assert isinstance(rows_ll, torch.Tensor)
    combining_ll = {
        **routed(mine),
        "x": torch.zeros_like(rows_ll),
        "handle": handle_ll,
        "out": torch.zeros_like(mine.x),
    }
    counts = same_as_first()
    return {
        "Buffer.dispatch": Entry(buffer.dispatch, sending, left_out=OTHER_SIZE),
        "Buffer.dispatch, cached": Entry(buffer.dispatch, {"x": mine.x, "handle": handle}),
        "Buffer.combine": Entry(
            buffer.combine, {"x": rows, "handle": handle, "topk_weights": weights}
        ),
        "Buffer.low_latency_dispatch": Entry(
            buffer.low_latency_dispatch, sending_ll, lambda result: counts(result[1]), OTHER_SIZE
        ),
        "Buffer.low_latency_combine": Entry(buffer.low_latency_combine, combining_ll),
    }


def elastic_calls(context: RankContext) -> Mapping[str, Entry]:
    mine = oracle.given(CASE, context.rank_idx)
    buffer = ElasticBuffer(context.group, num_max_tokens_per_rank=NUM_MAX)
    sending = {**routed(mine), "num_experts": 6}
    rows, _, weights, handle, _ = buffer.dispatch(**sending)
    return {
        "ElasticBuffer.dispatch": Entry(buffer.dispatch, sending, left_out=OTHER_SIZE),
        "ElasticBuffer.dispatch, cached": Entry(buffer.dispatch, {"x": mine.x, "handle": handle}),
        "ElasticBuffer.combine": Entry(
            buffer.combine, {"x": rows, "handle": handle, "topk_weights": weights}
        ),
        "ElasticBuffer.barrier": Entry(buffer.barrier, {}),
    }


def hybrid_calls(context: RankContext) -> Mapping[str, Entry]:
    mine = oracle.given(CASE, context.rank_idx)
    buffer = HybridEPBuffer(context.group, 64, NUM_MAX, 3)
    sending = {"hidden": mine.x, **mapped(mine)}
    rows, probs, _, handle = buffer.dispatch(**sending)
    permuted, permuted_probs, _, _, permuted_handle = buffer.dispatch_with_permute(**sending)
    combining = {"hidden": rows, "probs": probs, "handle": handle}
    unpermuting = {"hidden": permuted, "probs": permuted_probs, "handle": permuted_handle}
    return {
        "HybridEPBuffer.dispatch": Entry(buffer.dispatch, sending),
        "HybridEPBuffer.dispatch_with_permute": Entry(
            buffer.dispatch_with_permute, sending, left_out=OTHER_SIZE
        ),
        "HybridEPBuffer.combine": Entry(buffer.combine, combining),
        "HybridEPBuffer.combine_with_unpermute": Entry(buffer.combine_with_unpermute, unpermuting),
    }


def fused_calls(context: RankContext) -> Mapping[str, Entry]:
    mine = oracle.given(CASE, context.rank_idx)
    group = {"group": context.group}
    sending = {
        "x": mine.x,
        "token_indices": mine.topk_idx,
        "token_probs": mine.topk_weights,
        "num_experts": 6,
        **group,
    }
    hybrid = {"x": mine.x, **mapped(mine), "num_local_experts": 3, **group}
    rows, _, _, _, handle = fused_a2a.fused_dispatch(**sending)
    permuted, _, _, _, permuted_handle = fused_a2a.hybrid_ep_dispatch(**hybrid)
    # Nothing else says who the peers are.
    groups = frozenset({"group"})
    sizes = groups | OTHER_SIZE
    combining = {"x": rows, "handle": handle, **group}
    unpermuting = {"x": permuted, "handle": permuted_handle}
    return {
        "fused_dispatch": Entry(fused_a2a.fused_dispatch, sending, left_out=sizes),
        "fused_combine": Entry(fused_a2a.fused_combine, combining, left_out=groups),
        "hybrid_ep_dispatch": Entry(fused_a2a.hybrid_ep_dispatch, hybrid, left_out=sizes),
        "hybrid_ep_combine": Entry(fused_a2a.hybrid_ep_combine, unpermuting),
    }


def making_calls(context: RankContext) -> Mapping[str, Entry]:
    """Objects that ranks make together. Only the group says who the peers are, so it is right everywhere."""
    group = context.group
    manager = VllmAll2AllManager(group)

    def get_handle(
        num_experts: int,
        num_max_tokens_per_rank: int | None = None,
        expert_rank: list[int] | None = None,
        num_ep_ranks: int = 2,
        num_local_experts: int = 3,
    ) -> EpBuffer:
        return manager.get_handle(
            {
                "num_experts": num_experts,
                "num_max_tokens_per_rank": num_max_tokens_per_rank,
                "expert_rank": expert_rank,
                "num_ep_ranks": num_ep_ranks,
                "num_local_experts": num_local_experts,
            }
        )

    def wire(
        num_experts: int,
        pad_multiple: int | None = None,
        hidden_dim: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        non_blocking_capacity_factor: float | None = None,
    ) -> None:
        titan = TorchtitanTokenDispatcher.Config(
            num_experts=num_experts,
            top_k=2,
            pad_multiple=pad_multiple,
            hidden_dim=hidden_dim,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            non_blocking_capacity_factor=non_blocking_capacity_factor,
        )
        titan.build().wire_group(group)

    chosen = frozenset({"group", "cpu_group", "comm"})
    layer = {"hidden": 16, "ffn_hidden": 32, "num_experts": 6, "num_topk": 2, "group": group}
    serving = {"group": group, "router_topk": 2, "num_experts": 6, "deepep_mode": "normal"}
    budget = {"router_topk": 2, "rank_capacity_factor": 1.5}
    return {
        "TokenDispatcher": Entry(
            TokenDispatcher, {"num_experts": 6, "group": group}, left_out=chosen
        ),
        "MoELayer": Entry(
            MoELayer, layer, lambda made: made(torch.ones(2, 16)).sum().backward(), chosen
        ),
        "MegatronManager": Entry(
            MegatronManager, {"group": group, "num_local_experts": 3, **budget}, left_out=chosen
        ),
        "SglangDispatcher": Entry(SglangDispatcher, serving, left_out=chosen),
        "VllmAll2AllManager": Entry(VllmAll2AllManager, {"cpu_group": group}, left_out=chosen),
        "get_handle": Entry(get_handle, {"num_experts": 6}, left_out=UNBOUND),
        "TorchtitanTokenDispatcher": Entry(wire, {"num_experts": 6}, left_out=UNBOUND),
        "Buffer": Entry(Buffer, {"group": group}, left_out=chosen),
        "ElasticBuffer": Entry(ElasticBuffer, {"group": group}, left_out=chosen),
        "HybridEPBuffer": Entry(
            HybridEPBuffer,
            {
                "group": group,
                "hidden_dim": 16,
                "max_num_of_tokens_per_rank": 8,
                "num_local_experts": 3,
            },
            left_out=chosen,
        ),
    }


def training_calls(context: RankContext) -> Mapping[str, Entry]:
    mine = oracle.given(CASE, context.rank_idx)
    titan = TorchtitanTokenDispatcher.Config(num_experts=6, top_k=2)
    dispatcher = titan.build()
    dispatcher.wire_group(context.group)
    sending = {
        "x_TD": mine.x,
        "topk_scores_TK": mine.topk_weights,
        "topk_expert_ids_TK": mine.topk_idx,
        "num_local_tokens_per_expert_E": torch.zeros(6),
    }
    rows, _, metadata = dispatcher.dispatch(**sending)
    manager = MegatronManager(context.group, 3)

    def megatron(
        hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        manager.setup_metadata(routing_map, probs)
        manager.dispatch(hidden_states)
        assert manager.tokens_per_expert is not None
        return manager.tokens_per_expert

    def megatron_combine(hidden_states: torch.Tensor) -> torch.Tensor:
        manager.handle = kept
        return manager.combine(hidden_states)

    routing = mapped(mine)
    manager.setup_metadata(**routing)
    permuted = manager.dispatch(mine.x)
    kept = manager.handle
    combining = {"routed_output_RD": rows, "metadata": metadata, "x_TD": mine.x}
    return {
        "TorchtitanTokenDispatcher.dispatch": Entry(dispatcher.dispatch, sending),
        "TorchtitanTokenDispatcher.combine": Entry(dispatcher.combine, combining),
        "MegatronManager.dispatch": Entry(
            megatron, {"hidden_states": mine.x, **routing}, left_out=UNBOUND | NO_ROUTING
        ),
        "MegatronManager.combine": Entry(
            megatron_combine, {"hidden_states": permuted}, left_out=UNBOUND
        ),
    }


def serving_calls(context: RankContext) -> Mapping[str, Entry]:
    mine = oracle.given(CASE, context.rank_idx)
    buffer = group_buffers(context.group).get(6)
    shape = VllmPrepareAndFinalize(buffer, ubatch_id=lambda: 0)
    preparing = {
        "a1": mine.x,
        "topk_weights": mine.topk_weights,
        "topk_ids": mine.topk_idx,
        "num_experts": 6,
        "expert_map": None,
        "apply_router_weight_on_input": False,
        "quant_config": types.SimpleNamespace(quant_dtype=None, block_shape=None),
    }
    rows, _, _, ids, weights = shape.prepare(**preparing)
    prepared = dict(shape._prepared)
    out = torch.zeros_like(mine.x)

    def finalize(**arguments: Any) -> torch.Tensor:
        shape._prepared.update(prepared)
        shape.finalize(**arguments)
        return arguments["output"]

    finalize.__signature__ = inspect.signature(shape.finalize)  # type: ignore[attr-defined]
    finalizing = {
        "output": out,
        "fused_expert_output": rows[:, None].expand(-1, 2, -1).contiguous(),
        "topk_weights": weights,
        "topk_ids": ids,
        "apply_router_weight_on_input": False,
    }
    sglang = SglangDispatcher(context.group, 2, num_experts=6, deepep_mode="normal")
    topk = types.SimpleNamespace(topk_ids=mine.topk_idx, topk_weights=mine.topk_weights)

    def round_trip(
        hidden_states: torch.Tensor, topk_output: Any, combine_input: Any
    ) -> torch.Tensor:
        sglang._micro_batches.clear()
        arrived = sglang.dispatch(hidden_states, topk_output)
        given = (arrived[0], arrived[2], arrived[3]) if combine_input == 0 else combine_input
        return sglang.combine(given)

    tripped = {"hidden_states": mine.x, "topk_output": topk, "combine_input": 0}
    return {
        "VllmPrepareAndFinalize.prepare": Entry(
            shape.prepare, preparing, left_out=frozenset({"expert_map"})
        ),
        "VllmPrepareAndFinalize.finalize": Entry(finalize, finalizing, left_out=UNBOUND),
        "SglangDispatcher": Entry(round_trip, tripped, left_out=UNBOUND),
    }


def refit_calls(context: RankContext) -> Mapping[str, Entry]:
    src = ShardedNet(Parallelism.parse("tp2", context.num_ranks), context.rank_idx)
    dst = ShardedNet(Parallelism.parse("single", context.num_ranks), context.rank_idx)
    src.fill(3)
    models = {"src_model": src, "target_model": dst}
    service = SymmetricCopyService(context.group)

    def is_copied(_: object) -> None:
        assert dst.wrong(3) == []
        with torch.no_grad():
            for tensor in dst.state_dict().values():
                tensor.zero_()

    by_name, over_service = {"refit_method": "symmetric"}, {"refit_method": service}
    run = lambda made: made.run()  # noqa: E731
    calls: dict[str, tuple[Any, ...]] = {
        "swap_model_weights": (refit.swap_model_weights, by_name),
        "swap_model_weights over a service": (refit.swap_model_weights, over_service),
        "reshard_model_weights": (refit.reshard_model_weights, {"service": service}),
        "Refit": (refit.Refit, by_name, run),
        "Refit over a service": (refit.Refit, over_service, run),
    }
    service_of = {"backend": "symmetric", "group": context.group}
    return {
        "prepare_swap_model_weights": Entry(refit.prepare_swap_model_weights, models),
        "Refit.run": Entry(refit.Refit(src, dst, service).run, {}, is_copied),
        "get_or_create_service": Entry(get_new_service, service_of, left_out=UNBOUND),
    } | {
        name: Entry(call, {**models, **method}, is_copied, frozenset(), *finish)
        for name, (call, method, *finish) in calls.items()
    }


def get_new_service(backend: Any, group: Any = None) -> None:
    refit.clear_service_cache()
    refit.get_or_create_service(backend, group)


FAMILIES: dict[str, Callable[[RankContext], Mapping[str, Entry]]] = {
    "compat": compat_calls,
    "elastic": elastic_calls,
    "making": making_calls,
    "hybrid": hybrid_calls,
    "fused": fused_calls,
    "training": training_calls,
    "serving": serving_calls,
    "refit": refit_calls,
}

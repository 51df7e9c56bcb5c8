"""The dispatchers of this package as targets of `dispatcher_conformance`."""

from __future__ import annotations

import types
from typing import Any

import torch

from moe_comm import fused_a2a
from moe_comm.dispatcher import TokenDispatcher
from moe_comm.dispatcher.megatron import MegatronManager, MegatronTokenDispatcher
from moe_comm.dispatcher.sglang import (
    DeepEPLLCombineInput,
    DeepEPNormalCombineInput,
    SglangDispatcher,
)
from moe_comm.dispatcher.torchtitan import TorchtitanTokenDispatcher
from moe_comm.dispatcher.transformers import TransformersExperts
from moe_comm.dispatcher.vllm import VllmPrepareAndFinalize
from moe_comm.dispatcher.vllm_manager import VllmAll2AllManager
from moe_comm.ep.config import Capacity
from moe_comm.ep.group_buffers import GroupBuffers
from moe_comm.ep.routing_map import routing_map_of_topk
from moe_comm.peers.bootstrap import RankThreads
from tests.helpers.dispatcher_cases import (
    DispatcherCase,
    RankTokens,
    expert_output,
    fixed_rows,
)
from tests.helpers.dispatcher_conformance import DispatcherTarget


def local_experts(buffers: GroupBuffers, case: DispatcherCase) -> torch.Tensor:
    """int64 global ids of this rank's experts, ascending, on the device of the buffers."""
    buffer = buffers.get(case.num_experts)
    is_here = buffer.expert_rank == buffer.communicator.rank_idx
    return is_here.nonzero().flatten().to(buffers.device)


def most_tokens(case: DispatcherCase) -> int:
    """A limit on a rank's tokens that is not reached."""
    return max(case.num_tokens) + 1


def _grouped_experts(
    rows: torch.Tensor,
    expert_offsets: torch.Tensor,
    num_filled: torch.Tensor,
    expert_ids: torch.Tensor,
) -> torch.Tensor:
    """Experts on rows grouped by expert; NaN in padding, which nobody may read."""
    sizes = expert_offsets.diff().to(expert_ids.device, torch.int64)
    num_rest = rows.shape[0] - int(sizes.sum())
    # Rows behind the last expert are padding as well.
    ids = torch.cat([torch.repeat_interleave(expert_ids, sizes), expert_ids.new_zeros(num_rest)])
    out = expert_output(rows, ids)
    position = torch.arange(rows.shape[0])
    is_filled = torch.zeros(rows.shape[0], dtype=torch.bool)
    starts = expert_offsets[:-1].to(torch.int64)
    for start, filled in zip(starts.tolist(), num_filled.tolist(), strict=True):
        is_filled |= (position >= start) & (position < start + filled)
    return torch.where(is_filled[:, None], out, torch.full_like(out, float("nan")))


def _dequantized(
    data: torch.Tensor, scales: torch.Tensor | None, case: DispatcherCase
) -> torch.Tensor:
    """FP8_BLOCK128 rows in the dtype of the case."""
    if scales is None:
        return data
    blocks = data.float().view(*scales.shape, 128) * scales[..., None]
    return blocks.view(data.shape).to(case.dtype)


def _run_plain(
    buffers: GroupBuffers,
    case: DispatcherCase,
    tokens: RankTokens,
    *,
    weighted_by: Any,
    by_map: bool = False,
) -> torch.Tensor:
    capacity = None
    if case.num_rows_per_expert is not None:
        capacity = Capacity(num_rows_per_expert=case.num_rows_per_expert, on_overflow="drop")
    dispatcher = TokenDispatcher(
        case.num_experts,
        group=buffers.group,
        expert_alignment=case.expert_alignment,
        quantization=case.quantization,
        capacity=capacity,
        weighted_by=weighted_by,
    )
    if by_map:
        num_tokens = tokens.x.shape[0]
        columns = tokens.topk_idx.masked_fill(tokens.topk_idx < 0, case.num_experts)
        dense = torch.zeros(num_tokens, case.num_experts + 1)
        routing_map = dense.bool().scatter(1, columns, True)[:, :-1]
        probs = dense.scatter(1, columns, tokens.topk_weights)[:, :-1]
        routed = dispatcher.dispatch(tokens.x, probs, routing_map=routing_map)
    else:
        # A leading dimension more than the dispatcher needs, as models have it.
        routed = dispatcher.dispatch(
            tokens.x[None], tokens.topk_weights[None], topk_idx=tokens.topk_idx[None]
        )
    rows = routed.tokens
    if case.quantization is not None:
        rows = rows.dequantize()
    out = _grouped_experts(
        rows, routed.expert_offsets, routed.num_tokens_per_expert, local_experts(buffers, case)
    )
    if routed.probs is not None:
        # 0 * NaN is NaN: padding stays what nobody may read.
        out = (out * routed.probs[:, None]).to(out.dtype)
    return dispatcher.combine(out, routed).view(tokens.x.shape)


def _run_plain_by_experts(
    buffers: GroupBuffers, case: DispatcherCase, tokens: RankTokens
) -> torch.Tensor:
    return _run_plain(buffers, case, tokens, weighted_by="experts")


def _run_plain_by_combine(
    buffers: GroupBuffers, case: DispatcherCase, tokens: RankTokens
) -> torch.Tensor:
    return _run_plain(buffers, case, tokens, weighted_by="combine")


def _run_plain_by_map(
    buffers: GroupBuffers, case: DispatcherCase, tokens: RankTokens
) -> torch.Tensor:
    return _run_plain(buffers, case, tokens, weighted_by="experts", by_map=True)


def _run_torchtitan(
    buffers: GroupBuffers, case: DispatcherCase, tokens: RankTokens
) -> torch.Tensor:
    config = TorchtitanTokenDispatcher.Config(
        num_experts=case.num_experts,
        top_k=case.num_topk,
        pad_multiple=case.expert_alignment,
        non_blocking_capacity_factor=case.capacity_factor,
        hidden_dim=case.hidden,
        num_max_tokens_per_rank=most_tokens(case),
    )
    dispatcher = config.build()
    dispatcher.wire_group(buffers.group)
    counts = torch.bincount(
        tokens.topk_idx[tokens.topk_idx >= 0].flatten(), minlength=case.num_experts
    )
    rows, num_rows_per_expert, metadata = dispatcher.dispatch(
        tokens.x, tokens.topk_weights, tokens.topk_idx, counts
    )
    offsets = torch.nn.functional.pad(num_rows_per_expert.cumsum(0), (1, 0))
    # torchtitan's counts have the padding in them: it is computed like other rows.
    out = _grouped_experts(rows, offsets, num_rows_per_expert, local_experts(buffers, case))
    return dispatcher.combine(out, metadata, tokens.x)  # type: ignore[no-any-return]


def _run_transformers(
    buffers: GroupBuffers, case: DispatcherCase, tokens: RankTokens
) -> torch.Tensor:
    num_places, choices, ids = _places_of_ranks(buffers, case, tokens)

    def experts_forward(
        rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        # Experts like those of transformers, which have no row to compute otherwise.
        assert rows.shape[0] == local_ids.shape[0] > 0
        return (expert_output(rows, ids[local_ids[:, 0]]) * weights).to(rows.dtype)

    experts = TransformersExperts(
        experts_forward,
        num_places * buffers.communicator.num_ranks,
        group=buffers.group,
        quantization=case.quantization,
    )
    return experts(tokens.x, choices, tokens.topk_weights)


def _sglang_dispatcher(buffers: GroupBuffers, case: DispatcherCase, mode: str) -> SglangDispatcher:
    dispatcher = SglangDispatcher(
        buffers.group,
        case.num_topk,
        num_experts=case.num_experts,
        hidden_size=case.hidden,
        params_dtype=case.dtype,
        deepep_mode=mode,
        num_max_tokens_per_rank=most_tokens(case),
    )
    dispatcher.set_quant_config({"quantization": case.quantization})
    return dispatcher


def _by_choice(
    rows: torch.Tensor, local_ids: torch.Tensor, expert_ids: torch.Tensor
) -> torch.Tensor:
    """`[M, K, hidden]`: every row through each of its experts; NaN where that is elsewhere."""
    per_choice = []
    for topk_pos in range(local_ids.shape[1]):
        ids = local_ids[:, topk_pos]
        global_ids = expert_ids[ids.clamp(min=0)] if expert_ids.numel() else ids
        out = expert_output(rows, global_ids)
        per_choice.append(out.masked_fill((ids < 0)[:, None], float("nan")))
    return torch.stack(per_choice, 1)


def _run_sglang_normal(
    buffers: GroupBuffers, case: DispatcherCase, tokens: RankTokens
) -> torch.Tensor:
    dispatcher = _sglang_dispatcher(buffers, case, "normal")
    topk_output = types.SimpleNamespace(
        topk_ids=tokens.topk_idx.to(torch.int32), topk_weights=tokens.topk_weights
    )
    rows, scales, ids, weights, _ = dispatcher.dispatch(tokens.x, topk_output)
    out = _by_choice(_dequantized(rows, scales, case), ids, local_experts(buffers, case)).float()
    weighed = torch.where((ids >= 0)[..., None], out * weights[..., None], 0).sum(1)
    return dispatcher.combine(DeepEPNormalCombineInput(weighed.to(case.dtype), ids, weights))


def _places(rows: torch.Tensor, num_filled: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """Experts on rows at fixed places; NaN behind the filled ones."""
    out = torch.full(rows.shape, float("nan"), dtype=rows.dtype)
    for local_expert_idx, filled in enumerate(num_filled.tolist()):
        ids = expert_ids[local_expert_idx].expand(filled)
        out[local_expert_idx, :filled] = expert_output(rows[local_expert_idx, :filled], ids)
    return out


def _run_sglang_low_latency(
    buffers: GroupBuffers, case: DispatcherCase, tokens: RankTokens
) -> torch.Tensor:
    dispatcher = _sglang_dispatcher(buffers, case, "low_latency")
    topk_output = types.SimpleNamespace(topk_ids=tokens.topk_idx, topk_weights=tokens.topk_weights)
    output = dispatcher.dispatch(tokens.x, topk_output)
    rows = _dequantized(output.hidden_states, output.hidden_states_scale, case)
    out = _places(rows, output.masked_m, local_experts(buffers, case))
    return dispatcher.combine(DeepEPLLCombineInput(out, output.topk_ids, output.topk_weights))


def _run_vllm(
    buffers: GroupBuffers, case: DispatcherCase, tokens: RankTokens, *, is_batched: bool
) -> torch.Tensor:
    manager = VllmAll2AllManager(buffers.group)
    arguments = {"num_experts": case.num_experts, "num_ep_ranks": case.num_ranks}
    if is_batched:
        arguments["max_num_tokens_per_dp_rank"] = most_tokens(case)
    prepare_finalize = VllmPrepareAndFinalize(manager.get_handle(arguments), is_batched=is_batched)
    is_quantized = case.quantization is not None
    quant_config = types.SimpleNamespace(
        quant_dtype=torch.float8_e4m3fn if is_quantized else None,
        block_shape=[128, 128] if is_quantized else None,
    )
    x, scales, metadata, ids, weights = prepare_finalize.prepare(
        tokens.x, tokens.topk_weights, tokens.topk_idx, case.num_experts, None, False, quant_config
    )
    rows = _dequantized(x, scales, case)
    experts = local_experts(buffers, case)
    if is_batched:
        out = _places(rows, metadata.expert_num_tokens, experts)
        ids, weights = tokens.topk_idx, tokens.topk_weights
    else:
        assert ids is not None
        assert weights is not None
        # The expert_map of vLLM: the local id of every expert, -1 of those elsewhere.
        expert_map = torch.full((case.num_experts,), -1)
        expert_map[experts] = torch.arange(experts.numel())
        local_ids = torch.where(ids < 0, -1, expert_map[ids.clamp(min=0)])
        out = _by_choice(rows, local_ids, experts)
    output = torch.full(tokens.x.shape, float("nan"), dtype=case.dtype)
    prepare_finalize.finalize(output, out, weights, ids, False, None)
    return output


def _run_vllm_standard(
    buffers: GroupBuffers, case: DispatcherCase, tokens: RankTokens
) -> torch.Tensor:
    return _run_vllm(buffers, case, tokens, is_batched=False)


def _run_vllm_batched(
    buffers: GroupBuffers, case: DispatcherCase, tokens: RankTokens
) -> torch.Tensor:
    return _run_vllm(buffers, case, tokens, is_batched=True)


def _places_of_ranks(
    buffers: GroupBuffers, case: DispatcherCase, tokens: RankTokens
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Choices of places, of which every rank has as many, as frameworks have experts.

    Returns:
        Places of a rank, which may be left unused; int64 `[T, K]` chosen places, -1 for none; ids of
        the experts of this rank's places.
    """
    owner = buffers.get(case.num_experts).expert_rank.to(buffers.device, torch.int64)
    num_ranks = buffers.communicator.num_ranks
    first = torch.searchsorted(owner, torch.arange(num_ranks))  # of contiguous blocks of experts
    num_places = int(torch.bincount(owner, minlength=num_ranks).max())
    place = owner * num_places + torch.arange(case.num_experts) - first[owner]
    choices = torch.where(tokens.topk_idx < 0, -1, place[tokens.topk_idx.clamp(min=0)])
    mine = local_experts(buffers, case)
    return num_places, choices, torch.cat([mine, mine.new_zeros(num_places - mine.numel())])


def _megatron_places(
    buffers: GroupBuffers, case: DispatcherCase, tokens: RankTokens
) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choices for the places of all ranks, as Megatron takes them.

    Returns:
        Places of a rank; routing map and probs of all places; ids of the experts of this rank's places.
    """
    num_places, choices, ids = _places_of_ranks(buffers, case, tokens)
    num_columns = num_places * buffers.communicator.num_ranks
    routing_map, _ = routing_map_of_topk(choices, None, num_columns)
    # Differentiable: what stands at an unused choice goes to a column of its own.
    columns = choices.masked_fill(choices < 0, num_columns)
    dense = torch.zeros(tokens.x.shape[0], num_columns + 1)
    probs = dense.scatter(1, columns, tokens.topk_weights)[:, :-1]
    return num_places, routing_map, probs, ids


def _padded_experts(
    rows: torch.Tensor, tokens_per_expert: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Experts on rows whose counts have the padding in them; NaN behind the last."""
    offsets = torch.nn.functional.pad(tokens_per_expert.cumsum(0), (1, 0))
    return _grouped_experts(rows, offsets, tokens_per_expert, ids)


def _run_megatron(buffers: GroupBuffers, case: DispatcherCase, tokens: RankTokens) -> torch.Tensor:
    num_places, routing_map, probs, ids = _megatron_places(buffers, case, tokens)
    ranks = buffers.communicator
    dispatcher = MegatronTokenDispatcher(
        num_places,
        range(ranks.rank_idx * num_places, (ranks.rank_idx + 1) * num_places),
        types.SimpleNamespace(
            num_moe_experts=num_places * ranks.num_ranks, moe_router_topk=case.num_topk
        ),
        types.SimpleNamespace(ep=buffers.group, expt_tp=_ONE_RANK, tp_ep=buffers.group),
    )
    dispatcher._comm_manager = MegatronManager(
        buffers.group,
        num_places,
        expert_alignment=case.expert_alignment,
        quantization=case.quantization,
    )
    hidden, token_probs = dispatcher.dispatch_preprocess(tokens.x[None], routing_map, probs)
    rows, row_probs = dispatcher.token_dispatch(hidden, token_probs)
    rows, counts, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
    assert counts is not None
    out = _padded_experts(rows, counts, ids)
    out = (out * row_probs[:, None]).to(case.dtype)
    out = dispatcher.token_combine(dispatcher.combine_preprocess(out))
    return dispatcher.combine_postprocess(out)[0]


_ONE_RANK = RankThreads(1)[0]


def _run_hybrid_ep(buffers: GroupBuffers, case: DispatcherCase, tokens: RankTokens) -> torch.Tensor:
    num_places, routing_map, probs, ids = _megatron_places(buffers, case, tokens)
    num_rows = None
    if case.capacity_factor is not None:
        num_rows = fixed_rows(case, buffers.communicator.rank_idx)
    rows, row_probs, _, counts, handle = fused_a2a.hybrid_ep_dispatch(
        tokens.x,
        routing_map,
        probs,
        buffers.group,
        num_places,
        num_permuted_tokens=num_rows,
        pad_multiple=case.expert_alignment,
    )
    out = (_padded_experts(rows, counts, ids) * row_probs[:, None]).to(case.dtype)
    return fused_a2a.hybrid_ep_combine(out, handle, num_rows, case.expert_alignment)


def _run_fused(buffers: GroupBuffers, case: DispatcherCase, tokens: RankTokens) -> torch.Tensor:
    rows, ids, weights, _, handle = fused_a2a.fused_dispatch(
        tokens.x, tokens.topk_idx, tokens.topk_weights, case.num_experts, buffers.group
    )
    assert weights is not None
    out = torch.zeros(rows.shape)
    experts = local_experts(buffers, case)
    for topk_pos in range(ids.shape[1]):
        is_local = ids[:, topk_pos] >= 0
        here = is_local.nonzero().flatten()
        part = expert_output(rows[here], experts[ids[here, topk_pos]])
        out = out.index_add(0, here, part.float() * weights[here, topk_pos, None])
    y, _ = fused_a2a.fused_combine(out.to(case.dtype), buffers.group, handle)
    return y


_TRAINING = frozenset({"backward", "fp8", "rows per expert"})

DISPATCHERS: tuple[DispatcherTarget, ...] = (
    DispatcherTarget(name="plain", run=_run_plain_by_experts, features=_TRAINING, num_roundings=2),
    DispatcherTarget(
        name="plain, weighted in combine", run=_run_plain_by_combine, features=_TRAINING
    ),
    DispatcherTarget(
        name="plain, by routing map", run=_run_plain_by_map, features=_TRAINING, num_roundings=2
    ),
    DispatcherTarget(
        name="torchtitan", run=_run_torchtitan, features=frozenset({"backward", "rows"})
    ),
    DispatcherTarget(
        name="transformers", run=_run_transformers, features=frozenset({"backward", "fp8"})
    ),
    DispatcherTarget(
        name="megatron",
        run=_run_megatron,
        features=frozenset({"backward", "fp8"}),
        num_roundings=2,
    ),
    DispatcherTarget(
        name="fused_a2a, HybridEP",
        run=_run_hybrid_ep,
        features=frozenset({"backward", "rows"}),
        num_roundings=2,
    ),
    DispatcherTarget(
        name="fused_a2a",
        run=_run_fused,
        features=frozenset({"backward"}),
        num_roundings=2,
    ),
    DispatcherTarget(
        name="sglang normal",
        run=_run_sglang_normal,
        features=frozenset({"fp8"}),
        num_roundings=2,
    ),
    DispatcherTarget(
        name="sglang low latency", run=_run_sglang_low_latency, features=frozenset({"fp8"})
    ),
    DispatcherTarget(
        name="vllm standard",
        run=_run_vllm_standard,
        features=frozenset({"fp8"}),
        num_roundings=2,
    ),
    DispatcherTarget(name="vllm batched", run=_run_vllm_batched, features=frozenset({"fp8"})),
)
"""Every dispatcher of this package, each once per way it is used."""

"""vLLM's shape: prepare and finalize around fused experts, and the manager that makes their buffers.

Where vLLM can be imported its base classes, formats and metadata are used; without it the classes of
`vllm_formats` say the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch

from moe_comm.arguments import shown
from moe_comm.dispatcher.phases import (
    PendingCombine,
    PendingDispatch,
    begin_combine,
    begin_dispatch,
    by_expert,
)
from moe_comm.dispatcher.vllm_formats import (
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    PrepareAndFinalizeBase,
    current_ubatch_id,
    vllm_module,
)
from moe_comm.ep.buffer import EpBuffer, rejects_unbound
from moe_comm.ep.config import Layout
from moe_comm.ep.handles import DispatchHandle
from moe_comm.peers.missed_calls import Telling
from moe_comm.resharding.formats.number_formats import swizzle_scales
from moe_comm.tensors.memory_overlap import shares_bytes
from moe_comm.tensors.quantization import FP8_BLOCK128, MXFP8, Quantization, ScaleFormat

__all__ = [
    "ExpertTokensMetadata",
    "FusedMoEActivationFormat",
    "VllmPrepareAndFinalize",
    "weight_and_reduce",
]

_Rows = tuple[torch.Tensor, torch.Tensor | None]
_AsExpertsTake = Callable[[torch.Tensor, torch.Tensor | None], _Rows]
_PrepareResult = tuple[
    torch.Tensor, torch.Tensor | None, Any, torch.Tensor | None, torch.Tensor | None
]


def weight_and_reduce(
    fused_expert_output: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    apply_router_weight_on_input: bool,
) -> torch.Tensor:
    """Sum the outputs of a row's experts, in top-k order and float32. Local.

    Args:
        fused_expert_output: `[M, num_topk, hidden]`, or `[M, hidden]`, which is summed already.
        topk_weights: `[M, num_topk]`, 0 where the expert is elsewhere.
        apply_router_weight_on_input: The weights are in the outputs already; those of weight 0 are left
            out.

    Returns:
        `[M, hidden]`, dtype of the outputs.

    Raises:
        ValueError: There is not one weight for every output.
    """
    if fused_expert_output.dim() == 2:
        return fused_expert_output
    if topk_weights.shape != fused_expert_output.shape[:-1]:
        raise ValueError(
            f"topk_weights must have shape {tuple(fused_expert_output.shape[:-1])}, got "
            f"{tuple(topk_weights.shape)}"
        )
    is_local = topk_weights != 0
    weights = is_local.float() if apply_router_weight_on_input else topk_weights.float()
    total = torch.zeros_like(fused_expert_output[:, 0], dtype=torch.float32)
    for topk_pos in range(weights.shape[1]):
        # Rows of experts that are elsewhere are not defined: they may be NaN.
        rows = fused_expert_output[:, topk_pos].float()
        rows = rows.masked_fill(~is_local[:, topk_pos, None], 0)
        total += rows * weights[:, topk_pos, None]
    return total.to(fused_expert_output.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class _Prepared:
    """State of a prepare that the finalize after it needs."""

    pending: PendingDispatch

    @property
    def handle(self) -> DispatchHandle:
        """Handle of the dispatch, which has ended by the time it is asked for."""
        return self.pending.result.handle


class VllmPrepareAndFinalize(PrepareAndFinalizeBase):  # type: ignore[misc]
    """vLLM's `FusedMoEPrepareAndFinalizeModular` on `EpBuffer`, for inference: no gradients.

    Every rank calls in the same order. A micro-batch (`ubatch_id`) is prepared and finalized in turn;
    several may be in flight.

    Args:
        buffer: Buffer of the expert-parallel group; see `VllmAll2AllManager.get_handle`. The
            batched format needs its `num_max_tokens_per_rank`.
        is_batched: Rows lie at fixed places of every expert (`BatchedExperts`, for decode); else in
            order of source rank (`Standard`).
        has_local_ids: Whether ids are local, for experts that take no expert_map, as those of vLLM
            on CPUs: `Standard`, a row for every choice of a local expert, by expert, with the local
            id.
        quantization: Quantization of dispatched rows, in place of what `quant_config` asks for.
            "auto": by `quant_config`.
        ubatch_id: Names the current micro-batch; None for vLLM's own, or one micro-batch without vLLM.

    Raises:
        ValueError: The batched format without `num_max_tokens_per_rank`, or with local ids. A
            buffer with a placement.
    """

    def __init__(
        self,
        buffer: EpBuffer,
        *,
        is_batched: bool = False,
        has_local_ids: bool = False,
        quantization: Quantization | Literal["auto"] | None = "auto",
        ubatch_id: Callable[[], int] | None = None,
    ) -> None:
        # vLLM's base keeps its configuration objects, of which nothing is needed here.
        if is_batched and buffer.config.num_max_tokens_per_rank is None:
            raise ValueError(
                "the batched format needs a buffer with num_max_tokens_per_rank, got None"
            )
        if is_batched and has_local_ids:
            raise ValueError(
                "is_batched and has_local_ids are both True: rows of the batched format have no ids"
            )
        if buffer.config.placement is not None:
            raise ValueError("vLLM's experts take no buffer with a placement of replicas")
        self.buffer = buffer
        self.is_batched = is_batched
        self._has_local_ids = has_local_ids
        self._layout = Layout.RANK_MAJOR
        if is_batched:
            self._layout = Layout.LOW_LATENCY
        elif has_local_ids:
            self._layout = Layout.EXPERT_MAJOR
        self._quantization = quantization
        self._block_scales: dict[str, Any] = {}
        self._ubatch_id = current_ubatch_id() if ubatch_id is None else ubatch_id
        self._prepared: dict[int, _Prepared] = {}
        is_local = buffer.expert_rank == buffer.communicator.rank_idx
        self._global_ids = is_local.nonzero().flatten().to(buffer.communicator.device)
        elsewhere = (~is_local).nonzero().flatten()
        # Fused experts take ids for valid that their expert_map then turns into "not here".
        self._id_elsewhere = int(elsewhere[0]) if elsewhere.numel() else -1

    @staticmethod
    def maybe_roundup_layer_hidden_size(hidden_size: int, dtype: torch.dtype) -> int:
        """The hidden size at which rows can be moved: a multiple of 16 bytes."""
        multiple = 16 // dtype.itemsize
        return -(-hidden_size // multiple) * multiple

    def post_init_setup(self, fused_experts: Any) -> None:
        """Ask which FP8 scales the experts take: packed (UE8M0), powers of two, or any."""
        # The same as vLLM 0.32's own: deepep_ll packs them, in the order of DeepEP's; deepep_ht quantizes by
        # per_token_group_quant_fp8, which rounds them where is_deep_gemm_e8m0_used().
        deep_gemm = vllm_module("utils.deep_gemm")
        if fused_experts.supports_packed_ue8m0_act_scales():
            self._block_scales = {
                "scale_format": ScaleFormat.UE8M0,
                "is_column_major": self.is_batched,
            }
        elif deep_gemm and deep_gemm.is_deep_gemm_e8m0_used() and not self.is_batched:
            self._block_scales = {"scale_format": ScaleFormat.FLOAT32_POWER_OF_2}
        else:
            self._block_scales = {}

    @property
    def activation_format(self) -> Any:
        """BatchedExperts or Standard."""
        formats = FusedMoEActivationFormat
        return formats.BatchedExperts if self.is_batched else formats.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        """int64."""
        return torch.int64

    def max_num_tokens_per_rank(self) -> int | None:
        """Return the most tokens of a rank in the batched format; None otherwise, which takes any number."""
        return self.buffer.config.num_max_tokens_per_rank if self.is_batched else None

    def num_dispatchers(self) -> int:
        """Ranks that send tokens."""
        return self.buffer.communicator.num_ranks

    def output_is_reduced(self) -> bool:
        """True: finalize returns sums over all ranks."""
        return True

    def supports_async(self) -> bool:
        """True: `prepare_async` and `finalize_async` return before peers have answered."""
        return True

    def supports_deferred_moe_finalize(self) -> bool:
        """False: the sum over ranks happens in finalize."""
        return False

    @rejects_unbound("dispatch", lambda args, _: args[0].buffer)
    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> _PrepareResult:
        """Quantize and dispatch, or the other way round where scales cannot travel. Collective.

        Args:
            a1: `[num_tokens, hidden]`.
            topk_weights: `[num_tokens, num_topk]`.
            topk_ids: Integers `[num_tokens, num_topk]`, global expert ids; -1 marks an unused choice.
            num_experts: Experts over all ranks.
            expert_map: int32 `[num_experts]`, the local id of every expert, -1 elsewhere. Not needed:
                the buffer knows the placement. With local ids it must agree.
            apply_router_weight_on_input: Multiply rows by their weight before they travel; one choice
                per token.
            quant_config: Says `quant_dtype` and `block_shape` of the experts' input.
            defer_input_quant: The experts quantize; rows travel as they are.

        Returns:
            Rows; their scales or None; token counts; and in the standard format the ids and weights of
            every row (global ids, of an expert elsewhere where the choice is not local; weights 0
            there; with local ids int32 and float32 `[M, 1]`), in the batched format None and None.

        Raises:
            ValueError: A shape is wrong, several choices with `apply_router_weight_on_input`, or an
                expert_map of another placement.
            NotImplementedError: A quantization that is done neither in the dispatch nor after it.
        """
        hook, receiver = self.prepare_async(
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )
        hook()
        return receiver()

    @rejects_unbound("dispatch", lambda args, _: args[0].buffer)
    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Callable[[], None], Callable[[], _PrepareResult]]:
        """Begin what `prepare` does; arguments and errors as there.

        Returns:
            A hook that waits, and a receiver that returns what `prepare` returns. Both may be called
            any number of times.
        """
        buffer = self.buffer
        with Telling(buffer.reject, "dispatch", untold=NotImplementedError):
            if num_experts != buffer.config.num_experts:
                raise ValueError(
                    f"num_experts is {num_experts}, the buffer has {buffer.config.num_experts}"
                )
            if apply_router_weight_on_input and topk_ids.shape[1] != 1:
                raise ValueError(
                    f"apply_router_weight_on_input needs 1 choice per token, got {topk_ids.shape[1]}"
                )
            if self._has_local_ids and expert_map is not None:
                self._check_expert_map(expert_map)
            quantization, as_experts_take = self._resolve_quantization(
                quant_config, defer_input_quant
            )
            if apply_router_weight_on_input:
                a1 = a1 * topk_weights.to(a1.dtype)
        pending = begin_dispatch(
            buffer,
            a1,
            topk_ids,
            None if self.is_batched else topk_weights,
            layout=self._layout,
            quantization=quantization,
        )
        self._prepared[self._ubatch_id()] = _Prepared(pending)

        def hook() -> None:
            pending.wait()

        return hook, lambda: self._receive(pending, as_experts_take)

    @rejects_unbound("combine", lambda args, _: args[0].buffer)
    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any = None,
    ) -> None:
        """Weigh and sum the experts' outputs, bring them back, write the sums to `output`. Collective.

        Args:
            output: `[num_tokens, hidden]`, written in place.
            fused_expert_output: Standard: `[M, num_topk, hidden]`, or `[M, hidden]` that is summed over
                a row's experts already. Batched: `[num_local_experts, n, hidden]`, unweighted.
            topk_weights: As `prepare` returned them; batched: of this rank's tokens.
            topk_ids: The same.
            apply_router_weight_on_input: As in `prepare`.
            weight_and_reduce_impl: Object of vLLM whose `apply` weighs and sums; None, or one that
                delegates, for `weight_and_reduce`.
        """
        hook, receiver = self.finalize_async(
            output,
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )
        hook()
        receiver()

    @rejects_unbound("combine", lambda args, _: args[0].buffer)
    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any = None,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Begin what `finalize` does; arguments and errors as there.

        Returns:
            A hook that waits, and a receiver after which `output` holds the sums.

        Raises:
            RuntimeError: This micro-batch is not prepared.
        """
        prepared = self._prepared.pop(self._ubatch_id(), None)
        if prepared is None:
            raise RuntimeError(
                f"micro-batch {self._ubatch_id()} is finalized before it is prepared"
            )
        weights = None
        with Telling(self.buffer.reject, "combine"):
            if self.is_batched:
                rows = fused_expert_output.flatten(0, -2)
                if not apply_router_weight_on_input:
                    weights = topk_weights
            else:
                rows = self._reduce_locally(
                    fused_expert_output,
                    topk_weights,
                    topk_ids,
                    apply_router_weight_on_input,
                    weight_and_reduce_impl,
                )
            if not isinstance(output, torch.Tensor):
                raise TypeError(f"output must be a tensor, got {type(output).__name__}")
            wanted = (prepared.handle.num_tokens, rows.shape[-1])
            if output.shape != wanted:
                raise ValueError(f"output must have shape {wanted}, got {tuple(output.shape)}")
            if output.device != rows.device or output.layout is not torch.strided:
                raise ValueError(
                    f"output must be dense and on {rows.device}, got layout {output.layout} on "
                    f"{output.device}"
                )
            # An output that cannot be written while rows are read is copied when all has come.
            takes_out = (
                output.is_contiguous()
                and output.dtype is rows.dtype
                and not shares_bytes(output, rows)
                and not (isinstance(weights, torch.Tensor) and shares_bytes(output, weights))
            )
        pending = begin_combine(
            self.buffer,
            rows,
            prepared.handle,
            topk_weights=weights,
            out=output if takes_out else None,
        )
        return self._take_combined(pending, None if takes_out else output)

    @staticmethod
    def _take_combined(
        pending: PendingCombine, copy_to: torch.Tensor | None
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        def hook() -> None:
            pending.wait()

        def receiver() -> None:
            sums = pending.wait()
            if copy_to is not None:
                copy_to.copy_(sums)

        return hook, receiver

    def _reduce_locally(
        self,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        impl: Any,
    ) -> torch.Tensor:
        if impl is None or type(impl).__name__ == "TopKWeightAndReduceDelegate":
            return weight_and_reduce(
                fused_expert_output,
                topk_weights,
                apply_router_weight_on_input=apply_router_weight_on_input,
            )
        reduced: torch.Tensor = impl.apply(
            output=None,
            fused_expert_output=fused_expert_output,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
        return reduced

    def _receive(
        self, pending: PendingDispatch, as_experts_take: _AsExpertsTake | None
    ) -> _PrepareResult:
        result = pending.wait()
        rows, scales = result.x, result.x_sf
        if as_experts_take is not None:
            rows, scales = as_experts_take(rows, scales)
        counts = result.num_tokens_per_expert.to(torch.int32)
        metadata = ExpertTokensMetadata(
            expert_num_tokens=counts.to(result.x.device), expert_num_tokens_cpu=counts
        )
        if self.is_batched:
            return by_expert(rows, counts.numel()), scales, metadata, None, None
        if self._has_local_ids:
            assert result.topk_weights is not None
            local_ids = torch.arange(counts.numel(), dtype=torch.int32, device=rows.device)
            ids = local_ids.repeat_interleave(counts.to(rows.device), output_size=rows.shape[0])
            return rows, scales, metadata, ids[:, None], result.topk_weights[:, None]
        assert result.topk_idx is not None
        ids = torch.full_like(result.topk_idx, self._id_elsewhere)
        is_local = result.topk_idx >= 0
        ids[is_local] = self._global_ids[result.topk_idx[is_local]]
        return rows, scales, metadata, ids, result.topk_weights

    def _check_expert_map(self, expert_map: torch.Tensor) -> None:
        """Refuse another placement than the buffer's: rows would meet the weights of other experts."""
        found = expert_map.cpu()
        expected = found.new_full((self.buffer.config.num_experts,), -1)
        here = self._global_ids.cpu()
        expected[here] = torch.arange(here.numel(), dtype=found.dtype, device=found.device)
        if not torch.equal(found, expected):
            raise ValueError(
                f"expert_map must be {shown(expected.tolist())}, where the buffer has its experts, got "
                f"{shown(found.tolist())}"
            )

    def _resolve_quantization(
        self, quant_config: Any, defer_input_quant: bool
    ) -> tuple[Quantization | None, _AsExpertsTake | None]:
        """Return the quantization of rows, and a function for rows and scales on arrival; errors are every rank's."""
        if self._quantization != "auto":
            return self._quantization, None
        dtype = getattr(quant_config, "quant_dtype", None)
        if defer_input_quant or dtype is None:
            return None, None
        block_shape = getattr(quant_config, "block_shape", None)
        if dtype is torch.float8_e4m3fn and block_shape is not None and block_shape[-1] == 128:
            return dataclasses.replace(FP8_BLOCK128, **self._block_scales), None
        if dtype == "mxfp8":
            # vLLM 0.32's experts know exponents by their dtype, uint8 (deep_gemm_utils packs no other), and some
            # read them in tiles (prepare_finalize/deepep_v2).
            is_swizzled = quant_config.is_scale_swizzled
            if is_swizzled and self.is_batched:
                raise NotImplementedError("MXFP8 scales cannot be swizzled in the batched format")

            def exponents(rows: torch.Tensor, scales: torch.Tensor | None) -> _Rows:
                assert scales is not None
                return rows, (swizzle_scales(scales) if is_swizzled else scales).view(torch.uint8)

            return MXFP8, exponents
        kinds = f"rows cannot be quantized to {dtype} with blocks {block_shape} while they are dispatched"
        if self.is_batched:
            # A scale of all rows would come of what stands in places that nobody filled.
            raise NotImplementedError(f"{kinds}, nor afterwards in the batched format")
        utils = vllm_module("model_executor.layers.fused_moe.utils")
        if utils is None:
            raise NotImplementedError(f"{kinds}, and vLLM is not there to do it afterwards")

        def quantize_received(rows: torch.Tensor, scales: torch.Tensor | None) -> _Rows:
            if not rows.numel():
                return rows, scales
            quantized: _Rows = utils.moe_kernel_quantize_input(
                rows,
                quant_config.a1_gscale if dtype == "nvfp4" else quant_config.a1_scale,
                quant_dtype=dtype,
                per_act_token_quant=quant_config.per_act_token_quant,
                block_shape=block_shape,
                is_scale_swizzled=quant_config.is_scale_swizzled,
            )
            return quantized

        return None, quantize_received

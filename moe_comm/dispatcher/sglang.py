"""SGLang's dispatcher shape: two formats, two phases, several micro-batches in flight."""

from __future__ import annotations

import dataclasses
import enum
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_comm import env
from moe_comm.arguments import check_bool, check_kind, shown
from moe_comm.dispatcher.hooks import HookList, RemovableHook
from moe_comm.dispatcher.phases import (
    PendingCombine,
    PendingDispatch,
    begin_combine,
    begin_dispatch,
    by_expert,
)
from moe_comm.dispatcher.sglang_dtypes import QUANT_KEYS, DtypeChoice
from moe_comm.dispatcher.sglang_formats import (
    BaseDispatcher,
    CombineInputFormat,
    DeepEPLLCombineInput,
    DeepEPLLDispatchOutput,
    DeepEPNormalCombineInput,
    DeepEPNormalDispatchOutput,
    DispatchOutputFormat,
)
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.call_options import check_alignment
from moe_comm.ep.config import Layout
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.ep.handles import DispatchHandle
from moe_comm.ep.placement import EMPTY_SLOT, Placement, ReplicaRule
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.missed_calls import Telling, keeps_unbound
from moe_comm.tensors.quantization import Quantization

__all__ = [
    "CombineInputFormat",
    "DeepEPLLCombineInput",
    "DeepEPLLDispatchOutput",
    "DeepEPNormalCombineInput",
    "DeepEPNormalDispatchOutput",
    "DispatchOutputFormat",
    "SglangDispatcher",
]


class _Stage(enum.Enum):
    """Stage of a micro-batch; each call takes it one further."""

    INITIAL = "before dispatch_a"
    AFTER_DISPATCH_A = "between dispatch_a and dispatch_b"
    AFTER_DISPATCH_B = "between dispatch_b and combine_a"
    AFTER_COMBINE_A = "between combine_a and combine_b"


@dataclasses.dataclass(eq=False)
class _MicroBatch:
    """State of one micro-batch between its calls."""

    stage: _Stage = _Stage.INITIAL
    is_low_latency: bool = False
    topk_ids: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    expected_m: int = 0
    dispatch: PendingDispatch | None = None
    handle: DispatchHandle | None = None
    combine: PendingCombine | None = None

    def advance(self, method: str, old: _Stage, new: _Stage) -> None:
        """Refuse a call out of order."""
        if self.stage is not old:
            raise RuntimeError(f"{method} is called {self.stage.value}")
        self.stage = new


def _value_of(mode: object) -> str:
    """Return the value of SGLang's `DeepEPMode`; "" for anything else."""
    value = mode.value if isinstance(mode, enum.Enum) else ""
    return value if isinstance(value, str) else ""


class SglangDispatcher(BaseDispatcher):  # type: ignore[misc]
    """SGLang's `DeepEPDispatcher` on `EpBuffer`, for inference: no gradients.

    `dispatch_a` and `combine_a` begin an operation and return; `dispatch_b` and `combine_b` wait for it.
    Between them another micro-batch may begin its own: in another dispatcher of the same group, or in
    this one under another `tbo_subbatch_index`. Every rank calls in the same order.

    Args:
        group: Process group, bootstrap, or None for the default group.
        router_topk: Columns of `topk_ids`.
        permute_fusion: Option of SGLang's GPU kernels; a bool, without effect.
        num_experts: Experts over all ranks.
        num_local_experts: Checked against the placement where given.
        hidden_size: Checked against `hidden_states` where given.
        params_dtype: Checked against `hidden_states` where given.
        deepep_mode: "normal", "low_latency" or "auto" (by `is_extend_in_batch`), or SGLang's
            `DeepEPMode`.
        async_finish: Phases never block: a bool, without effect.
        return_recv_hook: The same.
        runner_backend: Backend of SGLang's experts. If it is given, SGLang chooses how rows travel:
            by its server arguments, by what its quantization methods say and by this backend.
        num_max_tokens_per_rank: Most tokens of a rank in a low-latency dispatch, any number; None
            for what `SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK` says, 128 when unset, as in
            SGLang.
        expert_alignment: Multiple to which `num_recv_tokens_per_expert` is rounded up.
        quantization: Quantization of dispatched rows; see also `set_quant_config`.
        is_extend_in_batch: Whether the batch holds prefill, which is not low-latency; for "auto". None
            for SGLang's own `get_is_extend_in_batch`.
        physical_to_logical_map: Integers `[num_experts]`: the logical expert of every physical one, -1 for an
            empty slot, as `ExpertLocationMetadata` has it for the layer; `num_experts` counts physical
            experts, as SGLang does. The dispatcher then has buffers of its own. None: ids are not looked at.
        replica_rule: "given": `topk_ids` are physical ids, as SGLang's routers make them. "balanced",
            "nearest", "hash": they are logical, and the dispatcher chooses; see docs/replicas.md. Needs a map.

    Raises:
        ValueError: An argument breaks a rule above.
    """

    @keeps_unbound
    def __init__(
        self,
        group: dist.ProcessGroup | Bootstrap | None,
        router_topk: int,
        permute_fusion: bool = False,
        num_experts: int | None = None,
        num_local_experts: int | None = None,
        hidden_size: int | None = None,
        params_dtype: torch.dtype | None = None,
        deepep_mode: Any = "auto",
        async_finish: bool = False,
        return_recv_hook: bool = False,
        runner_backend: Any = None,
        *,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int = 1,
        quantization: Quantization | None = None,
        is_extend_in_batch: Callable[[], bool] | None = None,
        physical_to_logical_map: torch.Tensor | Sequence[int] | None = None,
        replica_rule: ReplicaRule = "given",
    ) -> None:
        super().__init__()
        mode = deepep_mode if isinstance(deepep_mode, str) else _value_of(deepep_mode)
        self._dtypes = DtypeChoice(quantization, runner_backend)
        self._is_extend_in_batch = is_extend_in_batch

        def check() -> Placement | None:
            if mode not in ("normal", "low_latency", "auto"):
                raise ValueError(
                    f'deepep_mode must be "normal", "low_latency" or "auto", got {shown(deepep_mode)}'
                )
            if num_experts is None:
                raise ValueError("num_experts is needed, got None")
            check_bool("permute_fusion", permute_fusion)
            check_bool("async_finish", async_finish)
            check_bool("return_recv_hook", return_recv_hook)
            check_alignment(expert_alignment)
            check_kind("quantization", quantization, Quantization, is_optional=True)
            if is_extend_in_batch is not None and not callable(is_extend_in_batch):
                raise TypeError(
                    f"is_extend_in_batch must be callable, got {shown(is_extend_in_batch)}"
                )
            if mode == "auto" and is_extend_in_batch is None:
                self._is_extend_in_batch = _sglang_is_extend_in_batch()
            if mode != "normal" and num_max_tokens_per_rank is None:
                env.sglang_num_max_dispatch_tokens_per_rank()
            self._dtypes.update({})
            if physical_to_logical_map is not None:
                return self._placement_of(physical_to_logical_map)
            if replica_rule != "given":
                raise ValueError(
                    f"replica_rule needs a physical_to_logical_map, got {shown(replica_rule)} and None"
                )
            return None

        self.num_experts: Any = num_experts
        self._replica_rule = replica_rule
        self.deepep_mode = mode
        self.router_topk = router_topk
        self.hidden_size = hidden_size
        self.params_dtype = params_dtype
        self.expert_alignment = expert_alignment
        self.quant_config: dict[str, Any] | None = None
        self.overlap_args: Any = None
        self.meta_overlap_args: dict[str, Any] | None = None
        self.runner_backend = runner_backend
        self.expert_mask_gpu: torch.Tensor | None = None  # of kernels of AMD GPUs
        # Held here: those of a bootstrap live as long as somebody holds them.
        self._group_buffers = group_buffers(group)
        self._buffers: dict[bool, EpBuffer] = {}
        most_tokens: list[int | None] = [None]
        if mode != "normal":
            most_tokens = [_most_tokens(num_max_tokens_per_rank)]
        if mode == "auto":
            most_tokens.insert(0, None)
        for most in most_tokens:
            buffer = self._group_buffers.get_together(
                f"SglangDispatcher in mode {shown(mode)}",
                num_experts,
                num_max_tokens_per_rank=most,
                num_local_experts=num_local_experts,
                check=check,
                replica_rule=replica_rule,
                key=None if physical_to_logical_map is None else object(),
            )
            self._buffers[most is not None] = buffer
        self.num_experts = buffer.config.num_slots
        self._first_slots: torch.Tensor | None = None
        if physical_to_logical_map is not None:
            self._first_slots = self._find_first_slots(physical_to_logical_map)
        self._micro_batches: dict[int | None, _MicroBatch] = {}
        self._pre_dispatch, self._post_dispatch = HookList(), HookList()
        self._pre_combine, self._post_combine = HookList(), HookList()
        self._between_phases = HookList()

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_output: Any,
        *,
        tbo_subbatch_index: int | None = None,
    ) -> Any:
        """Both phases in one; see `dispatch_a` and `dispatch_b`."""
        self.dispatch_a(hidden_states, topk_output, tbo_subbatch_index=tbo_subbatch_index)
        self._between_phases.run(self)
        return self.dispatch_b(tbo_subbatch_index=tbo_subbatch_index)

    def dispatch_a(
        self,
        hidden_states: torch.Tensor,
        topk_output: Any,
        *,
        tbo_subbatch_index: int | None = None,
    ) -> None:
        """Begin to send every token to the ranks of its experts. Collective.

        Args:
            hidden_states: `[num_tokens, hidden]`, or a pair (data, scales) that is quantized already.
                Not changed before `dispatch_b`.
            topk_output: Has `topk_ids`, integers `[num_tokens, router_topk]` with -1 for an unused
                choice, and `topk_weights` of that shape.
            tbo_subbatch_index: Names the micro-batch, where several share this dispatcher.

        Raises:
            RuntimeError: This micro-batch is not before its dispatch.
            ValueError: A shape is wrong on some rank.
            TypeError: A dtype is wrong on some rank.
        """
        batch = self._micro_batches.setdefault(tbo_subbatch_index, _MicroBatch())
        batch.advance("dispatch_a", _Stage.INITIAL, _Stage.AFTER_DISPATCH_A)
        try:
            hidden_states, topk_output = self._pre_dispatch.run(self, hidden_states, topk_output)
            batch.is_low_latency = self._resolve_low_latency()
            buffer = self._buffers[batch.is_low_latency]
            with Telling(buffer.reject, "dispatch"):
                ids, weights = topk_output.topk_ids, topk_output.topk_weights
                self._check(hidden_states, ids, weights)
                slots = self._as_slots(ids)
            num_ranks = buffer.communicator.num_ranks
            batch.topk_ids, batch.topk_weights = ids, weights
            # Rounded up, as in DeepEP's callers: a hint for the grouped GEMM.
            batch.expected_m = (ids.numel() * num_ranks + self.num_experts) // self.num_experts
            batch.dispatch = begin_dispatch(
                buffer,
                hidden_states,
                slots,
                None if batch.is_low_latency else weights,
                layout=Layout.LOW_LATENCY if batch.is_low_latency else Layout.RANK_MAJOR,
                expert_alignment=1 if batch.is_low_latency else self.expert_alignment,
                quantization=self._dtypes.of_mode(is_low_latency=batch.is_low_latency),
            )
        except BaseException:
            del self._micro_batches[tbo_subbatch_index]
            raise

    def dispatch_b(self, *, tbo_subbatch_index: int | None = None) -> Any:
        """Wait for what `dispatch_a` began.

        Returns:
            A `DeepEPNormalDispatchOutput` or a `DeepEPLLDispatchOutput`.
        """
        batch = self._micro_batch("dispatch_b", tbo_subbatch_index)
        batch.advance("dispatch_b", _Stage.AFTER_DISPATCH_A, _Stage.AFTER_DISPATCH_B)
        assert batch.dispatch is not None
        try:
            result = batch.dispatch.wait()
        except BaseException:
            del self._micro_batches[tbo_subbatch_index]
            raise
        batch.dispatch = None
        batch.handle = result.handle
        if batch.is_low_latency:
            output = DeepEPLLDispatchOutput(
                by_expert(result.x, result.num_tokens_per_expert.numel()),
                result.x_sf,
                batch.topk_ids,
                batch.topk_weights,
                result.num_tokens_per_expert.to(torch.int32),
                batch.expected_m,
            )
        else:
            output = DeepEPNormalDispatchOutput(
                result.x,
                result.x_sf,
                result.topk_idx,
                result.topk_weights,
                result.expert_offsets.diff().tolist(),
            )
        (output,) = self._post_dispatch.run(self, output)
        return output

    def combine(self, combine_input: Any, *, tbo_subbatch_index: int | None = None) -> torch.Tensor:
        """Both phases in one; see `combine_a` and `combine_b`."""
        self.combine_a(combine_input, tbo_subbatch_index=tbo_subbatch_index)
        return self.combine_b(tbo_subbatch_index=tbo_subbatch_index)

    def combine_a(self, combine_input: Any, *, tbo_subbatch_index: int | None = None) -> None:
        """Begin to bring the experts' outputs back. Collective.

        Args:
            combine_input: (hidden_states, topk_ids, topk_weights). After a normal dispatch:
                `[M, hidden]`, the weighted sum of a row's local experts. After a low-latency one:
                `[num_local_experts, n, hidden]`, unweighted, and the weights of this rank's tokens.
            tbo_subbatch_index: As in `dispatch_a`.
        """
        batch = self._micro_batch("combine_a", tbo_subbatch_index)
        batch.advance("combine_a", _Stage.AFTER_DISPATCH_B, _Stage.AFTER_COMBINE_A)
        assert batch.handle is not None
        try:
            (combine_input,) = self._pre_combine.run(self, combine_input)
            with Telling(self._buffers[batch.is_low_latency].reject, "combine"):
                hidden_states, _, topk_weights = combine_input
                if batch.is_low_latency:
                    hidden_states = hidden_states.flatten(0, -2)
            batch.combine = begin_combine(
                self._buffers[batch.is_low_latency],
                hidden_states,
                batch.handle,
                topk_weights=topk_weights if batch.is_low_latency else None,
            )
        except BaseException:
            del self._micro_batches[tbo_subbatch_index]
            raise

    def combine_b(self, *, tbo_subbatch_index: int | None = None) -> torch.Tensor:
        """Wait for what `combine_a` began.

        Returns:
            `[num_tokens, hidden]`, dtype of the experts' outputs.
        """
        batch = self._micro_batch("combine_b", tbo_subbatch_index)
        batch.advance("combine_b", _Stage.AFTER_COMBINE_A, _Stage.INITIAL)
        del self._micro_batches[tbo_subbatch_index]
        assert batch.combine is not None
        (hidden_states,) = self._post_combine.run(self, batch.combine.wait())
        result: torch.Tensor = hidden_states
        return result

    def replace_physical_to_logical_map(
        self, physical_to_logical_map: torch.Tensor | Sequence[int]
    ) -> None:
        """Follow a rearrangement of experts. Collective, between two forwards.

        Batches that are in flight go on by the map of their dispatch. Weights are SGLang's to move.

        Args:
            physical_to_logical_map: As the constructor's, of as many physical and logical experts.

        Raises:
            ValueError: The dispatcher has none to replace, that of some rank does not fit, or ranks differ; on
                every rank, and the present one stays.
            TypeError: The map of some rank does not hold integers.
        """
        with Telling(self._group_buffers.communicator.reject):
            if self._first_slots is None:
                raise ValueError("the dispatcher was made without a physical_to_logical_map")
            placement = self._placement_of(physical_to_logical_map)
        for buffer in self._buffers.values():
            buffer.replace_placement(placement)
        self._first_slots = self._find_first_slots(physical_to_logical_map)

    def _placement_of(self, physical_to_logical_map: torch.Tensor | Sequence[int]) -> Placement:
        placement = Placement.of_table(
            physical_to_logical_map, self._group_buffers.communicator.num_ranks
        )
        if placement.num_slots != self.num_experts:
            raise ValueError(
                f"physical_to_logical_map must have num_experts = {shown(self.num_experts)} physical "
                f"experts, got {placement.num_slots}"
            )
        return placement

    def _as_slots(self, ids: torch.Tensor) -> torch.Tensor:
        """Physical experts as slots that hold experts; what is none stays, for the buffer to refuse."""
        first = self._first_slots
        if first is None or self._replica_rule != "given" or ids.is_floating_point():
            return ids
        at = ids.to(torch.int64).clamp(0, first.numel() - 1)
        return torch.where(at == ids, first[at], ids)

    def _find_first_slots(
        self, physical_to_logical_map: torch.Tensor | Sequence[int]
    ) -> torch.Tensor:
        """The slot of every physical expert: of several with one logical expert on a rank, the first."""
        num_ranks = self._group_buffers.communicator.num_ranks
        table = torch.as_tensor(physical_to_logical_map, device="cpu").view(num_ranks, -1).tolist()
        size = len(table[0])
        first = [
            rank_idx * size + (slot_idx if expert_idx == EMPTY_SLOT else row.index(expert_idx))
            for rank_idx, row in enumerate(table)
            for slot_idx, expert_idx in enumerate(row)
        ]
        return torch.tensor(first, device=self._group_buffers.device)

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        """Say how rows travel from the next dispatch on; the same on every rank.

        Args:
            quant_config: Configuration that SGLang's quantization methods send; none of the keys is
                needed. "dispatcher_output_dtype": "bf16", "fp8" (`FP8_BLOCK128`) or "mxfp8";
                "normal_dispatcher_output_dtype" and "low_latency_dispatcher_output_dtype": the same
                for one mode, before it. "input_global_scale": None, because NVFP4 is not offered.
                "weight_dtype", "use_mxfp8" and "quant_type": of the experts, which does not matter
                here. Of this package: "quantization", a `Quantization` or None, before all of them.

        Raises:
            ValueError: A key or a value is unknown.
            NotImplementedError: Another format is asked for.
        """
        unknown = set(quant_config) - QUANT_KEYS
        if unknown:
            raise ValueError(
                f"quant_config may have {sorted(QUANT_KEYS)}, got {sorted(unknown)} as well"
            )
        self._dtypes.update(quant_config)
        self.quant_config = dict(quant_config)

    def set_overlap_args(
        self, combine_overlap_args: Any, meta_overlap_args: dict[str, Any]
    ) -> None:
        """Keep what GPU kernels use to combine while experts compute.

        On the CPU a combine reads outputs that are complete, so this has no effect.
        """
        self.overlap_args = combine_overlap_args
        self.meta_overlap_args = meta_overlap_args

    def clear_overlap_args(self) -> None:
        """Undo `set_overlap_args`."""
        self.overlap_args = None
        self.meta_overlap_args = None

    def register_pre_dispatch_hook(self, hook: Callable[..., Any]) -> RemovableHook:
        """Call `hook(dispatcher, hidden_states, topk_output)` before every dispatch; may replace both."""
        return self._pre_dispatch.register(hook)

    def register_post_dispatch_hook(self, hook: Callable[..., Any]) -> RemovableHook:
        """Call `hook(dispatcher, dispatch_output)` after every dispatch; may replace it."""
        return self._post_dispatch.register(hook)

    def register_pre_combine_hook(self, hook: Callable[..., Any]) -> RemovableHook:
        """Call `hook(dispatcher, combine_input)` before every combine; may replace it."""
        return self._pre_combine.register(hook)

    def register_post_combine_hook(self, hook: Callable[..., Any]) -> RemovableHook:
        """Call `hook(dispatcher, hidden_states)` after every combine; may replace them."""
        return self._post_combine.register(hook)

    def register_deepep_dispatch_hook(self, hook: Callable[..., Any]) -> RemovableHook:
        """Call `hook(dispatcher)` between the phases of every `dispatch`."""
        return self._between_phases.register(hook)

    def _resolve_low_latency(self) -> bool:
        if self.deepep_mode != "auto":
            return bool(self.deepep_mode == "low_latency")
        assert self._is_extend_in_batch is not None
        return not self._is_extend_in_batch()

    def _micro_batch(self, method: str, index: int | None) -> _MicroBatch:
        batch = self._micro_batches.get(index)
        if batch is None:
            raise RuntimeError(f"{method} is called {_Stage.INITIAL.value}")
        return batch

    def _check(self, hidden_states: Any, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Raise what is wrong with the input beyond what the buffer checks."""
        rows = hidden_states[0] if isinstance(hidden_states, tuple) else hidden_states
        if ids.dim() != 2 or ids.shape[1] != self.router_topk:
            raise ValueError(
                f"topk_ids must have {self.router_topk} columns, got shape {tuple(ids.shape)}"
            )
        if weights.shape != ids.shape:
            raise ValueError(
                f"topk_weights {tuple(weights.shape)} and topk_ids {tuple(ids.shape)} must have one "
                f"shape"
            )
        if self.hidden_size is not None and rows.shape[-1] != self.hidden_size:
            raise ValueError(
                f"hidden_states has hidden {rows.shape[-1]}, hidden_size is {self.hidden_size}"
            )
        is_quantized = isinstance(hidden_states, tuple)
        if self.params_dtype not in (None, rows.dtype) and not is_quantized:
            raise TypeError(f"hidden_states is {rows.dtype}, params_dtype is {self.params_dtype}")


def _most_tokens(given: int | None) -> int:
    """Return the most tokens of a rank in a low-latency batch."""
    if given is not None:
        return given
    try:
        return env.sglang_num_max_dispatch_tokens_per_rank()
    except ValueError:
        return 1  # the check, which every rank hears of, reads it again


def _sglang_is_extend_in_batch() -> Callable[[], bool]:
    """SGLang's own answer to whether the batch holds prefill."""
    try:
        module = importlib.import_module("sglang.srt.layers.dp_attention")
    except ImportError as error:
        raise ValueError(
            'deepep_mode="auto" needs is_extend_in_batch where SGLang cannot be imported'
        ) from error
    function: Callable[[], bool] = module.get_is_extend_in_batch
    return function

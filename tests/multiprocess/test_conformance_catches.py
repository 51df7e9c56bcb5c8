"""The conformance suite fails for backends that are wrong in one way each."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NoReturn

import pytest
import torch

from moe_comm.ep import spec
from moe_comm.ep.backends import reference
from moe_comm.ep.backends.base import CombineOutput, DispatchOutput, Operation, Plan
from moe_comm.ep.call_options import DispatchOptions
from moe_comm.ep.config import Capacity, EpConfig, Layout
from moe_comm.ep.gradient_word import ENABLED
from moe_comm.tensors.quantization import FP8_BLOCK128
from moe_comm.testing import CHECKS, Case, ConformanceError, RankError, Target, check_case


class _Mutant(reference.ReferenceBackend):
    """The reference with hooks on what it returns."""

    def dispatch(self, *args: Any, **options: Any) -> Operation[DispatchOutput]:
        output = super().dispatch(*args, **options).wait()
        return self.spoil(dataclasses.replace(output, x=self.spoil_rows(output)))

    def combine(self, *args: Any) -> Operation[CombineOutput]:
        output = super().combine(*args).wait()
        if output.x is None:
            return output
        return dataclasses.replace(output, x=self.spoil_sums(output.x))

    def spoil(self, output: DispatchOutput) -> DispatchOutput:
        return output

    def spoil_rows(self, output: DispatchOutput) -> torch.Tensor:
        return output.x

    def spoil_sums(self, sums: torch.Tensor) -> torch.Tensor:
        return sums


class QuietsNans(_Mutant):
    def spoil_rows(self, output: DispatchOutput) -> torch.Tensor:
        return output.x * 1


class LeavesPaddingUnwritten(_Mutant):
    def spoil_rows(self, output: DispatchOutput) -> torch.Tensor:
        ends = output.expert_offsets[:-1] + output.num_tokens_per_expert
        for end, next_start in zip(ends.tolist(), output.expert_offsets[1:].tolist(), strict=True):
            output.x[end:next_start] = 1
        return output.x


class ReusesItsOutput(_Mutant):
    kept: torch.Tensor | None = None

    def spoil_rows(self, output: DispatchOutput) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.empty(1 << 16, dtype=output.x.dtype)
        place = self.kept[: output.x.numel()].view(output.x.shape)
        return place.copy_(output.x)


class FlushesSubnormals(_Mutant):
    def spoil_sums(self, sums: torch.Tensor) -> torch.Tensor:
        return torch.where(sums.abs() < torch.finfo(sums.dtype).tiny, 0.0, sums)


class KeepsSignOfZero(_Mutant):
    def spoil_sums(self, sums: torch.Tensor) -> torch.Tensor:
        return torch.where(sums == 0, -0.0, sums)


class OffByOneBit(_Mutant):
    def spoil_sums(self, sums: torch.Tensor) -> torch.Tensor:
        if sums.dtype is torch.bfloat16 and sums.numel():
            sums.view(torch.int16).view(-1)[-1] ^= 1
        return sums


class AddsBackwards(_Mutant):
    def combine(
        self,
        x: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        *args: Any,
    ) -> Operation[CombineOutput]:
        assert isinstance(plan, reference.ReferencePlan)
        if x is not None and row_weights is None and plan.layout is Layout.EXPERT_MAJOR:
            plan = dataclasses.replace(
                plan, slots=plan.slots.flip(1), topk_idx=plan.topk_idx.flip(1), dispatch=None
            )
            topk_weights = None if topk_weights is None else topk_weights.flip(1)
        return super().combine(x, plan, topk_weights, row_weights, *args)


class IgnoresOut(_Mutant):
    def combine(self, *args: Any) -> Operation[CombineOutput]:
        *tensors, _, options = args
        return super().combine(*tensors, None, options)


class LeavesTheTailUnwritten(_Mutant):
    def spoil_rows(self, output: DispatchOutput) -> torch.Tensor:
        output.x[int(output.expert_offsets[-1]) :] = 1
        return output.x


class KeepsOneTooMany(_Mutant):
    def dispatch(
        self, *tensors: Any, options: DispatchOptions, **named: Any
    ) -> Operation[DispatchOutput]:
        capacity = options.capacity
        more = dataclasses.replace(capacity, num_rows_per_expert=capacity.num_rows_per_expert + 1)
        return super().dispatch(*tensors, options=options._replace(capacity=more), **named)


class KeepsTheLastRows(_Mutant):
    """The last ones of every rank's choices are kept."""

    def dispatch(
        self, x: torch.Tensor, x_sf: None, topk_idx: torch.Tensor, *args: Any, **options: Any
    ) -> Operation[DispatchOutput]:
        return super().dispatch(x.flip(0), x_sf, topk_idx.flip(0), *args, **options)


class MasksNothing(_Mutant):
    def dispatch(
        self, *tensors: Any, options: DispatchOptions, **named: Any
    ) -> Operation[DispatchOutput]:
        return super().dispatch(*tensors, options=options._replace(masked_ranks=()), **named)


class ChangesAScale(_Mutant):
    def spoil(self, output: DispatchOutput) -> DispatchOutput:
        if output.x_sf is not None and output.x_sf.numel():
            output.x_sf.view(torch.int32)[-1, -1] ^= 1
        return output


class RoundsHalvesDown(_Mutant):
    def spoil_rows(self, output: DispatchOutput) -> torch.Tensor:
        if output.x.dtype is torch.float8_e4m3fn and output.x.numel():
            output.x.view(torch.uint8)[-1, -1] ^= 1
        return output.x


class KeepsScalesInRows(_Mutant):
    def spoil(self, output: DispatchOutput) -> DispatchOutput:
        x_sf = None if output.x_sf is None else output.x_sf.contiguous()
        return dataclasses.replace(output, x_sf=x_sf)


class CountsNoDrops(_Mutant):
    def spoil(self, output: DispatchOutput) -> DispatchOutput:
        zeros = torch.zeros_like(output.num_dropped_per_expert)
        return dataclasses.replace(output, num_dropped_per_expert=zeros)


class NeedsWhatItGot(_Mutant):
    def spoil(self, output: DispatchOutput) -> DispatchOutput:
        return dataclasses.replace(output, num_required_rows=len(output.x))


class CutsWideChoices(_Mutant):
    def spoil(self, output: DispatchOutput) -> DispatchOutput:
        topk_idx = output.topk_idx
        return dataclasses.replace(
            output, topk_idx=None if topk_idx is None else topk_idx[:, : output.plan.num_topk]
        )


class GrowsInsteadOfRaising(_Mutant):
    def dispatch(
        self, *tensors: Any, options: DispatchOptions, **named: Any
    ) -> Operation[DispatchOutput]:
        if options.capacity is not None and options.capacity.on_overflow == "raise":
            options = options._replace(capacity=None)
        return super().dispatch(*tensors, options=options, **named)


class KeepsItsNeedsToItself(_Mutant):
    def combine(self, *args: Any) -> Operation[CombineOutput]:
        *tensors, options = args
        options = options._replace(gradients=min(options.gradients, ENABLED))
        return super().combine(*tensors, options)


class HearsItselfAlone(_Mutant):
    def dispatch(
        self, *tensors: Any, options: DispatchOptions, **named: Any
    ) -> Operation[DispatchOutput]:
        output = super().dispatch(*tensors, options=options, **named).wait()
        return dataclasses.replace(output, gradients=options.gradients)


class _LowersLimits(_Mutant):
    """Rows as many as a limit allows are too many."""

    def dispatch(
        self, *tensors: Any, options: DispatchOptions, **named: Any
    ) -> Operation[DispatchOutput]:
        if options.capacity is not None:
            lower = self.lower(options.capacity, options.expert_alignment)
            options = options._replace(capacity=lower)
        return super().dispatch(*tensors, options=options, **named)

    def lower(self, capacity: Capacity, alignment: int) -> Capacity:
        raise NotImplementedError


class RaisesAtAFullExpert(_LowersLimits):
    def lower(self, capacity: Capacity, alignment: int) -> Capacity:
        if capacity.num_rows_per_expert is None or capacity.on_overflow != "raise":
            return capacity
        return dataclasses.replace(capacity, num_rows_per_expert=capacity.num_rows_per_expert - 1)


class DropsFromAFullExpert(_LowersLimits):
    def lower(self, capacity: Capacity, alignment: int) -> Capacity:
        if capacity.num_rows_per_expert is None or capacity.on_overflow != "drop":
            return capacity
        return dataclasses.replace(capacity, num_rows_per_expert=capacity.num_rows_per_expert - 1)


class RaisesAtAFullRank(_LowersLimits):
    def lower(self, capacity: Capacity, alignment: int) -> Capacity:
        if not capacity.num_rows or capacity.on_overflow != "raise":
            return capacity
        return dataclasses.replace(capacity, num_rows=capacity.num_rows - alignment)


class GrowsAFullRank(_LowersLimits):
    def lower(self, capacity: Capacity, alignment: int) -> Capacity:
        if capacity.num_rows is None or capacity.on_overflow != "grow":
            return capacity
        return dataclasses.replace(capacity, num_rows=capacity.num_rows + alignment)


class _UnpaddedDrops(spec.Dispatch):
    @functools.cached_property
    def kept(self) -> list[list[spec.Origin]]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return spec.Dispatch(**{**fields, "expert_alignment": 1}).kept


class DropsAsIfUnpadded(_Mutant):
    """Rows are kept that would have a place if experts before theirs were not padded."""

    def _dispatch_of(self, *args: Any, **options: Any) -> spec.Dispatch:
        made = super()._dispatch_of(*args, **options)
        fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
        return _UnpaddedDrops(**fields)


class ChangesTheException(_Mutant):
    def reject(self, operation: str, error: Exception) -> NoReturn:
        super().reject(operation, RuntimeError(str(error)))


class AcceptsAnyConfig(_Mutant):
    def __init__(self, communicator: Any, config: EpConfig) -> None:
        super().__init__(communicator, dataclasses.replace(config, num_max_tokens_per_rank=4))


CASE = Case(name="catch", num_ranks=2, num_tokens=(5, 8), num_topk=4, expert_alignment=4)
SPECIAL = dataclasses.replace(CASE, has_special_values=True)
QUANTIZED = dataclasses.replace(CASE, quantization=FP8_BLOCK128, dtype=torch.float32, hidden=128)
IN_COLUMNS = dataclasses.replace(FP8_BLOCK128, is_column_major=True)
COLUMNS = dataclasses.replace(QUANTIZED, quantization=IN_COLUMNS, hidden=256)
DROPS = dataclasses.replace(
    CASE, capacities=(Capacity(num_rows=24, num_rows_per_expert=3, on_overflow="drop"),) * 2
)
MASKS = Case(
    name="masks", num_ranks=2, num_tokens=(5, 8), layout=Layout.LOW_LATENCY, masked_ranks=((1,), ())
)
RAGGED_TOPK = dataclasses.replace(
    CASE, layout=Layout.RANK_MAJOR, num_topk_per_rank=(2, 4), is_elastic=True
)


@pytest.mark.parametrize(
    ("mutant", "case", "symptom"),
    [
        (QuietsNans, SPECIAL, "dispatch: x: .* elements differ"),
        (LeavesPaddingUnwritten, CASE, "dispatch: x: .* elements differ"),
        (ReusesItsOutput, CASE, "dispatch: x, at the end"),
        (FlushesSubnormals, SPECIAL, "combine"),
        (KeepsSignOfZero, SPECIAL, "combine"),
        (OffByOneBit, CASE, "combine .*: 1 of .* elements differ"),
        (AddsBackwards, CASE, "combine"),
        (IgnoresOut, CASE, "out="),
        (LeavesTheTailUnwritten, DROPS, "dispatch: x: .* elements differ"),
        (KeepsOneTooMany, DROPS, "dispatch: num_tokens_per_expert: .* elements differ"),
        (KeepsTheLastRows, DROPS, "dispatch: x: .* elements differ"),
        (MasksNothing, MASKS, "dispatch: num_tokens_per_expert: .* elements differ"),
        (ChangesAScale, QUANTIZED, "dispatch: x_sf: 1 of .* elements differ"),
        (RoundsHalvesDown, QUANTIZED, "dispatch: x: 1 of .* elements differ"),
        (KeepsScalesInRows, COLUMNS, "dispatch: shape and strides of x_sf"),
        (CountsNoDrops, DROPS, "dispatch: num_dropped_per_expert: .* elements differ"),
        (NeedsWhatItGot, DROPS, "dispatch: num_required_rows: got 24, want"),
        (CutsWideChoices, RAGGED_TOPK, r"dispatch: topk_idx: got .* want .*, 4\)"),
    ],
)
def test_a_wrong_bit_is_found(mutant: type[_Mutant], case: Case, symptom: str) -> None:
    with pytest.raises(ConformanceError, match=symptom):
        check_case(Target(name="mutant", make=mutant), case, mode="threads")


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (KeepsItsNeedsToItself, "gradients"),
        (HearsItselfAlone, "gradients"),
        (ChangesTheException, "bad-input"),
        (AcceptsAnyConfig, "bad-config"),
        (GrowsInsteadOfRaising, "limits"),
        (RaisesAtAFullExpert, "limits"),
        (DropsFromAFullExpert, "limits"),
        (RaisesAtAFullRank, "limits"),
        (GrowsAFullRank, "limits"),
        (DropsAsIfUnpadded, "limits"),
    ],
)
def test_a_missing_refusal_is_found(mutant: type[_Mutant], check: str) -> None:
    with pytest.raises((ConformanceError, RankError)):
        CHECKS[check](Target(name="mutant", make=mutant, can_overlap=False), mode="threads")


def test_the_unchanged_mutant_passes() -> None:
    for case in (CASE, SPECIAL, QUANTIZED, COLUMNS, DROPS, MASKS, RAGGED_TOPK):
        check_case(Target(name="unchanged", make=_Mutant), case, mode="threads")

"""Types that SGLang's dispatchers hand to experts and take from them.

SGLang's own types where SGLang can be imported, types of the same names, fields and values elsewhere.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
from typing import Any, NamedTuple

import torch


class _Format(enum.Enum):
    """Format of a dispatch output or a combine input."""

    STANDARD = "standard"
    DEEPEP_NORMAL = "deepep_normal"
    DEEPEP_LL = "deepep_ll"

    def is_standard(self) -> bool:
        """Return whether rows lie as the router left them."""
        return self is _Format.STANDARD

    def is_deepep_normal(self) -> bool:
        """Return whether rows lie in order of source rank."""
        return self is _Format.DEEPEP_NORMAL

    def is_deepep_ll(self) -> bool:
        """Return whether rows lie at fixed places of every expert."""
        return self is _Format.DEEPEP_LL

    def is_deepep(self) -> bool:
        """Return whether a dispatcher moved the rows."""
        return self is not _Format.STANDARD


class _NormalDispatchOutput(NamedTuple):
    """Rows in order of source rank, one per token with an expert here.

    Fields: hidden_states `[M, hidden]`; hidden_states_scale `[M, num_scales]` or None; topk_ids int64
    `[M, K]`, local ids, -1 elsewhere; topk_weights float32 `[M, K]`, 0 elsewhere;
    num_recv_tokens_per_expert: rows of every local expert, rounded up to the alignment.
    """

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_recv_tokens_per_expert: list[int]

    @property
    def format(self) -> Any:
        """DEEPEP_NORMAL."""
        return DispatchOutputFormat.DEEPEP_NORMAL


class _LLDispatchOutput(NamedTuple):
    """Rows at fixed places of every expert.

    Fields: hidden_states `[num_local_experts, n, hidden]`; hidden_states_scale
    `[num_local_experts, n, num_scales]` or None; topk_ids and topk_weights as this rank gave them;
    masked_m int32 `[num_local_experts]`: filled rows; expected_m: their mean over all experts.
    """

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    masked_m: torch.Tensor
    expected_m: int

    @property
    def format(self) -> Any:
        """DEEPEP_LL."""
        return DispatchOutputFormat.DEEPEP_LL


class _NormalCombineInput(NamedTuple):
    """One weighted sum per dispatched row, `[M, hidden]`; ids and weights as dispatched."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def format(self) -> Any:
        """DEEPEP_NORMAL."""
        return CombineInputFormat.DEEPEP_NORMAL


class _LLCombineInput(NamedTuple):
    """Unweighted outputs `[num_local_experts, n, hidden]`; ids and weights as this rank gave them."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def format(self) -> Any:
        """DEEPEP_LL."""
        return CombineInputFormat.DEEPEP_LL


class _BaseDispatcher:
    """Stands in for SGLang's abstract base."""


def _sglang() -> tuple[Any, Any] | None:
    """SGLang's modules of bases and of DeepEP types; None where they cannot be imported."""
    if importlib.util.find_spec("sglang") is None:
        return None
    package = "sglang.srt.layers.moe.token_dispatcher"
    try:
        return importlib.import_module(f"{package}.base"), importlib.import_module(
            f"{package}.deepep"
        )
    except (ImportError, RuntimeError, OSError, AttributeError):
        # It imports its kernels, which fail in many ways on a machine without a GPU.
        return None


_modules = _sglang()
DispatchOutputFormat: Any = _Format
CombineInputFormat: Any = _Format
DeepEPNormalDispatchOutput: Any = _NormalDispatchOutput
DeepEPLLDispatchOutput: Any = _LLDispatchOutput
DeepEPNormalCombineInput: Any = _NormalCombineInput
DeepEPLLCombineInput: Any = _LLCombineInput
BaseDispatcher: Any = _BaseDispatcher
if _modules is not None:
    _base, _deepep = _modules
    BaseDispatcher = _base.BaseDispatcher
    DispatchOutputFormat = _base.DispatchOutputFormat
    CombineInputFormat = _base.CombineInputFormat
    DeepEPNormalDispatchOutput = _deepep.DeepEPNormalDispatchOutput
    DeepEPLLDispatchOutput = _deepep.DeepEPLLDispatchOutput
    DeepEPNormalCombineInput = _deepep.DeepEPNormalCombineInput
    DeepEPLLCombineInput = _deepep.DeepEPLLCombineInput

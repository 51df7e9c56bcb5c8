"""Formats of the rows of a `SglangDispatcher`: set by a caller, a quantization method or SGLang itself."""

from __future__ import annotations

import dataclasses
import importlib
import types
from typing import Any, NamedTuple

from moe_comm.tensors.quantization import FP8_BLOCK128, MXFP8, Quantization, ScaleFormat

QUANT_KEYS = frozenset(
    {
        "quantization",
        "dispatcher_output_dtype",
        "normal_dispatcher_output_dtype",
        "low_latency_dispatcher_output_dtype",
        "input_global_scale",
        "weight_dtype",
        "use_mxfp8",
        "quant_type",
    }
)
_QUANTIZATION_OF_DTYPE = {"bf16": None, "fp8": FP8_BLOCK128, "mxfp8": MXFP8}
_MODES = ("normal", "low_latency")
_PACKED_OF_MODE = {
    mode: dataclasses.replace(
        FP8_BLOCK128, scale_format=ScaleFormat.UE8M0, is_column_major=mode == "low_latency"
    )
    for mode in _MODES
}


class DtypeChoice:
    """The quantization of each mode.

    Args:
        quantization: Quantization that holds if a configuration does not say.
        runner_backend: Backend of SGLang's experts; if it is given and `quantization` is not,
            SGLang is asked.
    """

    def __init__(self, quantization: Quantization | None, runner_backend: Any) -> None:
        self._default = quantization
        self._runner_backend = runner_backend
        self._of_mode: dict[str, Quantization | None] = {}

    def of_mode(self, *, is_low_latency: bool) -> Quantization | None:
        """Return the quantization of the next dispatch."""
        return self._of_mode[_MODES[is_low_latency]]

    def update(self, quant_config: dict[str, Any]) -> None:
        """Choose again, by this configuration alone; where it raises, the earlier choice holds.

        Raises:
            ValueError: There is no such dtype.
            NotImplementedError: It is one that is not offered.
        """
        if quant_config.get("input_global_scale") is not None:
            raise NotImplementedError("NVFP4 dispatch (input_global_scale) is not offered")
        self._of_mode = {mode: self._chosen(quant_config, mode) for mode in _MODES}

    def _chosen(self, quant_config: dict[str, Any], mode: str) -> Quantization | None:
        if "quantization" in quant_config:
            chosen: Quantization | None = quant_config["quantization"]
            return chosen
        name = f"{mode}_dispatcher_output_dtype"
        if quant_config.get(name) is None:
            name = "dispatcher_output_dtype"
        told = quant_config.get(name)
        if self._runner_backend is not None and self._default is None:
            # Also where a key says: server arguments go before it.
            asked = _ask_sglang(quant_config, self._runner_backend, mode)
            if asked is not None and asked.is_packed:
                return _PACKED_OF_MODE[mode]
            told = told if asked is None else asked.dtype
        if told is None:
            return self._default
        return _quantization_of(name, told)


def _quantization_of(name: str, dtype: Any) -> Quantization | None:
    value = getattr(dtype, "value", dtype)
    if value in ("int8", "nvfp4", "mxfp4"):
        raise NotImplementedError(f"{name}={value!r}: such rows are not offered")
    if value not in _QUANTIZATION_OF_DTYPE:
        raise ValueError(f"{name} must be one of {sorted(_QUANTIZATION_OF_DTYPE)}, got {value!r}")
    return _QUANTIZATION_OF_DTYPE[value]


class _Asked(NamedTuple):
    """Dtype that SGLang's own dispatcher would send; whether its experts take scale factors as packed UE8M0."""

    dtype: str
    is_packed: bool


def _ask_sglang(quant_config: dict[str, Any], runner_backend: Any, mode: str) -> _Asked | None:
    """Return what SGLang's own dispatcher would send, None where SGLang cannot be imported."""
    try:
        utils = importlib.import_module("sglang.srt.layers.moe.utils")
        deep_gemm = importlib.import_module("sglang.srt.layers.deep_gemm_wrapper")
    except ImportError:
        return None
    dtype = utils.get_deepep_output_dtype(
        types.SimpleNamespace(
            quant_config=quant_config,
            runner_backend=runner_backend,
            dispatch_mode=types.SimpleNamespace(value=mode),
        )
    ).value
    # In its normal mode only the experts of DeepGEMM take FP8.
    is_for_deep_gemm = mode == "normal" and dtype == "fp8"
    if is_for_deep_gemm and not deep_gemm.ENABLE_JIT_DEEPGEMM:
        return _Asked("bf16", is_packed=False)
    # On Blackwell its experts (0.5.23, moe_runner/deep_gemm) round float32 factors up to powers of two and leave
    # the data as they are, which is right only of factors that are such powers.
    packs = (
        deep_gemm.DEEPGEMM_BLACKWELL if mode == "low_latency" else deep_gemm.DEEPGEMM_SCALE_UE8M0
    )
    return _Asked(dtype, is_packed=dtype == "fp8" and packs)

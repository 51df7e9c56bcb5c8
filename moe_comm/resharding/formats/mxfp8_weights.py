"""Models whose config asks for MXFP8 inference: their weights become quantized, in place for good."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from moe_comm.resharding.formats.number_formats import MXFP8Backend, MXFP8Tensor, is_mxfp8_tensor
from moe_comm.resharding.formats.transforms import MXFP8ReshardTransform

_MEGATRON_TENSOR = "megatron.core.inference.quantization.mxfp8_tensor"
_BACKEND_OF_GEMM: dict[str, MXFP8Backend] = {"torch": "triton", "flashinfer": "flashinfer"}


def needs_mxfp8_conversion(config: object) -> bool:
    """Return whether a model of this config runs on MXFP8 weights that a refit has to make."""
    return (
        getattr(config, "transformer_impl", None) == "inference_optimized"
        and getattr(config, "fp8_recipe", None) == "mxfp8"
    )


def mxfp8_backend_of(config: object) -> MXFP8Backend:
    """Return the backend whose kernels read the weights of a model of this config.

    Raises:
        ValueError: They take no MXFP8.
    """
    gemm = getattr(config, "inference_grouped_gemm_backend", "torch")
    gemm = getattr(gemm, "value", gemm)
    if gemm not in _BACKEND_OF_GEMM:
        raise ValueError(
            f"MXFP8 inference takes inference_grouped_gemm_backend {sorted(_BACKEND_OF_GEMM)}, got "
            f"{gemm!r}"
        )
    return _BACKEND_OF_GEMM[gemm]


def mxfp8_transform_for(core: torch.nn.Module, config: object) -> MXFP8ReshardTransform:
    """Quantize the decoder's weights for inference, and make the transform that refits them.

    Converts parameters that Transformer Engine holds as MXFP8: each becomes an attribute of its
    module, Megatron's `MXFP8Tensor` where there is one, else `number_formats.MXFP8Tensor`, at an
    address that later refits keep.

    Args:
        core: The model, or one with an attribute `decoder`. Changed.
        config: Its `inference_grouped_gemm_backend` says whose kernels read the weights.

    Raises:
        ValueError: The kernels of that backend take no MXFP8.
    """
    backend = mxfp8_backend_of(config)
    decoder = getattr(core, "decoder", None)
    prefix = "" if decoder is None else "decoder."
    buffers = _quantize_weights(core if decoder is None else decoder, backend)
    return MXFP8ReshardTransform(
        convertible_params={prefix + name for name in buffers},
        persistent_buffers=buffers,
        buffer_key_prefix=prefix,
        backend=backend,
    )


@torch.inference_mode(False)
@torch.no_grad()
def _quantize_weights(decoder: torch.nn.Module, backend: MXFP8Backend) -> dict[str, Any]:
    """Replace quantized parameters; the new ones by name in `decoder`."""
    # Made outside of inference mode, so that refits may write into them in any mode.
    make = _tensor_class()
    buffers: dict[str, Any] = {}
    for path, owner in decoder.named_modules():
        for name, param in list(owner._parameters.items()):
            if param is None or not is_mxfp8_tensor(param):
                continue
            quantized = MXFP8Tensor.from_bf16(param.dequantize(), backend=backend)
            buffer = make(data=quantized.data, scale=quantized.scale, backend=backend)
            del owner._parameters[name]
            setattr(owner, name, buffer)
            buffers[f"{path}.{name}" if path else name] = buffer
    return buffers


def _tensor_class() -> Any:
    """Megatron's class, which its layers look for, where its release has one and it is in use."""
    if "megatron.core" not in sys.modules:
        return MXFP8Tensor
    try:
        return importlib.import_module(_MEGATRON_TENSOR).MXFP8Tensor
    except ImportError:
        return MXFP8Tensor

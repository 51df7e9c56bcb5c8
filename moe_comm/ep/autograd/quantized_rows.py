"""Quantized rows that autograd treats as the rows they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from moe_comm.ep.autograd.dynamo import taken_whole
from moe_comm.ep.autograd.operators import library
from moe_comm.ep.call_options import decode_quantization, encode_quantization
from moe_comm.tensors import quantized
from moe_comm.tensors.quantization import Quantization

# Takes any strides: held to those of column-major scale factors, which depend on the number of rows,
# inductor of torch 2.13 would look for a size under a name that it has given up.
library.define(
    "dequantize_rows(Tensor data, Tensor sf, int[] quantization, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)


def _dequantize_rows(
    data: torch.Tensor, sf: torch.Tensor, encoded: list[int], dtype: torch.dtype
) -> torch.Tensor:
    quantization = decode_quantization(encoded)
    assert quantization is not None
    return quantized.dequantize(data, sf, quantization, dtype).contiguous()


def _dequantize_rows_fake(
    data: torch.Tensor, sf: torch.Tensor, encoded: list[int], dtype: torch.dtype
) -> torch.Tensor:
    return data.new_empty(data.shape, dtype=dtype)


library.impl("dequantize_rows", _dequantize_rows, "CompositeExplicitAutograd")
torch.library.register_fake("moe_comm::dequantize_rows", _dequantize_rows_fake, lib=library)
_DEQUANTIZE_ROWS = torch.ops.moe_comm.dequantize_rows.default

_KEEP_THE_FORM = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class QuantizedRows(torch.Tensor):
    """Rows `[M, hidden]` that are stored as FP8 and scale factors.

    To autograd and to `torch` functions this is a tensor of `dtype`, the dtype of the rows before they
    were quantized: any operation reads the dequantized values, computed anew each time, and the
    gradient has `dtype` too. What autograd saves for backward is the FP8 form. Kernels that take
    quantized rows use `data_fp8` and `sf`, which carry no gradient.

    Cannot be written: in-place operations raise. What an operation returns, a slice included, shares
    no memory with the rows.

    Args:
        data_fp8: float8_e4m3fn `[M, hidden]`.
        sf: Scale factors as `DispatchResult.x_sf` has them.
        quantization: Quantization of the rows.
        dtype: bfloat16, float16 or float32.
    """

    data_fp8: torch.Tensor
    sf: torch.Tensor
    quantization: Quantization

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(  # noqa: D102 - the class says it
        cls: type[QuantizedRows],
        data_fp8: torch.Tensor,
        sf: torch.Tensor,
        quantization: Quantization,
        dtype: torch.dtype,
    ) -> QuantizedRows:
        rows: QuantizedRows = torch.Tensor._make_wrapper_subclass(
            cls, data_fp8.shape, dtype=dtype, device=data_fp8.device
        )
        # There is no memory of that dtype: code that asks for its address must not get one.
        torch._C._set_throw_on_mutable_data_ptr(rows)
        rows.data_fp8 = data_fp8
        rows.sf = sf
        rows.quantization = quantization
        return rows

    def dequantize(self) -> torch.Tensor:
        """`[M, hidden]` of `dtype`: element times scale factor, rounded once. Differentiable."""
        rows: torch.Tensor = _Dequantize.apply(self)  # type: ignore[no-untyped-call]
        return rows

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return (
            f"QuantizedRows(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"format={self.quantization.format.name}, requires_grad={self.requires_grad})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Quantization, torch.dtype]]:
        return ["data_fp8", "sf"], (self.quantization, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor],
        context: tuple[Quantization, torch.dtype],
        outer_size: Any,
        outer_stride: Any,
    ) -> QuantizedRows:
        return QuantizedRows(inner["data_fp8"], inner["sf"], *context)

    def _stable_hash_for_caching(self) -> str:
        return repr((self.quantization, self.dtype))

    def __coerce_tangent_metadata__(self) -> torch.Tensor:
        """Called by the compiler for rows that leave its graph and need a gradient."""
        raise RuntimeError(
            "QuantizedRows that need a gradient cannot leave a compiled region: their gradient is an "
            "ordinary tensor, the compiler expects one of their own type. Return the result of the "
            "dispatch and take its x outside"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _KEEP_THE_FORM:
            rows = args[0]
            return QuantizedRows(func(rows.data_fp8), func(rows.sf), rows.quantization, rows.dtype)
        if func._schema.is_mutable:
            _refuse_to_write(func, args, kwargs)
        args, kwargs = tree_map(_values, (args, kwargs))
        return func(*args, **kwargs)


def _values(value: Any) -> Any:
    if not isinstance(value, QuantizedRows):
        return value
    return _DEQUANTIZE_ROWS(
        value.data_fp8, value.sf, encode_quantization(value.quantization), value.dtype
    )


def _refuse_to_write(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else (value,)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and any(isinstance(each, QuantizedRows) for each in values):
            raise TypeError(
                f"QuantizedRows cannot be written in place, got {func}: write to dequantize()"
            )


class _Dequantize(torch.autograd.Function):
    """The values; the gradient goes to the rows as it is."""

    @staticmethod
    def forward(ctx: Any, rows: QuantizedRows) -> torch.Tensor:
        values: torch.Tensor = _values(rows)
        return values

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@taken_whole
class _Wrap(torch.autograd.Function):
    """QuantizedRows whose gradient goes to `nominal`, of which nothing but shape and dtype is used.

    Autograd would round the gradient of an FP8 output of the operator to FP8.
    """

    @staticmethod
    def forward(
        ctx: Any, nominal: torch.Tensor, data: torch.Tensor, sf: torch.Tensor, *encoded: int
    ) -> torch.Tensor:
        quantization = decode_quantization(encoded)
        assert quantization is not None
        rows = QuantizedRows(data, sf, quantization, nominal.dtype)
        # Autograd refuses writes to a view that a function returned, and to views of it.
        view: torch.Tensor = torch.ops.aten.alias.default(rows)
        return view

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None, None, None, None, None


_apply_wrap: Callable[..., torch.Tensor] = _Wrap.apply


def wrap_rows(
    nominal: torch.Tensor, data: torch.Tensor, sf: torch.Tensor, quantization: Quantization
) -> torch.Tensor:
    """`QuantizedRows` of `data` and `sf` whose gradient is that of `nominal`.

    Args:
        nominal: `[M, hidden]` of the nominal dtype; its values are not read.
        data: float8_e4m3fn `[M, hidden]`.
        sf: Scale factors.
        quantization: Quantization of `data` and `sf`.
    """
    return _apply_wrap(nominal, data, sf, *encode_quantization(quantization))

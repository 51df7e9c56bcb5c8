"""The kernels compile for GPUs, with the arithmetic that the bits depend on; needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.fresh_python import run_python

pytest.importorskip("triton")

# In a process of its own: in this one Triton may be interpreting.
PROGRAM = r"""
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moe_comm.triton import quantize_kernels, row_kernels

INT = dict.fromkeys(
    ["hidden", "num_terms", "num_words", "num_stored_blocks", "sf_row_stride", "sf_column_stride"],
    "i32",
)

def compiled(kernel, pointers, **constants):
    types = {name: INT[name] if name in INT else "constexpr" for name in kernel.arg_names}
    source = ASTSource(
        fn=kernel,
        signature={**types, **pointers},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    binary = triton.compile(source, target=target, options={"enable_fp_fusion": False})
    assert len(binary.asm["cubin"]) > 0
    return sorted(set(re.findall(r"\b(?:add|sub|mul|fma|div)[.][a-z0-9.]*f[0-9]+", binary.asm["ptx"])))

rows = {"rows_ptr": "*i64", "row_idx_ptr": "*i64", "out_ptr": "*i64"}
found = {"gather": compiled(row_kernels.gather_rows_kernel, rows, block_words=512)}
for name, stored, bits, size, wide in (
    ("bfloat16", "i16", "i16", 2, "fp32"),
    ("float16", "fp16", "i16", 2, "fp32"),
    ("float32", "fp32", "i32", 4, "fp32"),
    ("float64", "fp64", "i64", 8, "fp64"),
):
    for has_weights in (False, True):
        found[f"sum {name} {has_weights}"] = compiled(
            row_kernels.sum_rows_kernel,
            {
                "rows_ptr": "*" + stored,
                "positions_ptr": "*i64",
                "weights_ptr": "*" + wide,
                "out_ptr": "*" + bits,
            },
            block_columns=1024,
            itemsize=size,
            is_bfloat16=name == "bfloat16",
            has_weights=has_weights,
        )
for form in (0, 1, 2):
    found[f"quantize {form}"] = compiled(
        quantize_kernels.quantize_kernel,
        {"x_ptr": "*i16", "data_ptr": "*u8", "sf_ptr": "*u8" if form == 2 else "*i32"},
        block=128,
        pack=4 if form == 2 else 1,
        num_blocks_per_program=8,
        scale_form=form,
        least_amax=1e-4,
        is_bfloat16=True,
    )
    found[f"dequantize {form}"] = compiled(
        quantize_kernels.dequantize_kernel,
        {"data_ptr": "*u8", "sf_ptr": "*i32" if form == 2 else "*fp32", "out_ptr": "*i16"},
        block=128,
        pack=4 if form == 2 else 1,
        num_blocks_per_program=8,
        is_ue8m0=form == 2,
        itemsize=2,
        is_bfloat16=True,
    )
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    "compute_capability",
    [pytest.param(80, marks=pytest.mark.full), 90, pytest.param(100, marks=pytest.mark.full)],
)
def test_kernels_compile_to_ieee_operations(
    compute_capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded one by one, to nearest, with subnormals: no fused, approximate or flushing operation."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    run = run_python("-c", PROGRAM, str(compute_capability))
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    ieee = {f"{operation}.rn.{wide}" for operation in ("add", "mul") for wide in ("f32", "f64")}
    for name, operations in found.items():
        assert set(operations) <= ieee | {"div.rn.f32"}, name
    assert found["gather"] == []
    assert found["sum bfloat16 True"] == ["add.rn.f32", "mul.rn.f32"]
    assert found["sum float64 False"] == ["add.rn.f64"]
    assert "div.rn.f32" in found["quantize 0"]

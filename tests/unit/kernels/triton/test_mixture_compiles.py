"""Kernels of a mixture of few tokens compile for a Hopper GPU, on a machine without one."""

from __future__ import annotations

import pytest

SHAPES = {
    "64 experts and 2 shared": {"INNER": 2048, "OUTPUTS": 1408, "EXPERTS": 64, "PADDED": 64},
    "128 experts": {"INNER": 2048, "OUTPUTS": 768, "EXPERTS": 128, "PADDED": 128},
}


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize("element", ["bf16", "fp16"])
@pytest.mark.parametrize("kernel", ["_gated_kernel", "_down_kernel"])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_products_compile(shape, kernel, element, compile_for_hopper):
    types = {
        **dict.fromkeys(("x", "weight", "shared"), "*" + element), "logits": "*fp32",
        "output": "*" + element, "parts": "*fp32", "counts": "*i64", "num_tokens": "*i32",
    }  # fmt: skip
    sizes = dict(SHAPES[shape])
    columns, step = 16, 256
    if kernel == "_down_kernel":
        columns, step = 64, 128
        sizes["INNER"], sizes["OUTPUTS"] = sizes["OUTPUTS"], sizes["INNER"]
    options = {"num_warps": 4, "num_stages": 4}
    constants = {
        "SHARED": 2 if sizes["EXPERTS"] == 64 else 0, "CHOSEN": 6, "IS_COUNTED": True,
        "HAS_PADDING": True, "IS_SOFTMAX": True, "IS_NORMALISED": True, "SCALING": 1.0,
        "EPSILON": 1e-20, "ROWS": 16, "COLUMNS": columns, "STEP": step, "AHEAD": 4,
        "OVERLAPS": True,
    }  # fmt: skip
    if kernel == "_down_kernel":
        del constants["IS_COUNTED"], constants["HAS_PADDING"]
    else:
        del constants["ROWS"]
    made = compile_for_hopper(
        f"few_tokens.mixture.{kernel}", types, ("x_stride",), options, **sizes, **constants
    )
    assert "ld.global.v4" in made.ptx or "cp.async.cg.shared.global" in made.ptx
    assert made.cubin_bytes > 0

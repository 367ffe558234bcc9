"""Kernels of FP8 and INT8 compile for a Hopper GPU, on a machine without one, to its matrix
units."""

from __future__ import annotations

import pytest

TYPES = {
    **dict.fromkeys(("x", "weight"), "*fp8e4nv"),
    **dict.fromkeys(("bias", "output", "like"), "*bf16"),
    **dict.fromkeys(("block_rows", "counters", "order", "totals"), "*i32"),
    **dict.fromkeys(("x_scales", "w_scales", "out_scales", "sums", "routing_weights"), "*fp32"),
}


@pytest.mark.parametrize("scales", ["blocks", "rows"])
@pytest.mark.parametrize(
    "kernel",
    ["byte_gemm._tile_kernel", "byte_gemm._stream_kernel", "fp8_experts._experts_kernel"],
)
def test_a_product_uses_the_matrix_units_for_fp8(kernel, scales, compile_for_hopper):
    blocks = scales == "blocks"
    emits_fp8 = blocks and kernel.endswith("_experts_kernel")
    types = {**TYPES, "output": "*fp8e4nv"} if emits_fp8 else TYPES
    made = compile_for_hopper(
        kernel, types, ("x_stride", "num_outputs"), {"num_stages": 4},
        OUTPUTS=1024, SHARE=8, PADDED=128, SCALES=256 if blocks else 2048, IS_GATED=True,
        EMITS=blocks, HAS_POWERS=False, GROUP=8, IS_EVEN=True, IS_UNIFORM=blocks,
        INNER=4096, FIRST=0, COLUMNS_OF_SCALES=32 if blocks else 1, HAS_BLOCKS=blocks,
        HAS_BIAS=True, ROWS=64, COLUMNS=128, STEP=128, TOGETHER=8, PARTS=2, AHEAD=4,
        OVERLAPS=True,
    )  # fmt: skip
    assert made.ptx.count("wgmma.mma_async") == made.ptx.count("e4m3.e4m3") > 0


@pytest.mark.parametrize("kernel", ["_tile_kernel", "_stream_kernel"])
def test_a_product_uses_the_matrix_units_for_int8(kernel, compile_for_hopper):
    types = {**TYPES, **dict.fromkeys(("x", "weight"), "*i8"), "sums": "*i32"}
    made = compile_for_hopper(
        f"byte_gemm.{kernel}", types, ("x_stride", "num_outputs"), {"num_stages": 4},
        INNER=4096, FIRST=0, COLUMNS_OF_SCALES=1, HAS_BLOCKS=False, HAS_BIAS=True, ROWS=64,
        COLUMNS=128, STEP=128, IS_UNIFORM=False, TOGETHER=8, PARTS=2, AHEAD=4, OVERLAPS=True,
    )  # fmt: skip
    assert made.ptx.count("wgmma.mma_async") == made.ptx.count(".s32.s8.s8") > 0


@pytest.mark.parametrize("is_static", [True, False])
def test_inputs_of_int8_are_rounded_after_they_are_clamped(is_static, compile_for_hopper):
    types = {
        **dict.fromkeys(("x",), "*bf16"), "values": "*i8",
        **dict.fromkeys(("static", "scales"), "*fp32"), "bound": "fp32",
    }  # fmt: skip
    made = compile_for_hopper(
        "byte_inputs._tokens_kernel", types, ("x_stride", "width"), {},
        PADDED=4096, IS_STATIC=is_static, HAS_BOUND=False, HAS_POWERS=False, OVERLAPS=True,
    )  # fmt: skip
    # A product and the sum that rounds it would be one operation, with another result. Zero
    # times the largest value, added to a static scale, is one.
    assert made.ptx.count("fma.rn") == int(is_static)

"""FP8 kernels compile for a Hopper GPU, on a machine without one, to its matrix units."""

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
    ["fp8_gemm._tile_kernel", "fp8_gemm._stream_kernel", "fp8_experts._experts_kernel"],
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

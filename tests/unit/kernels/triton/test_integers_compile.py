"""Kernels of integer weights compile for a Hopper GPU, on a machine without one, to its matrix
units.
"""

from __future__ import annotations

import pytest

MAX_SHARED_BYTES = 227 << 10
"""Bytes of shared memory that a block of a Hopper GPU may have."""


@pytest.mark.matrix(keep=4)
@pytest.mark.parametrize(
    ("bits", "rows", "dtype"),
    [(4, 16, "bf16"), (4, 128, "bf16"), (4, 64, "fp16"), (8, 16, "bf16"), (8, 128, "fp16")],
)
def test_a_product_uses_the_matrix_units(bits, rows, dtype, compile_for_hopper):
    few = rows == 16
    types = {
        **dict.fromkeys(("x", "bias", "output"), f"*{dtype}"),
        **dict.fromkeys(("scales", "minimums"), "*bf16"),
        "values": "*u8", "zeros": "*i16", "groups": "*i32", "sums": "*fp32", "counters": "*i32",
    }  # fmt: skip
    options = {"num_stages": 4, "num_warps": 8 if rows == 128 else 4}
    made = compile_for_hopper(
        "integer_gemm._product_kernel", types, ("x_stride", "num_outputs"), options,
        NUM_STEPS=32, STEP=128, BITS=bits, HAS_ZEROS=True, HAS_MINIMUMS=False,
        IS_FP4=False, HAS_BIAS=True, ROWS=rows, COLUMNS=64 if few else 128,
        PARTS=4 if few else 1, OVERLAPS=True,
    )  # fmt: skip
    assert "wgmma.mma_async" in made.ptx
    assert made.shared_bytes <= MAX_SHARED_BYTES


@pytest.mark.matrix(keep=4)
@pytest.mark.parametrize(
    ("bits", "rows", "kind"),
    [
        (4, 16, "gated"),
        (4, 128, "gated"),
        (4, 16, "plain"),
        (8, 64, "plain"),
        ("fp4", 16, "gated"),
    ],
)
def test_a_grouped_product_uses_the_matrix_units(bits, rows, kind, compile_for_hopper):
    gated, few, is_fp4 = kind == "gated", rows == 16, bits == "fp4"
    types = {
        **dict.fromkeys(("x", "bias"), "*bf16"), "scales": "*u8" if is_fp4 else "*bf16",
        **dict.fromkeys(("groups", "inputs", "order", "totals"), "*i32"),
        "values": "*u8", "zeros": "*i16", "routing_weights": "*fp32",
        "output": "*bf16" if gated else "*fp32",
    }  # fmt: skip
    options = {"num_warps": 4 if few else 8, "num_stages": 4 if few else 3}
    made = compile_for_hopper(
        "integer_experts._experts_kernel", types, ("x_stride",), options,
        OUTPUTS=768 if gated else 2048, NUM_STEPS=16 if gated else 6, CHOSEN=8, PADDED=128,
        BITS=4 if is_fp4 else bits, IS_FP4=is_fp4, STEP=32 if is_fp4 else 128,
        HAS_ZEROS=not is_fp4, HAS_ORDER=not gated, IS_GATED=gated,
        ALPHA=1.7 if few else 0.0, LIMIT=7.0, SHARES=1 if gated else 2, ROWS=rows,
        COLUMNS=64 if few else 128, GROUP=8, OVERLAPS=True,
    )  # fmt: skip
    assert "wgmma.mma_async" in made.ptx
    assert made.shared_bytes <= MAX_SHARED_BYTES

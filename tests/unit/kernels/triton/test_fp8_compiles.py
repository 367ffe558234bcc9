"""FP8 kernels compile for a Hopper GPU, on a machine without one, to its matrix units."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trimaran.kernels.triton import fp8_experts, fp8_gemm

name, scales = sys.argv[1:]
kernel = getattr(fp8_experts if name == "_experts_kernel" else fp8_gemm, name)
blocks = scales == "blocks"
fixed = dict(
    OUTPUTS=1024, SHARE=8, PADDED=128, SCALES=256 if blocks else 2048, IS_GATED=True,
    EMITS=blocks, HAS_POWERS=False, GROUP=8, IS_EVEN=True,
    IS_UNIFORM=blocks,
    INNER=4096, FIRST=0, COLUMNS_OF_SCALES=32 if blocks else 1, HAS_BLOCKS=blocks,
    HAS_BIAS=True, ROWS=64, COLUMNS=128, STEP=128, TOGETHER=8, PARTS=2, AHEAD=4,
    OVERLAPS=True,
)
types = dict(
    x="*fp8e4nv", weight="*fp8e4nv", x_scales="*fp32", w_scales="*fp32",
    block_rows="*i32", bias="*bf16", output="*bf16", sums="*fp32", counters="*i32",
    out_scales="*fp32", order="*i32", totals="*i32", routing_weights="*fp32", like="*bf16",
)
if name == "_experts_kernel" and blocks:
    types["output"] = "*fp8e4nv"

names = kernel.arg_names
signature = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
constants = {(at,): fixed[n] for at, n in enumerate(names) if n in fixed}
aligned = {
    (at,): [["tt.divisibility", 16]] for at, n in enumerate(names)
    if n in types or n in ("x_stride", "num_outputs")
}
source = ASTSource(kernel, signature, constants, aligned)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": 4})
print(made.asm["ptx"].count("wgmma.mma_async"), made.asm["ptx"].count("e4m3.e4m3"))
"""


@pytest.mark.parametrize("scales", ["blocks", "rows"])
@pytest.mark.parametrize("kernel", ["_tile_kernel", "_stream_kernel", "_experts_kernel"])
def test_a_product_uses_the_matrix_units_for_fp8(kernel, scales, tmp_path):
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, kernel, scales],
        env=env, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    matrix_units, of_fp8 = map(int, done.stdout.split())
    assert matrix_units == of_fp8 > 0

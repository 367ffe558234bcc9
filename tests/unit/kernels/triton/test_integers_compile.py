"""Kernels of integer weights compile for a Hopper GPU, on a machine without one, to its matrix
units.
"""

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
from trimaran.kernels.triton import integer_gemm

kernel = integer_gemm._product_kernel
bits, rows, dtype = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
fixed = dict(
    NUM_STEPS=32, STEP=128, BITS=bits, HAS_ZEROS=True, HAS_MINIMUMS=False, HAS_BIAS=True,
    ROWS=rows, COLUMNS=64 if rows == 16 else 128, PARTS=4 if rows == 16 else 1, OVERLAPS=True,
)
types = dict(
    x=f"*{dtype}", values="*u8", scales="*bf16", zeros="*i16", minimums="*bf16",
    groups="*i32", bias=f"*{dtype}", output=f"*{dtype}", sums="*fp32", counters="*i32",
)
names = kernel.arg_names
signature = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
constants = {(at,): fixed[n] for at, n in enumerate(names) if n in fixed}
aligned = {
    (at,): [["tt.divisibility", 16]] for at, n in enumerate(names)
    if n in types or n in ("x_stride", "num_outputs")
}
source = ASTSource(kernel, signature, constants, aligned)
options = {"num_stages": 4, "num_warps": 8 if rows == 128 else 4}
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print(made.asm["ptx"].count("wgmma.mma_async"), made.metadata.shared)
"""

_MAX_SHARED_BYTES = 227 * 1024


@pytest.mark.matrix(keep=4)
@pytest.mark.parametrize(
    ("bits", "rows", "dtype"),
    [(4, 16, "bf16"), (4, 128, "bf16"), (4, 64, "fp16"), (8, 16, "bf16"), (8, 128, "fp16")],
)
def test_a_product_uses_the_matrix_units(bits, rows, dtype, tmp_path):
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(bits), str(rows), dtype],
        env=env, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    matrix_units, shared_bytes = map(int, done.stdout.split())
    assert matrix_units > 0
    assert shared_bytes <= _MAX_SHARED_BYTES

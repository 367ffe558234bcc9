"""The kernel of experts with integer weights compiles for a Hopper GPU, on a machine without
one, to its matrix units.
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
from trimaran.kernels.triton import integer_experts

kernel = integer_experts._experts_kernel
bits, rows, gated = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "gated"
fixed = dict(
    OUTPUTS=768 if gated else 2048, NUM_STEPS=16 if gated else 6, CHOSEN=8, PADDED=128,
    BITS=bits, STEP=128, HAS_ZEROS=True, HAS_ORDER=not gated, IS_GATED=gated,
    ALPHA=1.7 if rows == 16 else 0.0, LIMIT=7.0, SHARES=1 if gated else 2, ROWS=rows,
    COLUMNS=64 if rows == 16 else 128, GROUP=8, OVERLAPS=True,
)
types = dict(
    x="*bf16", values="*u8", scales="*bf16", zeros="*i16", groups="*i32", inputs="*i32",
    bias="*bf16", output="*bf16" if gated else "*fp32", order="*i32", totals="*i32",
    routing_weights="*fp32",
)
names = kernel.arg_names
signature = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
constants = {(at,): fixed[n] for at, n in enumerate(names) if n in fixed}
aligned = {
    (at,): [["tt.divisibility", 16]] for at, n in enumerate(names)
    if n in types or n == "x_stride"
}
source = ASTSource(kernel, signature, constants, aligned)
options = dict(num_warps=4, num_stages=4) if rows == 16 else dict(num_warps=8, num_stages=3)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print(made.asm["ptx"].count("wgmma.mma_async"), made.metadata.shared)
"""

_MAX_SHARED_BYTES = 227 * 1024


@pytest.mark.matrix(keep=4)
@pytest.mark.parametrize(
    ("bits", "rows", "kind"),
    [(4, 16, "gated"), (4, 128, "gated"), (4, 16, "plain"), (8, 64, "plain")],
)
def test_a_grouped_product_uses_the_matrix_units(bits, rows, kind, tmp_path):
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(bits), str(rows), kind],
        env=env, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    matrix_units, shared_bytes = map(int, done.stdout.split())
    assert matrix_units > 0
    assert shared_bytes <= _MAX_SHARED_BYTES

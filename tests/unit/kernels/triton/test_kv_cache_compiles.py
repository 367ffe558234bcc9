"""Kernels over KV caches of each dtype compile for a Hopper GPU, on a machine without one."""

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
from trimaran.kernels.triton import rotary
from trimaran.kernels.triton.attention import decode, prefill

name, cached, element = sys.argv[1:]
has_scales = bool(cached)
cached = cached or element
kernel = {
    "decode": decode._decode_kernel, "prefill": prefill._prefill_kernel,
    "rope": rotary._rope_and_cache_kernel, "write": rotary._write_kv_kernel,
}[name]
fixed = dict(
    KV_HEADS=8, GROUP=4, GROUP_PADDED=16, HEAD=128, HEAD_PADDED=128, BLOCK=32, TILE=64,
    SINKS=0, HAS_WINDOW=False, HAS_BIAS=False, HAS_CAP=False, HAS_SCALES=has_scales,
    PRECISION="tf32", TILE_M=128, TILE_N=128, WINDOW=0, HEAD_SIZE=128, HALF=64, PADDED=64,
    REST=0, HEADS=8, IS_NEOX=True, OVERLAPS=True,
)
if name == "write":
    fixed["PADDED"] = 128
of_queries = ("query", "output", "heads", "key", "value", "bias")
integers = ("splits", "counters", "tables", "tiles", "query_start_loc", "seq_lens")
floats = ("partial", "log_sums", "kv_scales", "scales", "cos_sin")
types = {
    **dict.fromkeys(of_queries, "*" + element), **dict.fromkeys(integers, "*i32"),
    **dict.fromkeys(floats, "*fp32"), "cache": "*" + cached, "scale": "fp32", "cap": "fp32",
    "positions": "*i64", "slots": "*i64",
}
names = kernel.arg_names
fixed = {n: fixed[n] for n in names if n in fixed}
signature = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
constants = {(at,): fixed[n] for at, n in enumerate(names) if n in fixed}
aligned = {
    (at,): [["tt.divisibility", 16]] for at, n in enumerate(names)
    if n not in fixed and signature[n] != "fp32" and n not in ("num_kv", "bias_stride")
}
source = ASTSource(kernel, signature, constants, aligned)
options = {"num_warps": 8 if name == "prefill" else 4, "num_stages": 2}
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print(made.metadata.shared, len(made.asm["cubin"]))
"""
_MAX_SHARED = 227 << 10
"""Bytes of shared memory that a block of a Hopper GPU may have."""


@pytest.mark.matrix(keep=12)
@pytest.mark.parametrize("element", ["bf16", "fp16"])
@pytest.mark.parametrize("cached", ["fp8e4nv", "i8", ""], ids=["fp8", "int8", "as queries"])
@pytest.mark.parametrize("kernel", ["decode", "prefill", "rope", "write"])
def test_a_kernel_compiles_for_each_dtype_of_the_cache(kernel, cached, element, tmp_path):
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, kernel, cached, element],
        env=env, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shared, size = map(int, done.stdout.split())
    assert shared <= _MAX_SHARED and size > 0

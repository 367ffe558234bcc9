"""Kernels over KV caches of each dtype compile for a Hopper GPU, on a machine without one."""

from __future__ import annotations

import pytest

MAX_SHARED_BYTES = 227 << 10
"""Bytes of shared memory that a block of a Hopper GPU may have."""

KERNELS = {
    "decode": "attention.decode._decode_kernel",
    "prefill": "attention.prefill._prefill_kernel",
    "rope": "rotary._rope_and_cache_kernel",
    "write": "rotary._write_kv_kernel",
}
OF_QUERIES = ("query", "output", "heads", "key", "value", "bias")
INTEGERS = ("splits", "counters", "tables", "tiles", "query_start_loc", "seq_lens")
FLOATS = ("partial", "log_sums", "kv_scales", "scales", "cos_sin", "sinks")
MULTIPLES = (
    "query_stride", "output_stride", "table_stride", "block_stride", "value_offset",
    "token_stride", "head_stride", "key_stride", "value_stride", "kind_stride",
    "place_stride", "num_queries",
)  # fmt: skip


@pytest.mark.matrix(keep=12)
@pytest.mark.parametrize("element", ["bf16", "fp16"])
@pytest.mark.parametrize("cached", ["fp8e4nv", "i8", ""], ids=["fp8", "int8", "as queries"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_compiles_for_each_dtype_of_the_cache(
    kernel, cached, element, compile_for_hopper
):
    types = {
        **dict.fromkeys(OF_QUERIES, "*" + element), **dict.fromkeys(INTEGERS, "*i32"),
        **dict.fromkeys(FLOATS, "*fp32"), "cache": "*" + (cached or element),
        "tree_masks": "*i64", "scale": "fp32", "cap": "fp32", "positions": "*i64",
        "slots": "*i64", "query_norm": "*" + element, "key_norm": "*" + element, "eps": "fp32",
    }  # fmt: skip
    options = {"num_warps": 8 if kernel == "prefill" else 4, "num_stages": 2}
    made = compile_for_hopper(
        KERNELS[kernel], types, MULTIPLES, options,
        KV_HEADS=8, GROUP=4, GROUP_PADDED=16, HEAD=128, HEAD_PADDED=128, BLOCK=32, TILE=64,
        SINKS=0, HAS_WINDOW=False, HAS_BIAS=False, HAS_CAP=False, HAS_SCALES=bool(cached),
        HAS_SINKS=element == "bf16", HAS_TREE=element == "fp16",
        PRECISION="tf32", TILE_M=128, TILE_N=128, WINDOW=0, HEAD_SIZE=128, HALF=64,
        HAS_NORMS=element == "bf16", PADDED=128 if kernel == "write" else 64, REST=0, HEADS=8,
        IS_NEOX=True, OVERLAPS=True,
    )  # fmt: skip
    assert made.shared_bytes <= MAX_SHARED_BYTES
    assert made.cubin_bytes > 0

"""The macros of CUDA sources expand in every variant: a host without NVRTC compiles none."""

from __future__ import annotations

import subprocess

import pytest

from trimaran.kernels.cuda.build import SOURCES

CHUNKS = (1, 2, 7, 16)
GEMM = "-DGEMM_MI=1 -DGEMM_WARPGROUPS=1 -DGEMM_STAGES=4 -DGEMM_SHARES_WEIGHTS=0"
GROUPED = "-DGROUPED_MI=1 -DGROUPED_WARPGROUPS=1 -DGROUPED_EXPERTS=8 -DGEMM_STAGES=4"
SKINNY = (
    "-DSKINNY_LINES=56 -DSKINNY_PANELS=1 -DSKINNY_STAGES=8 -DSKINNY_GATED=1 -DSKINNY_PARTS=0 "
    "-DSKINNY_GROUPS=0"
)
UNITS = "-DINT_GROUPS=2 -DINT_ZEROS=1 -DINT_SCALES=0"
VARIANTS = {
    "gemm": [
        f"{GEMM} -DGEMM_CHUNKS={chunks} {kind} {numbers}"
        for chunks in CHUNKS
        for kind in (
            "-DGEMM_SPLIT=0 -DGEMM_PARTS=0",
            "-DGEMM_SPLIT=1 -DGEMM_PARTS=0 -DGEMM_GATED",
            "-DGEMM_SPLIT=0 -DGEMM_PARTS=1",
        )
        for numbers in ("", "-DGEMM_FLOAT16", "-DGEMM_FP8", "-DGEMM_INT8")
    ],
    "skinny_gemm": [
        f"{SKINNY} -DSKINNY_TOKENS={16 * chunks or 8} -DGEMM_PRODUCT_CHUNKS={chunks} {numbers}"
        for chunks in (0, 1, 4)
        for numbers in ("", "-DGEMM_FP8", "-DGEMM_INT8", "-DGEMM_INT8 -DGEMM_FLOAT16")
    ],
    "grouped_gemm": [
        f"{GROUPED} -DGEMM_CHUNKS={chunks} {numbers}"
        for chunks in CHUNKS
        for numbers in ("", "-DGEMM_GATED", "-DGEMM_FLOAT16")
    ],
    "attention_decode": [
        f"-DDECODE_STORED={stored} -DDECODE_COLUMNS={columns} -DDECODE_TREES={has_trees}"
        for stored in range(3)
        for columns in (8, 16)
        for has_trees in (0, 1)
    ],
    "attention_prefill": [
        f"-DPREFILL_HEAD={size} -DPREFILL_BF16={is_bf16} {window}"
        for size in (64, 128)
        for is_bf16 in (0, 1)
        for window in ("", "-DWINDOW")
    ],
    "sum_norm": ["-DELEMENT_BYTES=2 -DROW_CHUNKS=1 -DNORM_VALUES=4 -DRANKS=2"],
    "l2_latency": [""],
    "decode_inputs": ["-DMAX_ROWS=256 -DMAX_BLOCKS=64"],
    "integer_gemm": [
        f"{UNITS} -DINT_BITS={bits} -DINT_ROWS={rows} -DINT_CHUNKS={rows // 16} -DINT_TILES=2 "
        f"-DINT_SCALED={int(rows > 128)}"
        for bits in (4, 8)
        for rows in (8, 16, 32, 64, 96, 128, 192, 256)
    ],
    "integer_skinny": [
        f"{UNITS} -DINT_BITS={bits} -DSKINNY_SLICES={slices} -DSKINNY_WARPS={warps} "
        f"-DSKINNY_WARPS_N={warps_n} -DSKINNY_STAGES=2 -DSKINNY_GATED={warps_n - 1}"
        for bits in (4, 8)
        for slices, warps, warps_n in ((3, 16, 1), (8, 8, 2), (4, 8, 1))
    ],
    "integer_wide": [
        f"{UNITS} -DINT_BITS={bits} -DINT_ROWS={rows} -DINT_CHUNKS={rows // 16} -DINT_TILES=2 "
        f"{kind}"
        for bits in (4, 8)
        for rows, kind in ((128, "-DINT_MI=2 -DGEMM_GATED"), (208, "-DINT_MI=1"))
    ],
    "integer_floats": [f"{UNITS} -DINT_BITS={bits}" for bits in (4, 8)],
}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_macros_expand_in_every_variant(name):
    source = SOURCES / f"{name}.cu"
    for variant in VARIANTS[name]:
        command = ["g++", "-E", "-P", "-std=c++17", *variant.split()]
        done = subprocess.run(
            [*command, "-x", "c++", source], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{variant}: {done.stderr}"
        # What is left of a macro's name was not expanded.
        assert "CODE_(" not in done.stdout and "PRODUCT_OF(" not in done.stdout

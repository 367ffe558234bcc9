"""Kernels for trees of drafts compile for a Hopper GPU, on a machine without one."""

from __future__ import annotations

import pytest

WIDE = ("wide", "step_wide", "ids", "table", "num_accepted", "last", "tree_masks", "tree_words")
NARROW = (
    "narrow", "step_narrow", "packed", "block_tables", "shifts", "rejected", "runs", "paths",
    "splits", "counters", "tables", "seq_lens",
)  # fmt: skip
FLOATS = ("partial", "log_sums")
KERNELS = {
    "accept": ("tree_paths._accept_kernel", {"table": "*i32"}),
    "move": ("tree_paths._move_kernel", {"pool": "*bf16"}),
    "move bytes": ("tree_paths._move_kernel", {"pool": "*u8"}),
    "prepare": ("inputs._prepare_kernel", {"table": "*i32"}),
    "places": ("drafts._draft_batch_kernel", {}),
    "log sums": ("drafts._log_sums_kernel", {"logits": "*bf16", "output": "*fp32"}),
    "latent": (
        "attention.latent_decode._latent_decode_kernel",
        {"query": "*bf16", "cache": "*bf16", "output": "*bf16", "scale": "fp32", "cap": "fp32"},
    ),
}


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_for_trees_compiles(name, compile_for_hopper):
    kernel, own = KERNELS[name]
    types = {
        **dict.fromkeys(WIDE, "*i64"), **dict.fromkeys(NARROW, "*i32"),
        **dict.fromkeys(FLOATS, "*fp32"), **own,
    }  # fmt: skip
    made = compile_for_hopper(
        kernel, types, (), {"num_warps": 4, "num_stages": 2},
        KINDS=2, HEADS=16 if name == "latent" else 8, HEAD=128, BLOCK=32,
        TILE=64 if name in ("places", "latent") else 1024, HAS_SHIFTS=False, HAS_TREES=True,
        OVERLAPS=True, COLUMNS=5, MOST=63, NUM_HEADS=16, LATENT=512, LATENT_PADDED=512,
        ROTATED=64, ROTATED_PADDED=64, SINKS=0, HAS_WINDOW=False, HAS_CAP=False, HAS_TREE=True,
        PRECISION="tf32",
    )  # fmt: skip
    assert made.cubin_bytes > 0

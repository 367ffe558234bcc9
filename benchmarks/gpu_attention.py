"""Times paged attention on a GPU against the time to read its keys and values.

    python3 benchmarks/gpu_attention.py

One layer of an 8B Llama's shape in bf16: 32 query heads, 8 key-value heads of 128. Figures
are means over many launches between two events.
"""

from __future__ import annotations

import torch

from trimaran.kernels.triton_attention import paged_attention

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 32


def time_us(sequences: int, queries: int, length: int) -> tuple[float, float]:
    """Microseconds of a call, and the GB/s or TFLOP/s that it reaches."""
    each = -(-length // BLOCK)
    shape = (sequences * each, 4, 2, BLOCK, KV_HEADS, SIZE)
    pool = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    tables = torch.randperm(sequences * each, device="cuda").int().view(sequences, each)
    query = torch.randn(sequences * queries, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(0, sequences * queries + 1, queries, device="cuda").int()
    lens = torch.full((sequences,), length, device="cuda").int()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = 50
    for turn in range(times + 5):
        if turn == 5:
            first.record()
        paged_attention(
            query, pool[:, turn % 4], starts, lens, tables, SIZE**-0.5, queries, length
        )
    last.record()
    torch.cuda.synchronize()
    us = first.elapsed_time(last) / times * 1e3
    if queries == 1:
        return us, sequences * length * 2 * KV_HEADS * SIZE * 2 / us / 1e3
    pairs = queries * (length - queries) + queries * queries / 2
    return us, sequences * pairs * HEADS * SIZE * 4 / us / 1e6


def main() -> None:
    """Print one line per case."""
    print(torch.cuda.get_device_name())
    for sequences, queries, length in (
        (1, 1, 1024), (16, 1, 1024), (64, 1, 1024), (256, 1, 2048), (1, 1, 32768),
        (1, 1024, 1024), (8, 1024, 1024), (1, 8192, 8192),
    ):  # fmt: skip
        us, rate = time_us(sequences, queries, length)
        unit = "GB/s" if queries == 1 else "TFLOP/s"
        print(f"{sequences:4d} x {queries:5d} of {length:6d}: {us:8.1f} us, {rate:7.0f} {unit}")


if __name__ == "__main__":
    main()

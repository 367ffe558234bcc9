"""Times paged attention of decodes on a GPU against the time to read its keys and values.

    python3 benchmarks/gpu_attention.py            # our kernels at many batches
    python3 benchmarks/gpu_attention.py --layouts  # the orders of a cache's dims in memory
    python3 benchmarks/gpu_attention.py --drafts   # a token and its drafts in each sequence

One layer of an 8B Llama's shape in bf16, 32 query heads and 8 key-value heads of 128. Blocks
of 32 tokens lie anywhere in 90 % of the free memory. All layers run in one CUDA graph, so
that no launch waits for the host, and a figure is the median over replays.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.cuda import decode as cuda_decode
from trimaran.kernels.triton.attention import decode as triton_attention_decode
from trimaran.kernels.tuning.graph_timing import captured, replays_s

HEADS, KV_HEADS, SIZE, BLOCK, LAYERS = 32, 8, 128, 32, 32
TOKEN_BYTES = 2 * KV_HEADS * SIZE * 2
SPEC = AttentionSpec(scale=SIZE**-0.5)
DEVICE = torch.device("cuda", 0)

Decode = Callable[[Tensor, Tensor, AttentionMetadata, AttentionSpec, Tensor], None]

# The order of the dims [layers, blocks, 2, tokens, heads, size], slowest first.
LAYOUTS = {
    "block, layer, kv, token, head": (1, 0, 2, 3, 4, 5),
    "block, layer, kv, head, token": (1, 0, 2, 4, 3, 5),
    "block, layer, head, kv, token": (1, 0, 4, 2, 3, 5),
    "layer, block, kv, token, head": (0, 1, 2, 3, 4, 5),
    "layer, block, kv, head, token": (0, 1, 2, 4, 3, 5),
    "layer, block, head, kv, token": (0, 1, 4, 2, 3, 5),
}
OURS = "block, layer, kv, head, token"

BATCHES = {
    "1 of 256": [256],
    "1 of 1024": [1024],
    "8 of 256": [256] * 8,
    "16 of 256": [256] * 16,
    "64 of 256": [256] * 64,
    "64 of 128 to 384": random.Random(1).choices(range(128, 385), k=64),
    "256 of 256": [256] * 256,
    "256 of 128 to 384": random.Random(1).choices(range(128, 385), k=256),
    "256 of 1024": [1024] * 256,
    "512 of 1100": [1100] * 512,
    "768 of 1500": [1500] * 768,
    "64 of 2048": [2048] * 64,
    "1 of 20000": [20_000],
    "1 of 20000, 255 of 128": [20_000] + [128] * 255,
}


def make_pool() -> Tensor:
    """Random numbers in 90 % of the free memory."""
    block_bytes = LAYERS * BLOCK * TOKEN_BYTES
    num_blocks = int(0.9 * torch.cuda.mem_get_info()[0]) // block_bytes
    pool = torch.empty(num_blocks * block_bytes // 2, device=DEVICE, dtype=torch.bfloat16)
    for part in pool.split(1 << 30):
        part.normal_()
    return pool


def in_layout(pool: Tensor, name: str) -> Tensor:
    """``pool`` as [layers, blocks, 2, tokens, heads, size], in this memory order."""
    dims = (LAYERS, pool.numel() // (LAYERS * BLOCK * TOKEN_BYTES // 2), 2, BLOCK, KV_HEADS)
    order = LAYOUTS[name]
    shape = [(*dims, SIZE)[dim] for dim in order]
    return pool.view(shape).permute([order.index(dim) for dim in range(6)])


def metadata_of(
    lengths: list[int], num_drafts: int, num_blocks: int, *, shares: bool
) -> AttentionMetadata:
    """Decodes of sequences of these lengths, then their drafts."""
    most = -(-(max(lengths) + num_drafts) // BLOCK)
    blocks = torch.randperm(num_blocks, device=DEVICE).int()
    wanted = torch.arange(len(lengths) * most, device=DEVICE) % num_blocks
    places = range(1, num_drafts + 1)
    all_lengths = lengths + [length + place for length in lengths for place in places]
    drafts = [number for number in range(len(lengths)) for _ in places]
    lens = torch.tensor(all_lengths, device=DEVICE).int()
    return AttentionMetadata(
        query_start_loc=torch.arange(len(lens) + 1, device=DEVICE).int(),
        seq_lens=lens,
        block_tables=blocks[wanted].view(len(lengths), most),
        slot_mapping=lens,
        max_query_len=1,
        max_seq_len=max(all_lengths),
        num_decodes=len(lens),
        rows=torch.tensor([*range(len(lengths)), *drafts], device=DEVICE).int()
        if num_drafts or shares
        else None,
        shares_rows=shares,
    )


def time_us(
    decode: Decode,
    caches: Tensor,
    lengths: list[int],
    replays: int = 7,
    num_drafts: int = 0,
    *,
    shares: bool = False,
) -> float:
    """Microseconds of one layer's launch."""
    metadata = metadata_of(lengths, num_drafts, caches.shape[1], shares=shares)
    query = torch.randn(
        len(metadata.seq_lens), HEADS, SIZE, device=DEVICE, dtype=torch.bfloat16
    )
    output = torch.empty_like(query)

    def step() -> None:
        metadata.plans.clear()
        for cache in caches:
            decode(query, cache, metadata, SPEC, output)

    graph = captured(step)
    return 1e6 * statistics.median(replays_s(graph) for _ in range(replays)) / LAYERS


def show(label: str, decode: Decode, caches: Tensor, lengths: list[int]) -> None:
    """Print one line."""
    us = time_us(decode, caches, lengths)
    rate = sum(lengths) * TOKEN_BYTES / us / 1e3
    print(f"{label:60s} {us:8.1f} us {rate:7.0f} GB/s", flush=True)


def show_drafts(caches: Tensor) -> None:
    """Print lines of decodes with drafts, which read the keys of their sequence together or
    each alone."""
    shared_decode = partial(cuda_decode.decode, shares_reads=True)
    names = (
        "1 of 256", "8 of 256", "16 of 256", "64 of 256", "64 of 2048", "256 of 256",
        "1 of 20000",
    )  # fmt: skip
    for name in names:
        lengths = BATCHES[name]
        for number in (0, 1, 3, 5) if len(lengths) < 256 else (0, 1):
            each = time_us(cuda_decode.decode, caches, lengths, num_drafts=number)
            together = time_us(shared_decode, caches, lengths, num_drafts=number, shares=True)
            print(f"{name}, {number} drafts: {each:7.1f} us alone, {together:7.1f} together")


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", action="store_true", help="compare orders in memory")
    parser.add_argument("--drafts", action="store_true", help="compare rows of one sequence")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here: run this on a machine with one")
    print(torch.cuda.get_device_name())
    pool = make_pool()
    if arguments.drafts:
        show_drafts(in_layout(pool, OURS))
        return
    kernels: dict[str, Decode] = {
        "cuda": cuda_decode.decode,
        "triton": triton_attention_decode.decode,
    }
    for layout in LAYOUTS if arguments.layouts else [OURS]:
        caches = in_layout(pool, layout)
        names = ["64 of 2048", "256 of 1024", "768 of 1500"] if arguments.layouts else BATCHES
        for name in names:
            for kernel, decode in kernels.items():
                label = f"{layout}: " if arguments.layouts else ""
                show(f"{label}{name}, {kernel}", decode, caches, BATCHES[name])


if __name__ == "__main__":
    main()

"""Times latent attention on a GPU against the time to read the cache, and to multiply.

    python3 benchmarks/gpu_latent.py             # decodes and prompts
    python3 benchmarks/gpu_latent.py --configs   # and how a program should work

One layer in bf16: vectors of 512 dims and rotated keys of 64, heads of 128 and 64 dims with
values of 128; 16 heads (V2 Lite, or V3 on 8 ranks) and 128. Blocks of 32 tokens lie anywhere
in a cache that no second-level cache holds. A figure is the median over launches.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trimaran.kernels.attention import AttentionMetadata, AttentionSpec, LatentHeads
from trimaran.kernels.gpu import TritonOps
from trimaran.kernels.triton.attention import latent_decode as triton_latent_decode
from trimaran.kernels.triton.attention import latent_prefill as triton_latent_prefill
from trimaran.kernels.triton.attention import latent_prompts as triton_latent_prompts
from trimaran.kernels.triton.attention.latent_decode import LatentDecodeConfig
from trimaran.kernels.triton.attention.latent_prefill import LatentPrefillConfig
from trimaran.kernels.tuning.graph_timing import captured, replays_s

LATENT, ROTATED, PLAIN, VALUE, BLOCK = 512, 64, 128, 128, 32
TOKEN_BYTES = 2 * (LATENT + ROTATED)
SPEC = AttentionSpec(scale=(PLAIN + ROTATED) ** -0.5, latent_size=LATENT)
DEVICE = torch.device("cuda", 0)
NUM_BLOCKS = 1 << 16

DECODES = [(1, 256), (1, 20_000), (16, 1024), (64, 256), (64, 2048), (256, 1024), (256, 4096)]
PROMPTS = [(64, 0, 128), (8, 0, 1024), (4, 0, 2048), (1, 0, 8192), (1, 8192, 8192)]
"""Prompts, tokens that are cached, and tokens of the step, each."""


def random(*shape: int) -> Tensor:
    """Small numbers in bf16."""
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) / 4


def make_cache() -> Tensor:
    """2.4 GB of blocks, of one layer."""
    return random(NUM_BLOCKS, 1, BLOCK, 1, LATENT + ROTATED)


def metadata_of(past: int, queries: int, count: int) -> AttentionMetadata:
    """``count`` sequences of equal length, with scattered blocks."""
    most = -(-(past + queries) // BLOCK)
    wanted = torch.arange(count * most, device=DEVICE) % NUM_BLOCKS
    order = torch.randperm(NUM_BLOCKS, device=DEVICE).int()
    return AttentionMetadata(
        query_start_loc=(torch.arange(count + 1, device=DEVICE) * queries).int(),
        seq_lens=torch.full((count,), past + queries, device=DEVICE).int(),
        block_tables=order[wanted].view(count, most),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        max_query_len=queries,
        max_seq_len=past + queries,
        num_decodes=count if queries == 1 else 0,
        has_past=past > 0,
    )


def time_us(launch: Callable[[], object], count: int = 12) -> float:
    """Microseconds of one launch, from a graph of several."""

    def launches() -> None:
        for _ in range(count):
            launch()

    graph = captured(launches)
    return 1e6 * statistics.median(replays_s(graph) for _ in range(7)) / count


def decodes(
    cache: Tensor,
    heads: int,
    cases: list[tuple[int, int]],
    configs: list[LatentDecodeConfig] | None = None,
) -> None:
    """Print the time of the attention of decodes, and the bytes read a second, by the engine's
    configuration or by each of ``configs``."""
    for count, length in cases:
        metadata = metadata_of(length - 1, 1, count)
        query, output = random(count, heads, LATENT + ROTATED), random(count, heads, LATENT)
        for config in configs or [LatentDecodeConfig.of(heads, 2, count)]:
            metadata.plans.clear()

            def launch(
                query: Tensor = query,
                output: Tensor = output,
                metadata: AttentionMetadata = metadata,
                config: LatentDecodeConfig = config,
            ) -> None:
                triton_latent_decode.decode(query, cache, metadata, SPEC, output, config=config)

            us, moved = time_us(launch), count * length * TOKEN_BYTES
            flops = 2 * count * length * heads * (2 * LATENT + ROTATED)
            label = f"{heads} heads, {count} of {length}, {_words(config)}"
            print(f"{label:56s} {us:8.1f} us {moved / us / 1e3:6.0f} GB/s "
                  f"{flops / us / 1e6:5.0f} TFLOP/s", flush=True)  # fmt: skip


def prompts(cache: Tensor, heads: int) -> None:
    """Print prompts in both forms, with the products of heads, and by the kernels alone."""
    ups = LatentHeads(random(heads, LATENT, PLAIN), random(heads, VALUE, LATENT))
    ways = {
        "made keys": TritonOps().latent_attention,
        "vectors": TritonOps(is_deterministic=True).latent_attention,
    }
    for count, past, queries in PROMPTS:
        metadata, tokens = metadata_of(past, queries, count), count * queries
        query, vectors = random(tokens, heads, PLAIN + ROTATED), random(tokens, 600)
        latent, key = vectors[:, :LATENT].contiguous(), vectors[:, -ROTATED:]
        pairs = tokens * (past + queries / 2)
        flops = 2 * pairs * heads * (PLAIN + ROTATED + VALUE)
        for name, attend in ways.items():
            us = time_us(
                lambda attend=attend, query=query, latent=latent, key=key, metadata=metadata: (
                    attend(query, latent, key, cache, metadata, SPEC, ups)
                ),
                2,
            )
            label = f"{heads} heads, {count} of {queries} behind {past}, {name}"
            print(f"{label:56s} {us:8.1f} us, {flops / us / 1e6:5.0f} TFLOP/s of made keys'",
                  flush=True)  # fmt: skip


def prefill_configs(cache: Tensor, heads: int, configs: list[LatentPrefillConfig]) -> None:
    """Print the kernel of chunks over vectors, for each launch configuration."""
    for count, past, queries in PROMPTS[1:3]:
        metadata, tokens = metadata_of(past, queries, count), count * queries
        query, output = random(tokens, heads, LATENT + ROTATED), random(tokens, heads, LATENT)
        for config in configs:
            us = time_us(
                lambda query=query, output=output, metadata=metadata, config=config: (
                    triton_latent_prefill.prefill(
                        query, cache, metadata, SPEC, output, config=config
                    )
                ),
                2,
            )
            flops = tokens * queries * heads * (2 * LATENT + ROTATED)
            label = f"{heads} heads, {count} of {queries}, {_words(config)}"
            print(f"{label:56s} {us:8.1f} us {flops / us / 1e6:5.0f} TFLOP/s", flush=True)


def _words(config: LatentDecodeConfig | LatentPrefillConfig) -> str:
    return "/".join(str(getattr(config, name)) for name in config.__slots__)


def _decode_configs(heads: int) -> Iterator[LatentDecodeConfig]:
    yield LatentDecodeConfig(16, 32, 4, 5)
    for together in (16, 32, 64):
        for tile, stages in ((32, 2), (32, 5), (64, 2), (64, 5)):
            # Two buffers of 64 vectors are the most that fit beside 64 queries.
            if together <= heads and (together, tile, stages) != (64, 64, 5):
                yield LatentDecodeConfig(together, tile, 8, stages)


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", action="store_true", help="try several configurations")
    is_wide = parser.parse_args().configs
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here: run this on a machine with one")
    print(torch.cuda.get_device_name(), triton_latent_prompts.PromptsConfig())
    cache = make_cache()
    for heads in (16, 128):
        decodes(cache, heads, DECODES)
        prompts(cache, heads)
        if is_wide:
            decodes(cache, heads, DECODES[2::2], list(_decode_configs(heads)))
            rows, together = 64, min(heads, 64)
            configs = [
                LatentPrefillConfig(rows, together, tile, 8, stages)
                for tile, stages in ((32, 2), (32, 5), (64, 2))
            ]
            prefill_configs(cache, heads, configs)


if __name__ == "__main__":
    main()

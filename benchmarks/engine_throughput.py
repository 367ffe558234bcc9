"""Times one rank's engine without a front end: prompts in, tokens out, random weights.

    .venv/bin/python benchmarks/engine_throughput.py --threads 2 --requests 1 16
    python3 benchmarks/engine_throughput.py --model llama3.1-8b --requests 64 256

All requests arrive at once and none shares a prefix. Figures are of the best of the runs; the
load average tells how far other processes disturbed them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trimaran.comm.collectives import SingleRankGroup
from trimaran.comm.control import LocalControlPlane
from trimaran.comm.messages import Submit, pack_ids
from trimaran.comm.sampling_params import SamplingParams
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config import CacheConfig, EngineConfig, RankConfig, SchedulerConfig
from trimaran.worker.engine import Engine

# vocabulary, hidden, inner, layers, heads, key-value heads, head size
MODELS = {
    "tiny": (32000, 512, 1408, 8, 8, 4, 64),
    "llama3.1-8b": (128256, 4096, 14336, 32, 32, 8, 128),
}


@dataclass
class Run:
    """One run's figures."""

    seconds: float
    first_ms: float
    step_ms: list[float]
    num_tokens: int


def make_engine(args: argparse.Namespace, folder: Path) -> Engine:
    """A loaded and warm engine of random weights."""
    vocab, hidden, inner, layers, heads, kv_heads, size = MODELS[args.model]
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": size, "rms_norm_eps": 1e-5,
        "max_position_embeddings": args.isl + args.osl, "dtype": args.dtype,
        "rope_theta": 500000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    length, most = args.isl + args.osl, max(args.requests)
    engine_config = EngineConfig(
        model="bench",
        engine_dir=str(folder),
        load_format="random",
        device=args.device,
        num_threads=args.threads,
        scheduler=SchedulerConfig(
            max_num_seqs=most, max_num_batched_tokens=max(args.max_num_tokens, most)
        ),
        cache=CacheConfig(max_tokens=(most + 1) * (length + 64)),
    )
    torch.set_num_threads(args.threads)
    rank = RankConfig(engine=engine_config, group="bench")
    engine = Engine(rank, ParallelLayout(), LocalControlPlane(), SingleRankGroup())
    engine.load()
    return engine


def run(engine: Engine, args: argparse.Namespace, count: int, first_id: int) -> Run:
    """Submit ``count`` requests at once and step until all are done."""
    generator = np.random.default_rng(first_id)
    sampling = SamplingParams(max_tokens=args.osl).to_wire()
    for number in range(first_id, first_id + count):
        ids = generator.integers(0, MODELS[args.model][0], args.isl)
        engine.submit(
            "bench",
            Submit(
                request_id=number,
                model="bench",
                prompt_ids=pack_ids(ids),
                sampling=sampling,
                streaming=True,
            ),
        )
    start = last = time.perf_counter()
    first_ms, steps, num_messages = 0.0, [], 0
    while engine.has_work:
        num_messages += len(engine.step().messages)
        now = time.perf_counter()
        steps.append((now - last) * 1e3)
        last = now
        if num_messages and not first_ms:
            first_ms = (now - start) * 1e3
    return Run(last - start, first_ms, steps, count * args.osl)


def main() -> None:
    """Print one line per number of requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    for name, default in {
        "isl": 128, "osl": 128, "threads": 2, "max-num-tokens": 2048, "runs": 4,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(args, Path(folder))
    print(f"{args.model} on {engine.device}, {args.isl} tokens in, {args.osl} out")
    next_id = 1
    for count in args.requests:
        runs = []
        for _ in range(args.runs):
            runs.append(run(engine, args, count, next_id))
            next_id += count
        best = min(runs, key=lambda one: one.seconds)
        middle = sorted(best.step_ms)[len(best.step_ms) // 2]
        print(
            f"{count:4d} requests: {best.num_tokens / best.seconds:8.0f} tokens/s out, first "
            f"after {best.first_ms:.1f} ms, median step {middle:.2f} ms, least "
            f"{min(best.step_ms):.2f} ms, load average {os.getloadavg()[0]:.2f}"
        )


if __name__ == "__main__":
    main()

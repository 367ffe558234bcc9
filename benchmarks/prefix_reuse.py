"""Time to the first token of prompts that share a prefix, before and after the prefix is
cached.

    trimaran serve --model-repo repository
    python benchmarks/prefix_reuse.py --url localhost:8000 --prefix 20000 --json results.jsonl

Prompts are random ids, so the server has cached no part of an uncached prompt. Each cached
prompt is the prefix of the first uncached prompt with another end. Times count from the request
to the first line of its stream, through HTTP. Exit code 1 if a prompt that must be cached was
not cached.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from statistics import median
from typing import Any

import numpy as np

from trimaran.bench.results import machine
from trimaran.bench.results.results import append, machine_facts

_Raw = argparse.RawDescriptionHelpFormatter


def first_token(args: argparse.Namespace, prefix: int, suffix: int) -> tuple[float, int]:
    """Milliseconds to the first token of one prompt, and the blocks that it reused."""
    ids = np.concatenate(
        [
            np.random.default_rng((1, prefix)).integers(0, args.vocab_size, args.prefix),
            np.random.default_rng((2, suffix)).integers(0, args.vocab_size, args.suffix),
        ]
    ).tolist()
    asked = {
        "input_ids": ids,
        "input_lengths": len(ids),
        "request_output_len": 4,
        "streaming": True,
        "return_perf_metrics": True,
    }
    request = urllib.request.Request(
        f"http://{args.url}/v2/models/{args.model_name}/generate_stream",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        lines = [answer.readline()]
        milliseconds = 1e3 * (time.perf_counter() - start)
        lines += answer.readlines()
    last = [line for line in lines if line.startswith(b"data:")][-1]
    return milliseconds, int(json.loads(last[5:])["kv_cache_reused_blocks"])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Uncached prompts, then cached prompts; the very first uncached prompt is not counted."""
    first_token(args, 0, 0)
    uncached = [first_token(args, 1 + number, 0) for number in range(args.uncached)]
    cached = [first_token(args, 1, 1 + number) for number in range(args.cached)]
    times = {
        "uncached_ms": [time for time, _ in uncached],
        "cached_ms": [time for time, _ in cached],
    }
    line: dict[str, Any] = {
        "benchmark": "prefix_reuse",
        "shape": args.shape,
        "prefix": args.prefix,
        "suffix": args.suffix,
        "reused_blocks": min(blocks for _, blocks in cached),
    }
    for name, values in times.items():
        line[name] = round(median(values), 2)
        line[f"{name}_runs"] = [round(value, 2) for value in values]
    line["times_sooner"] = round(line["uncached_ms"] / line["cached_ms"], 1)
    return line


def main() -> int:
    """Send requests, print and write one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    add = parser.add_argument
    add("--url", default="localhost:8000", metavar="HOST:PORT", help="of HTTP")
    add("--model-name", default="tensorrt_llm", help="the token model")
    add("--shape", default="", metavar="NAME", help="what the server runs, for the line")
    add("--vocab-size", type=int, default=128256, metavar="N", help="ids to draw from")
    add("--prefix", type=int, default=20000, metavar="TOKENS", help="shared by the prompts")
    add("--suffix", type=int, default=48, metavar="TOKENS", help="of each prompt alone")
    add("--uncached", type=int, default=3, metavar="N", help="prompts of their own")
    add("--cached", type=int, default=8, metavar="N", help="prompts that share the prefix")
    add("--json", metavar="FILE", help="append the result as a JSON line")
    args = parser.parse_args()
    try:
        line = measure(args)
    except urllib.error.URLError as error:
        raise SystemExit(f"no answer from http://{args.url}: {error}") from None
    print(
        f"{args.prefix} + {args.suffix} tokens: {line['uncached_ms']:.1f} ms to the first "
        f"token, {line['cached_ms']:.1f} with a cached prefix: {line['times_sooner']:.1f} "
        f"times sooner ({line['reused_blocks']} blocks reused)"
    )
    if args.json:
        gpus = machine.gpus()
        append(args.json, line | machine_facts(gpus[0] if gpus else None, None))
    return 0 if line["reused_blocks"] else 1


if __name__ == "__main__":
    sys.exit(main())

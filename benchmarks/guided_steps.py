"""Decode steps of free requests with and without guided requests beside them.

    python benchmarks/guided_steps.py --shape llama8b --mixes 64+0 56+8 --json results.jsonl

A mix is FREE+GUIDED requests that run together. Guided requests follow a JSON schema over a
vocabulary of made-up strings. Each line has the time of a step and the free requests' tokens a
second, `--repeats` measurements each, with mixes in rotation. The cost of guides is the
difference between mixes with equal numbers of requests: a 65th request uses the next CUDA graph
and larger tiles, guided or not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from trimaran.bench.limits.ranks import connected
from trimaran.bench.limits.shapes import SHAPES, shape_config
from trimaran.bench.offline.engine_run import load_engine, random_checkpoint
from trimaran.bench.results.results import append, environment
from trimaran.comm.messages.messages import RequestFailed, StepOutput, Submit
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    GuidedConfig,
    SchedulerConfig,
)
from trimaran.worker.engine.engine import Engine

SOURCE = "guided"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
}
_PROMPT = 128
_WARM_STEPS = 30
_MIXES = [(64, 0), (63, 1), (56, 8), (256, 0), (255, 1), (248, 8)]
_Raw = argparse.RawDescriptionHelpFormatter


def vocabulary(size: int) -> list[str]:
    """This many different strings of printable characters, the shortest first."""
    letters = [chr(code) for code in range(33, 127)]
    words = (
        "".join(word)
        for length in itertools.count(1)
        for word in itertools.product(letters, repeat=length)
    )
    return list(itertools.islice(words, size))


def tokenizer_info(size: int, folder: str) -> Path:
    """A file that describes a tokenizer of ``size`` ids, the last of which ends an output."""
    words = vocabulary(size)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": dict(zip(words, range(size), strict=True)),
                  "unk_token": words[0]},
    }  # fmt: skip
    path = Path(folder, "tokenizer_info.json")
    facts = {
        "encoded_vocab": words,
        "tokenizer_str": json.dumps(tokenizer),
        "stop_token_ids": [size - 1],
    }
    path.write_text(json.dumps(facts), encoding="utf-8")
    return path


class Mixes:
    """Submits mixes to one engine; request ids never repeat."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._next_id = 1

    def measure(self, free: int, guided: int, num_steps: int) -> dict[str, float]:
        """Milliseconds a step, and the free requests' tokens a second."""
        first = self._next_id
        for number in range(free + guided):
            self._submit(_longest(num_steps), is_guided=number >= free)
        for _ in range(_WARM_STEPS):
            self._engine.step()
        start = time.perf_counter()
        num_tokens = sum(self._tokens_below(first + free) for _ in range(num_steps))
        seconds = time.perf_counter() - start
        self._engine.cancel(SOURCE, list(range(first, self._next_id)))
        while self._engine.has_work:
            self._engine.step()
        return {"step_ms": 1e3 * seconds / num_steps, "free_tok_s": num_tokens / seconds}

    def _submit(self, num_tokens: int, *, is_guided: bool) -> None:
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=1.0, top_k=0, top_p=1.0, seed=self._next_id
        )
        if is_guided:
            guide = {"guide_type": "json_schema", "guide": json.dumps(SCHEMA)}
            sampling = replace(sampling, end_id=self._vocab_size - 1, **guide)
        prompt = np.random.default_rng(self._next_id).integers(0, self._vocab_size, _PROMPT)
        message = Submit(
            request_id=self._next_id,
            model=SOURCE,
            prompt_ids=pack_ids(prompt),
            sampling=sampling.to_wire(),
            streaming=True,
        )
        self._engine.submit(SOURCE, message)
        self._next_id += 1

    def _tokens_below(self, end: int) -> int:
        """One step; returns the tokens of requests before ``end``."""
        total = 0
        for _, message in self._engine.step().messages:
            if isinstance(message, RequestFailed):
                raise RuntimeError(f"a request failed: {message.text}")
            if isinstance(message, StepOutput):
                ids = np.frombuffer(message.request_ids, np.uint64)
                total += int(np.frombuffer(message.num_tokens, np.uint16)[ids < end].sum())
        return total


def engine_config(args: argparse.Namespace, checkpoint: str, info: Path) -> EngineConfig:
    """An engine with room for the largest mix."""
    rows = max(free + guided for free, guided in args.mixes)
    return EngineConfig(
        model=SOURCE,
        engine_dir=checkpoint,
        load_format="random",
        device=args.device,
        guided=GuidedConfig(backend="xgrammar", tokenizer_info_path=str(info)),
        scheduler=SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=max(8192, rows),
            max_seq_len=_PROMPT + _longest(args.steps),
            max_input_len=_PROMPT,
        ),
        cache=CacheConfig(enable_block_reuse=False, free_memory_fraction=0.9),
    )


def _longest(num_steps: int) -> int:
    """An output length that no request reaches during the measurement."""
    return _WARM_STEPS + num_steps + 16


def lines(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each mix: medians, and all measurements."""
    shape = shape_config(args.shape, "bfloat16", 4096)
    vocab_size: int = shape["vocab_size"]
    with random_checkpoint(shape) as folder:
        config = engine_config(args, folder, tokenizer_info(vocab_size, folder))
        with connected(config) as ranks:
            engine, device = load_engine(config, ranks), ranks.device
    mixes = Mixes(engine, vocab_size)
    found: dict[tuple[int, int], list[dict[str, float]]] = {pair: [] for pair in args.mixes}
    for pair in args.mixes:
        # Compiles the kernels and the grammar that this mix needs.
        mixes.measure(*pair, 1)
    for pair in [*args.mixes] * args.repeats:
        found[pair].append(mixes.measure(*pair, args.steps))
    for (free, guided), runs in found.items():
        line: dict[str, Any] = {"benchmark": "guided_steps", "shape": args.shape}
        line |= {"free": free, "guided": guided}
        for name in ("step_ms", "free_tok_s"):
            line[name] = round(median(run[name] for run in runs), 3)
            line[f"{name}_runs"] = [round(run[name], 3) for run in runs]
        yield line | environment(device, None)


def mix(text: str) -> tuple[int, int]:
    """``FREE+GUIDED`` as numbers."""
    free, _, guided = text.partition("+")
    if set(free + guided) - set(string.digits) or not free or not guided or int(free) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a mix such as 64+8")
    return int(free), int(guided)


def main() -> int:
    """Print and write one line a mix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="tiny")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--mixes", type=mix, nargs="+", metavar="FREE+GUIDED", default=_MIXES)
    add("--steps", type=int, default=150, metavar="N", help="steps of a measurement")
    add("--repeats", type=int, default=3, metavar="N", help="measurements of each mix")
    add("--json", metavar="FILE", help="append the results as JSON lines")
    args = parser.parse_args()
    for line in lines(args):
        print(
            f"{line['free']:>4} free, {line['guided']:>3} guided: {line['step_ms']:8.3f} ms a "
            f"step, {line['free_tok_s']:9.1f} tokens/s of free requests"
        )
        if args.json:
            append(args.json, line)
    return 0


if __name__ == "__main__":
    sys.exit(main())

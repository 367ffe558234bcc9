"""Output tokens a second of one engine with speculative decoding, beside the same without.

    .venv/bin/python benchmarks/speculation.py --model .demo/smollm2.gguf --drafter ngram
    .venv/bin/python benchmarks/speculation.py --shape llama8b --drafter oracle --requests 1 64

Two engines run in this process, one after the other: one without drafts, whose outputs are
kept, and one with the drafter. ``ngram`` is the drafter that `trimaran serve` has. ``oracle``
proposes the kept output, and replaces each token by another with a set probability: a synthetic
drafter of known acceptance, which waits as long as a draft head would compute. Prompts consist
of one random passage that is repeated, or of the ids in --prompt-ids. All requests are greedy.

Each line of the result has the tokens a second of both engines, the accepted tokens of a
verification (with the model's own), and the number of requests whose outputs differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import statistics
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trimaran.bench.limits.shapes import SHAPES, shape_config
from trimaran.bench.offline.engine_run import random_checkpoint
from trimaran.bench.results.machine import cpu_model
from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.control.control_plane import LocalControlPlane
from trimaran.comm.messages.messages import StepOutput, Submit, pack_ids
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    RankConfig,
    SchedulerConfig,
)
from trimaran.worker.config.speculation_config import SpeculationConfig
from trimaran.worker.engine.engine import Engine
from trimaran.worker.requests.request import Request, Sequence


class Oracle:
    """Drafts the output that is known beforehand, with errors, and takes the time of a head."""

    is_asked = False
    is_spent = False
    _paid_length = 0

    def __init__(self, output: list[int], rate: float, token_us: float, seed: int) -> None:
        self._output, self._rate, self._token_us = output, rate, token_us
        self._coin = random.Random(seed)

    def propose(self, sequence: Sequence, most: int) -> array[int]:
        """The next ids of the output; each is wrong with the set probability."""
        count = sequence.num_output_tokens
        ids = array("i", self._output[count : count + most])
        for place in range(len(ids)):
            if self._coin.random() >= self._rate:
                ids[place] ^= 1
        # Heads draft for a whole batch at once, so the first sequence waits for all.
        if sequence.request.request_id % 1000 == 1:
            end = time.perf_counter() + len(ids) * self._token_us / 1e6
            while time.perf_counter() < end:
                pass
        return ids


@contextlib.contextmanager
def engine_of(args: argparse.Namespace, speculation: SpeculationConfig) -> Iterator[Engine]:
    """A ready engine."""
    length = args.input_len + args.output_len + 8
    with contextlib.ExitStack() as stack:
        folder = args.model
        if not folder:
            config = shape_config(args.shape, args.dtype, length)
            folder = stack.enter_context(random_checkpoint(config))
        most = max(args.requests)
        engine = Engine.load(
            RankConfig(
                engine=EngineConfig(
                    model="bench",
                    engine_dir=str(folder),
                    dtype=args.dtype,
                    load_format="auto" if args.model else "random",
                    device=args.device,
                    num_threads=args.threads,
                    deterministic=args.deterministic,
                    scheduler=SchedulerConfig(
                        max_num_seqs=most,
                        max_num_batched_tokens=max(4096, most),
                        max_seq_len=length,
                        max_input_len=length - 1,
                        policy="max_utilization",
                        speculation=speculation,
                    ),
                    cache=CacheConfig(
                        enable_block_reuse=False,
                        max_tokens=(most + 1) * (length + 64),
                    ),
                ),
                group="bench",
            ),
            ParallelLayout(),
            LocalControlPlane(),
            SingleRankGroup(),
        )
        try:
            yield engine
        finally:
            engine.shutdown()


def run(engine: Engine, prompts: list[list[int]], num_tokens: int, first: int) -> Any:
    """The outputs of all prompts, and the tokens a second after every first token is there."""
    outputs: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts, first):
        sampling = SamplingParams(max_tokens=num_tokens, top_k=1).to_wire()
        message = Submit(
            request_id=number, model="bench", prompt_ids=pack_ids(prompt), sampling=sampling
        )
        engine.submit("bench", message)
        outputs[number] = []
    begin, num_before = 0.0, 0
    while engine.has_work:
        for _, message in engine.step().messages:
            assert isinstance(message, StepOutput), message
            file(message, outputs)
        if not begin and all(outputs.values()):
            begin, num_before = time.perf_counter(), sum(map(len, outputs.values()))
    seconds = time.perf_counter() - begin
    return outputs, (sum(map(len, outputs.values())) - num_before) / seconds


def file(message: StepOutput, outputs: dict[int, list[int]]) -> None:
    """Add a step's tokens to the outputs of their requests."""
    ids = np.frombuffer(message.token_ids, np.int32).tolist()
    counts = np.frombuffer(message.num_tokens, np.uint16).tolist()
    start = 0
    for request, count in zip(
        np.frombuffer(message.request_ids, np.uint64).tolist(), counts, strict=True
    ):
        outputs[request] += ids[start : start + count]
        start += count


def prompts_of(args: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """One prompt a request: a passage twice, or the given ids."""
    if args.prompt_ids:
        ids = json.loads(Path(args.prompt_ids).read_text(encoding="utf-8"))
        return [ids] * max(args.requests)
    random_ids = np.random.default_rng(1)
    half = args.input_len // 2
    passages = random_ids.integers(2, vocab_size, (max(args.requests), half)).tolist()
    return [passage * 2 for passage in passages]


def measured(
    args: argparse.Namespace, speculation: SpeculationConfig, known: dict[int, Any]
) -> dict[int, Any]:
    """By number of requests: outputs of the last run, median tokens a second, and tokens of a
    verification. ``known`` are the results without drafts."""
    found: dict[int, Any] = {}
    with engine_of(args, speculation) as engine:
        prompts = prompts_of(args, engine.facts()["vocab_size"])
        rows = engine.scheduler.draft_rows if speculation.is_on else None
        first = 1000
        for count in args.requests:
            if rows is not None and args.drafter == "oracle":
                rows.make_drafter = maker(args, known[count][0], prompts)
            run(engine, prompts[:count], min(32, args.output_len), first)
            speeds, outputs = [], {}
            before = counts_of(engine)
            for _ in range(args.runs):
                first = (first // 1000 + 1) * 1000 + 1
                outputs, speed = run(engine, prompts[:count], args.output_len, first)
                speeds.append(speed)
            after = counts_of(engine)
            drafts, accepted = (a - b for a, b in zip(after, before, strict=True))
            mean = 1 + accepted / drafts if drafts else 1.0
            found[count] = list(outputs.values()), statistics.median(speeds), mean
    return found


def counts_of(engine: Engine) -> tuple[int, int]:
    """Drafts and accepted tokens so far."""
    counts = engine.scheduler.draft_counts
    return counts.num_drafts, counts.num_accepted


def maker(args: argparse.Namespace, outputs: list[list[int]], prompts: list[list[int]]) -> Any:
    """The oracle of each request, by its prompt."""
    known = {tuple(p): output for p, output in zip(prompts, outputs, strict=False)}

    def make(request: Request) -> Oracle:
        output = known[tuple(request.prompt_ids)]
        return Oracle(output, args.acceptance, args.draft_us, request.number)

    return make


def main() -> None:
    """Measure, and write one line a number of requests."""
    args = arguments()
    plain = measured(args, SpeculationConfig(), {})
    drafted = SpeculationConfig(
        drafter="ngram", max_draft_tokens=args.max_draft_tokens, is_adaptive=not args.all
    )
    own = measured(args, drafted, plain)
    for count in args.requests:
        outputs, speed, mean = own[count]
        differ = sum(a != b for a, b in zip(outputs, plain[count][0], strict=True))
        line = {
            "benchmark": "speculation",
            "drafter": args.drafter,
            "model": Path(args.model).name if args.model else args.shape,
            "dtype": args.dtype,
            "requests": count,
            "max_draft_tokens": args.max_draft_tokens,
            "mean_accepted": round(mean, 2),
            "out_tok_s": round(speed, 1),
            "plain_tok_s": round(plain[count][1], 1),
            "ratio": round(speed / plain[count][1], 3),
            "requests_that_differ": differ,
            "deterministic": args.deterministic,
            "device": device_name(args.device),
        }
        if args.drafter == "oracle":
            line |= {"acceptance": args.acceptance, "draft_us": args.draft_us}
        print(json.dumps(line), flush=True)
        if args.output:
            with Path(args.output).open("a", encoding="utf-8") as results:
                results.write(json.dumps(line) + "\n")


def device_name(device: str) -> str:
    """The card, or the processor."""
    if device == "cpu":
        return cpu_model() or platform.machine()
    import torch

    return torch.cuda.get_device_name()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", default="", metavar="PATH", help="a folder or a GGUF file")
    model.add_argument("--shape", choices=sorted(SHAPES), help="random weights")
    add("--drafter", choices=("ngram", "oracle"), default="ngram")
    add("--acceptance", type=float, default=0.75, metavar="P", help="of the oracle's tokens")
    add("--draft-us", type=float, default=190.0, metavar="US", help="time of an oracle's token")
    add("--max-draft-tokens", type=int, default=5, metavar="N")
    add("--all", action="store_true", help="verify drafts whether they gain time or not")
    add("--requests", type=int, nargs="+", default=[1], metavar="N", help="at once")
    add("--input-len", type=int, default=128, metavar="N")
    add("--output-len", type=int, default=256, metavar="N")
    add("--prompt-ids", default="", metavar="FILE", help="JSON list of ids: the prompt")
    add("--runs", type=int, default=3, metavar="N", help="the median is reported")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", default="float32", metavar="DTYPE")
    add("--threads", type=int, default=1, metavar="N", help="of the CPU")
    add("--deterministic", action="store_true")
    add("--output", default="", metavar="FILE", help="append the lines here")
    args = parser.parse_args()
    if args.prompt_ids:
        args.input_len = len(json.loads(Path(args.prompt_ids).read_text(encoding="utf-8")))
    return args


if __name__ == "__main__":
    main()

"""Output tokens a second of one engine with speculative decoding, beside the same without.

    .venv/bin/python benchmarks/speculation.py --model .demo/smollm2.gguf --drafter ngram
    .venv/bin/python benchmarks/speculation.py --shape llama8b --drafter oracle --requests 1 64
    .venv/bin/python benchmarks/speculation.py --shape llama8b --drafter eagle --requests 1 64
    .venv/bin/python benchmarks/speculation.py --model FOLDER --drafter eagle --head FOLDER

Two engines are in this process: one without drafts, whose outputs are kept, and one with the
drafter. Their runs alternate, so that other work on the machine slows both.

- ``ngram`` and ``lookahead`` are drafters of `trimaran serve`. --head names a trained network.
- ``oracle`` is synthetic: the kept output with some tokens replaced, by a set probability. The
  host waits as long as a head would compute for the drafts that a step verified.
- ``coins`` is a synthetic network in the engine. All drafts of a step take --draft-us a token.
- ``eagle`` without --head is an EAGLE-3 head of random weights.

Drafts of ``coins`` and of the random head count as accepted with a set probability, whatever
the model's own token is: the device replaces the model's own tokens. With --tree the random
head drafts a tree: behind a verified token the likely token of each rank is right with the
probability in --rank-rates, independent of the path, and at most one is.

Without --deterministic an output may differ from the kept output by rounding. The oracle then
lacks the rest, and ``coins`` measures speed. Prompts consist of one random passage that is
repeated, or of the ids in --prompt-ids, or of a line of --prompts. All requests are greedy.

Each line of the result has the tokens a second of both engines from all first tokens to the
last end, which includes steps of ever fewer requests, and to the first end (``steady``); the
ratio of tokens a second of processor time, which other work on the machine changes less; the
accepted tokens of a verification (with the model's own), and the number of outputs that differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import statistics
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from coins import CoinSampler, SyntheticHeads

from trimaran.bench.limits.shapes import SHAPES, shape_config
from trimaran.bench.offline.engine_run import random_checkpoint
from trimaran.bench.results.results import environment
from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.control.control_plane import LocalControlPlane
from trimaran.comm.messages.messages import StepOutput, Submit
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.draft_network import DRAFT_MODEL, EAGLE, MEDUSA
from trimaran.worker.config.draft_tree import read_choices
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    RankConfig,
    SchedulerConfig,
)
from trimaran.worker.config.speculation_config import SpeculationConfig
from trimaran.worker.engine import loading
from trimaran.worker.engine.engine import Engine
from trimaran.worker.requests.request import Request, Sequence

SERVED = ("ngram", "lookahead")
"""Drafters of the engine that need no network."""

HEADS = (EAGLE, MEDUSA, DRAFT_MODEL)
"""Networks that draft chains or trees."""

NETWORKS = ("coins", EAGLE)
"""Networks without meaning, whose drafts are accepted by chance."""


class Head:
    """Takes the time of a draft head: one pass for each token of a draft, for all sequences."""

    def __init__(self, engine: Engine, token_us: float) -> None:
        self._counts = engine.scheduler.draft_counts
        self._token_us = token_us
        self._seen = self._counts.num_drafts, self._counts.num_tokens

    def wait(self) -> None:
        """Wait once for the drafts that the last step verified: a head drafts after the choice
        of their number."""
        counts = self._counts
        drafts, tokens = counts.num_drafts - self._seen[0], counts.num_tokens - self._seen[1]
        if not drafts:
            return
        self._seen = counts.num_drafts, counts.num_tokens
        end = time.perf_counter() + math.ceil(tokens / drafts) * self._token_us / 1e6
        while time.perf_counter() < end:
            pass


class Oracle:
    """Drafts the output that is known beforehand; each id is wrong with a set probability."""

    is_asked = False
    is_spent = False

    def __init__(self, output: list[int], rate: float, head: Head, seed: int) -> None:
        self._output, self._rate, self._head = output, rate, head
        self._coin = random.Random(seed)

    def propose(self, sequence: Sequence, most: int) -> array[int]:
        """The next ids of the output, with errors."""
        self._head.wait()
        count = sequence.num_output_tokens
        ids = array("i", self._output[count : count + most])
        for place in range(len(ids)):
            if self._coin.random() >= self._rate:
                ids[place] ^= 1
        return ids


@contextlib.contextmanager
def speculation_of(
    args: argparse.Namespace, most: int, *, is_adaptive: bool
) -> Iterator[SpeculationConfig]:
    """The configuration of the engine with drafts; the folder of its head lives as long."""
    values: dict[str, Any] = {
        "max_draft_tokens": most,
        "is_adaptive": is_adaptive,
        "is_overlapped": not args.no_overlap,
    }
    if args.drafter == "coins":
        # Heads take the place of those that the engine would load.
        loading.load_network = synthetic_heads(args, most)  # type: ignore[attr-defined]
        yield SpeculationConfig(drafter=MEDUSA, draft_dir="none", **values)
        return
    if args.tree:
        values["tree"] = read_choices(args.tree, "--tree")
        values["max_draft_tokens"] = most_drafts(args)
    if args.head:
        yield SpeculationConfig(drafter=args.drafter, draft_dir=args.head, **values)
        return
    if args.drafter != EAGLE:
        drafter = args.drafter if args.drafter in SERVED else "ngram"
        yield SpeculationConfig(drafter=drafter, **values)
        return
    sizes = shape_config(args.shape, args.dtype, args.input_len + args.output_len + 8)
    head = {**sizes, "num_hidden_layers": 1, "draft_vocab_size": args.head_vocab}
    with random_checkpoint(head) as folder:
        yield SpeculationConfig(drafter=EAGLE, draft_dir=folder, **values)


def most_drafts(args: argparse.Namespace) -> int:
    """Most draft tokens of a sequence in a step."""
    return len(read_choices(args.tree, "--tree")) if args.tree else args.max_draft_tokens


def synthetic_heads(args: argparse.Namespace, most: int) -> Any:
    """A function that makes heads for an engine whose configuration has a network."""

    def make(config: EngineConfig, _topology: Any, _tp: Any, target: Any) -> Any:
        if not config.scheduler.speculation.is_network:
            return None
        return SyntheticHeads(most, args.draft_us, target.config.vocab_size, target.device)

    return make


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
                    cuda_graphs=not args.no_cuda_graphs,
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


class Speed(NamedTuple):
    """Tokens a second of a run, after every first token is there."""

    whole: float
    """Up to the end of the last request."""

    steady: float
    """Up to the end of the first request."""

    by_processor: float
    """Tokens of the whole a second of this process's processor time: other work on the machine
    changes these less."""


def run(
    engine: Engine, prompts: list[list[int]], num_tokens: int, first: int
) -> tuple[dict[int, list[int]], Speed]:
    """The outputs of all prompts, and the speed."""
    outputs: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts, first):
        sampling = SamplingParams(max_tokens=num_tokens, top_k=1).to_wire()
        message = Submit(
            request_id=number, model="bench", prompt_ids=pack_ids(prompt), sampling=sampling
        )
        engine.submit("bench", message)
        outputs[number] = []
    begin, num_before, steady, processor = 0.0, 0, 0.0, 0.0
    while engine.has_work:
        for _, message in engine.step().messages:
            assert isinstance(message, StepOutput), message
            file(message, outputs)
        if not begin and all(outputs.values()):
            begin, num_before = time.perf_counter(), sum(map(len, outputs.values()))
            processor = time.process_time()
        if begin and not steady and max(map(len, outputs.values())) >= num_tokens:
            count = sum(map(len, outputs.values())) - num_before
            steady = count / (time.perf_counter() - begin)
    seconds, busy = time.perf_counter() - begin, time.process_time() - processor
    count = sum(map(len, outputs.values())) - num_before
    return outputs, Speed(count / seconds, steady, count / busy)


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


def text_ids(args: argparse.Namespace) -> list[list[int]]:
    """The ids of each line of --prompts; no prompt for other sources."""
    if not args.prompts:
        return []
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lines = Path(args.prompts).read_text(encoding="utf-8").splitlines()
    found: list[list[int]] = tokenizer(lines)["input_ids"]
    return found


def prompts_of(args: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """One prompt a request: a passage twice, or the given ids or question."""
    if args.question:
        return [question_ids(args)] * max(args.requests)
    if args.prompt_ids:
        ids = json.loads(Path(args.prompt_ids).read_text(encoding="utf-8"))
        return [ids] * max(args.requests)
    random_ids = np.random.default_rng(1)
    half = args.input_len // 2
    passages = random_ids.integers(2, vocab_size, (max(args.requests), half)).tolist()
    return [passage * 2 for passage in passages]


def question_ids(args: argparse.Namespace) -> list[int]:
    """The ids of a question as the chat template of the model's folder writes one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    turns = [{"role": "user", "content": args.question}]
    ids: list[int] = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=False
    )
    return ids


def measured(
    args: argparse.Namespace, plain: Engine, own: Engine, prompts: list[list[int]]
) -> tuple[Speed, Speed, float, int]:
    """The results of a request for each prompt: median speeds with drafts and without, tokens
    of a verification, and the number of requests whose outputs differ."""
    warm, *_ = run(plain, prompts, args.output_len, 1001)
    if args.drafter == "oracle":
        own.scheduler.draft_rows.make_drafter = maker(args, own, list(warm.values()), prompts)
    run(own, prompts, args.output_len, 1001)
    before, speeds, differ = counts_of(own), [], 0
    for first in range(2001, 2001 + 1000 * args.runs, 1000):
        theirs, plain_speed = run(plain, prompts, args.output_len, first)
        mine, speed = run(own, prompts, args.output_len, first)
        speeds.append((*speed, *plain_speed))
        differ += sum(mine[number] != theirs[number] for number in mine)
    drafts, accepted = (a - b for a, b in zip(counts_of(own), before, strict=True))
    mean = 1 + accepted / drafts if drafts else 1.0
    medians = [statistics.median(each) for each in zip(*speeds, strict=True)]
    half = len(Speed._fields)
    return Speed(*medians[:half]), Speed(*medians[half:]), mean, differ


def counts_of(engine: Engine) -> tuple[int, int]:
    """Drafts and accepted tokens so far."""
    counts = engine.scheduler.draft_counts
    return counts.num_drafts, counts.num_accepted


def maker(
    args: argparse.Namespace, own: Engine, outputs: list[list[int]], prompts: list[list[int]]
) -> Any:
    """Makes the oracle of a request, which finds the output by prompt."""
    known = {tuple(p): output for p, output in zip(prompts, outputs, strict=False)}
    head = Head(own, args.draft_us)

    def make(request: Request) -> Oracle:
        output = known[tuple(request.prompt_ids)]
        return Oracle(output, args.acceptance, head, request.number)

    return make


def main() -> None:
    """Measure, and write one line a number of requests."""
    args = arguments()
    most, is_adaptive = args.max_draft_tokens, not args.all
    with (
        speculation_of(args, most, is_adaptive=is_adaptive) as drafted,
        engine_of(args, SpeculationConfig()) as plain,
        engine_of(args, drafted) as own,
    ):
        if is_synthetic(args):
            CoinSampler(own, args.rank_rates or [args.acceptance])
        most = max(args.requests)
        sets = [[ids] * most for ids in text_ids(args)]
        sets = sets or [prompts_of(args, plain.facts()["vocab_size"])]
        for number, prompts in enumerate(sets):
            for count in args.requests:
                found = measured(args, plain, own, prompts[:count])
                report(args, count, found, number if args.prompts else None)


def is_synthetic(args: argparse.Namespace) -> bool:
    """Whether drafts are those of a network without meaning, and accepted by chance."""
    return args.drafter in NETWORKS and not args.head


def report(
    args: argparse.Namespace,
    count: int,
    found: tuple[Speed, Speed, float, int],
    prompt: int | None,
) -> None:
    """Print one line, and append the line to the file of results."""
    speed, plain, mean, differ = found
    line = {
        "benchmark": "speculation",
        "drafter": args.drafter,
        "model": args.name or (Path(args.model).name if args.model else args.shape),
        "dtype": args.dtype,
        "requests": count,
        "max_draft_tokens": most_drafts(args),
        "mean_accepted": round(mean, 2),
        "out_tok_s": round(speed.whole, 1),
        "plain_tok_s": round(plain.whole, 1),
        "ratio": round(speed.whole / plain.whole, 3),
        "steady_tok_s": round(speed.steady, 1),
        "plain_steady_tok_s": round(plain.steady, 1),
        "steady_ratio": round(speed.steady / plain.steady, 3),
        "processor_ratio": round(speed.by_processor / plain.by_processor, 3),
        "outputs_that_differ": None if is_synthetic(args) else differ,
        "deterministic": args.deterministic,
    }
    if prompt is not None:
        line["prompt"] = prompt
    if args.tree:
        line["tree"] = args.tree
    if args.head:
        line["head"] = Path(args.head).name
    elif args.drafter not in SERVED:
        line["acceptance"] = args.rank_rates or args.acceptance
        is_head = args.drafter == EAGLE
        line |= {"head_vocab": args.head_vocab} if is_head else {"draft_us": args.draft_us}
    if args.drafter in NETWORKS or args.head:
        line["overlapped"] = not args.no_overlap
    line |= environment(torch.device(args.device), None)
    print(json.dumps(line), flush=True)
    if args.output:
        with Path(args.output).open("a", encoding="utf-8") as results:
            results.write(json.dumps(line) + "\n")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", default="", metavar="PATH", help="a folder or a GGUF file")
    add("--name", default="", help="of the model in the result (the folder's)")
    model.add_argument("--shape", choices=sorted(SHAPES), help="random weights")
    add("--drafter", choices=(*SERVED, "oracle", "coins", *HEADS), default="ngram")
    add("--head", default="", metavar="DIR", help="a trained network that drafts")
    add("--tree", default="", metavar="TREE", help="of a head, as eagle_choices")
    add("--rank-rates", type=float, nargs="+", metavar="P", help="acceptance by rank in a tree")
    add("--head-vocab", type=int, default=32000, metavar="N", help="ids of an EAGLE-3 head")
    add(
        "--acceptance", type=float, default=0.75, metavar="P", help="of a synthetic draft token"
    )
    add(
        "--draft-us",
        type=float,
        default=190.0,
        metavar="US",
        help="time of a synthetic draft token",
    )
    add("--max-draft-tokens", type=int, default=5, metavar="N")
    add("--all", action="store_true", help="verify drafts whether they gain time or not")
    add("--no-overlap", action="store_true", help="plan each step after the last one's result")
    add("--requests", type=int, nargs="+", default=[1], metavar="N", help="at once")
    add("--input-len", type=int, default=128, metavar="N")
    add("--output-len", type=int, default=256, metavar="N")
    add("--prompt-ids", default="", metavar="FILE", help="JSON list of ids: the prompt")
    add("--prompts", default="", metavar="FILE", help="a prompt a line, each measured alone")
    add("--question", default="", metavar="TEXT", help="the prompt, in the chat template")
    add("--runs", type=int, default=3, metavar="N", help="the median is reported")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", default="float32", metavar="DTYPE")
    add("--threads", type=int, default=1, metavar="N", help="of the CPU")
    add("--deterministic", action="store_true")
    add("--no-cuda-graphs", action="store_true", help="launch steps and drafts on a GPU")
    add("--output", default="", metavar="FILE", help="append the lines here")
    args = parser.parse_args()
    if args.drafter in HEADS and not args.head and (args.drafter != EAGLE or not args.shape):
        parser.error("heads of random weights are EAGLE heads for --shape; others need --head")
    if args.tree and args.drafter not in HEADS:
        parser.error("--tree is drafted by heads alone")
    if args.prompts:
        args.input_len = max(map(len, text_ids(args)))
    elif args.question:
        args.input_len = len(question_ids(args))
    elif args.prompt_ids:
        args.input_len = len(json.loads(Path(args.prompt_ids).read_text(encoding="utf-8")))
    return args


if __name__ == "__main__":
    main()

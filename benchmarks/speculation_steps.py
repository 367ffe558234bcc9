"""Where the time of a step that verifies drafts goes: host, device, and kernels by name.

    python benchmarks/speculation_steps.py --requests 16 64 --drafts 0 2 3 5

One engine of random weights on a GPU decodes a number of requests at once, and verifies the
same number of draft tokens for each. Each is accepted with a set probability, whatever the
model's own token is: the time of a step depends on the number of accepted tokens alone. `plain`
is another engine, which verifies no drafts at all.

A network in the engine drafts, and its time is part of ``sample``: --draft-us for each token of
all drafts. With --drafter eagle an EAGLE-3 head of random weights drafts instead. For each step
the program prints milliseconds: from result to result, in the parts of the host's loop, in the
model and in the sampler on the device. With --tree or --top-k the head of random weights drafts
a tree, of which --drafts nodes are verified; nearly none is accepted. With --kernels it also
prints the kernels that take most of the device's time, by name.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from coins import CoinSampler
from speculation import engine_of, prompts_of, speculation_of
from torch.profiler import ProfilerActivity, profile

from trimaran.bench.limits.shapes import SHAPES
from trimaran.comm.messages.messages import Submit
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.worker.config.draft_network import EAGLE
from trimaran.worker.config.speculation_config import SpeculationConfig
from trimaran.worker.engine.engine import Engine

_PARTS = ("schedule", "launch", "wait", "emit", "device", "sample")


class Requests:
    """Requests at once on one engine, in steps in which all of them decode."""

    def __init__(self, engine: Engine, args: argparse.Namespace, count: int, k: int) -> None:
        self.engine = engine
        sampling = SamplingParams(max_tokens=args.output_len, top_k=1).to_wire()
        prompts = prompts_of(args, engine.facts()["vocab_size"])[:count]
        for number, prompt in enumerate(prompts):
            engine.submit("bench", Submit(
                request_id=number, model="bench", prompt_ids=pack_ids(prompt),
                sampling=sampling, max_draft_tokens=k,
            ))  # fmt: skip
        self._untold = set(range(count))
        while self._untold:
            self.step()
        for _ in range(6):
            self.step()

    def step(self) -> int:
        """One step; the number of its tokens."""
        tokens = 0
        for _, message in self.engine.step().messages:
            self._untold -= set(memoryview(message.request_ids).cast("Q").tolist())
            tokens += len(message.token_ids) // 4
        return tokens

    def end(self) -> None:
        """Cancel what is left."""
        self.engine.drop_source("bench")
        while self.engine.has_work:
            self.engine.step()


def parts_of(requests: Requests, num_steps: int) -> dict[str, Any]:
    """Milliseconds of a step by part, and its tokens."""
    engine = requests.engine
    before, begin = engine.times.values(), time.perf_counter()
    tokens = sum(requests.step() for _ in range(num_steps))
    seconds = time.perf_counter() - begin
    after = engine.times.values()
    parts = {
        part: round(1e3 * (after[f"{part}_seconds"] - before[f"{part}_seconds"]) / num_steps, 3)
        for part in _PARTS
    }
    return {
        "ms": round(1e3 * seconds / num_steps, 3), **parts,
        "tokens": round(tokens / num_steps, 1), "tok_s": round(tokens / seconds),
    }  # fmt: skip


def kernels_of(requests: Requests, num_steps: int, most: int) -> Iterator[str]:
    """Lines of the kernels that take most time, and the device's time in all."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as trace:
        begin = time.perf_counter()
        for _ in range(num_steps):
            requests.step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - begin
    found = [
        each for each in trace.key_averages()
        if each.self_device_time_total > 0 and str(each.device_type).endswith("CUDA")
    ]  # fmt: skip
    found.sort(key=lambda each: -each.self_device_time_total)
    busy = sum(each.self_device_time_total for each in found)
    yield f"  kernels {busy / num_steps / 1e3:.3f} ms of {1e3 * wall / num_steps:.3f} (traced)"
    for each in found[:most]:
        us, calls = each.self_device_time_total / num_steps, each.count / num_steps
        yield f"  {us:8.1f} us {calls:6.1f} x {us / max(calls, 1e-9):7.2f}  {each.key[:78]}"


def measure(engine: Engine, args: argparse.Namespace, count: int, k: int, name: str) -> None:
    """Print one line of parts, and the kernels."""
    requests = Requests(engine, args, count, k)
    parts = parts_of(requests, args.steps)
    line = {"engine": name, "requests": count, "drafts": k, **parts}
    print(json.dumps(line), flush=True)
    if args.kernels:
        for text in kernels_of(requests, args.traced_steps, args.kernels):
            print(text, flush=True)
    requests.end()


def main() -> None:
    """See the module's docstring."""
    args = arguments()
    if args.kernels:
        # Kernels of graphs that are captured earlier are not attributed.
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True):
            torch.zeros(1, device=args.device)
    with speculation_of(args, max(args.drafts), is_adaptive=False) as drafted:
        for name, config in (("plain", SpeculationConfig()), ("drafts", drafted)):
            if name not in args.engines:
                continue
            if args.top_k and config.is_on:
                config = replace(config, tree_width=args.top_k, tree_depth=args.depth)
            with engine_of(args, config) as engine:
                if config.is_on and not config.has_trees:
                    CoinSampler(engine, [args.acceptance])
                for count in args.requests:
                    for k in args.drafts if name == "drafts" else (0,):
                        measure(engine, args, count, k, name)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="llama8b")
    add("--drafter", choices=("coins", EAGLE), default="coins")
    add("--head-vocab", type=int, default=32000, metavar="N", help="ids of an EAGLE-3 head")
    add("--engines", nargs="+", choices=("plain", "drafts"), default=("plain", "drafts"))
    add("--requests", type=int, nargs="+", default=[16, 64], metavar="N")
    add("--drafts", type=int, nargs="+", default=[0, 3, 5], metavar="N", help="a sequence")
    add("--tree", default="", metavar="TREE", help="of an EAGLE head, as eagle_choices")
    add("--top-k", type=int, default=0, metavar="K", help="of an EAGLE head's dynamic trees")
    add("--depth", type=int, default=5, metavar="N", help="of a dynamic tree")
    add("--acceptance", type=float, default=0.8, metavar="P", help="of each draft token")
    add("--draft-us", type=float, default=0.0, metavar="US", help="time of a draft token")
    add("--input-len", type=int, default=128, metavar="N")
    add("--output-len", type=int, default=400, metavar="N")
    add("--steps", type=int, default=30, metavar="N", help="that are timed")
    add("--traced-steps", type=int, default=10, metavar="N")
    add("--kernels", type=int, default=0, metavar="N", help="kernels to print")
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--dtype", default="bfloat16", metavar="DTYPE")
    add("--threads", type=int, default=1, metavar="N", help="of the CPU")
    add("--deterministic", action="store_true")
    add("--no-cuda-graphs", action="store_true", help="launch steps and drafts")
    add("--no-overlap", action="store_true", help="plan each step after the last one's result")
    args = parser.parse_args()
    args.model = args.prompt_ids = args.question = args.head = ""
    return args


if __name__ == "__main__":
    main()

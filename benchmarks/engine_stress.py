"""An engine at its limits for minutes: random lengths, cancellations and seeds, and no loss.

    python benchmarks/engine_stress.py --shape llama8b --seconds 300 --json results.jsonl

Every row is in use and more requests wait. Exit code 1 if a stream has a wrong number of
tokens, if a block, row or request is left over, or if the last third of the time was slower
than the first third.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trimaran.bench.limits.ranks import connected
from trimaran.bench.limits.shapes import SHAPES, shape_config
from trimaran.bench.offline.engine_run import load_engine, random_checkpoint
from trimaran.bench.results.results import append, environment
from trimaran.comm.messages.messages import FinishReason, RequestFailed, StepOutput, Submit
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from trimaran.worker.engine.engine import Engine

SOURCE = "stress"
_SLOWER = 1.25
"""Largest ratio of the last third's seconds a token to the first's that counts as steady."""
_CANCELLED = 0.1


@dataclass(slots=True)
class Stream:
    """The expected and the received tokens of a request."""

    due: int
    cancel_after: int
    submitted: float
    num_tokens: int = 0
    is_cancelled: bool = False


@dataclass(slots=True)
class Window:
    """The events of one part of the run."""

    tokens: int = 0
    steps_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Tokens a second, and milliseconds of steps and from submission to first token."""
        steps = 1e3 * np.array(self.steps_s or [0.0])
        first = 1e3 * np.array(self.first_token_s or [0.0])
        return {
            "out_tok_s": round(self.tokens / max(sum(self.steps_s), 1e-9), 1),
            "step_ms_p50": round(float(np.percentile(steps, 50)), 2),
            "step_ms_p99": round(float(np.percentile(steps, 99)), 2),
            "ttft_ms_p50": round(float(np.percentile(first, 50)), 1),
        }


class Stress:
    """Keeps an engine full and follows every stream."""

    def __init__(self, engine: Engine, limits: SchedulerConfig, vocab_size: int) -> None:
        self._engine = engine
        self._limits = limits
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(1)
        self._streams: dict[int, Stream] = {}
        self.problems: list[str] = []
        self.num_done = 0
        self.num_cancelled = 0
        self.peak_running = 0
        self.num_paused = 0

    def submit(self) -> None:
        """One request of random lengths; one in ten is cancelled early."""
        random = self._random
        isl = int(random.integers(1, self._limits.max_input_len + 1))
        osl = int(random.integers(1, self._limits.max_seq_len - isl + 1))
        number = self.num_done + len(self._streams) + 1
        is_greedy = random.random() < 0.1
        sampling = SamplingParams(
            max_tokens=osl,
            temperature=float(random.uniform(0.3, 1.5)),
            top_k=1 if is_greedy else int(random.choice([0, 0, 50])),
            top_p=float(random.choice([1.0, 0.9])),
            seed=int(random.integers(0, 1 << 62)),
        )
        prompt = random.integers(0, self._vocab_size, isl)
        is_cancelled = random.random() < _CANCELLED
        cancel_after = int(random.integers(0, osl)) if is_cancelled else osl
        self._streams[number] = Stream(osl, cancel_after, time.perf_counter())
        self._engine.submit(
            SOURCE,
            Submit(
                request_id=number,
                model=SOURCE,
                prompt_ids=pack_ids(prompt),
                sampling=sampling.to_wire(),
                streaming=True,
            ),
        )

    def run(
        self, outstanding: int, seconds: float, drain_s: float, num_windows: int
    ) -> list[Window]:
        """Keep ``outstanding`` requests for ``seconds``, wait ``drain_s`` more for their
        end, and then cancel the rest at once.
        """
        windows = [Window() for _ in range(num_windows)]
        for _ in range(outstanding):
            self.submit()
        start = last = time.perf_counter()
        while self._engine.has_work:
            elapsed = last - start
            window = windows[min(int(elapsed / seconds * num_windows), num_windows - 1)]
            for _, message in self._engine.step().messages:
                self._take(message, window, elapsed < seconds)
            now = time.perf_counter()
            if elapsed < seconds:
                window.steps_s.append(now - last)
            last = now
            self._look()
            if now - start > seconds + drain_s:
                self._cancel_all()
            while elapsed < seconds and len(self._streams) < outstanding:
                self.submit()
        return windows

    def _cancel_all(self) -> None:
        left = [number for number, s in self._streams.items() if not s.is_cancelled]
        for number in left:
            self._streams[number].is_cancelled = True
        if left:
            self._engine.cancel(SOURCE, left)

    def _look(self) -> None:
        scheduler = self._engine.scheduler
        self.peak_running = max(self.peak_running, len(scheduler.running))
        self.num_paused = max(self.num_paused, scheduler.preemptions.num_waiting)

    def _take(self, message: object, window: Window, is_counted: bool) -> None:
        if isinstance(message, RequestFailed):
            self.problems.append(f"request {message.request_id} failed: {message.text}")
            self._streams.pop(message.request_id)
        if not isinstance(message, StepOutput):
            return
        rows = zip(
            np.frombuffer(message.request_ids, np.uint64).tolist(),
            np.frombuffer(message.num_tokens, np.uint16).tolist(),
            np.frombuffer(message.finish_reasons, np.uint8).tolist(),
            strict=True,
        )
        for number, count, reason in rows:
            stream = self._streams.get(number)
            if stream is None:
                self.problems.append(f"request {number} spoke after its end")
                continue
            if not stream.num_tokens and count and is_counted:
                window.first_token_s.append(time.perf_counter() - stream.submitted)
            stream.num_tokens += count
            window.tokens += count if is_counted else 0
            if reason:
                self._end(number, stream, FinishReason(reason))
            elif stream.num_tokens > stream.cancel_after and not stream.is_cancelled:
                stream.is_cancelled = True
                self._engine.cancel(SOURCE, [number])

    def _end(self, number: int, stream: Stream, reason: FinishReason) -> None:
        del self._streams[number]
        self.num_done += 1
        self.num_cancelled += stream.is_cancelled
        due = FinishReason.CANCELLED if stream.is_cancelled else FinishReason.LENGTH
        if reason is not due and stream.num_tokens != stream.due:
            self.problems.append(f"request {number} ended by {reason.name}, not {due.name}")
        if reason is FinishReason.LENGTH and stream.num_tokens != stream.due:
            self.problems.append(f"request {number}: {stream.num_tokens} of {stream.due}")

    def check_empty(self) -> None:
        """Record leftovers once the engine has no work."""
        scheduler, cache = self._engine.scheduler, self._engine.scheduler.cache
        if self._streams:
            self.problems.append(f"{len(self._streams)} streams never ended")
        if cache.num_free != cache.num_blocks:
            self.problems.append(f"{cache.num_blocks - cache.num_free} blocks are still held")
        if scheduler.running or scheduler.waiting or scheduler.preemptions.num_waiting:
            self.problems.append("sequences are left in the scheduler")
        cache.check([])


def make_engine(args: argparse.Namespace, folder: str) -> tuple[Engine, SchedulerConfig]:
    """The engine, and its own maxima."""
    limits = SchedulerConfig(
        max_num_batched_tokens=max(args.max_num_tokens, args.max_num_seqs),
        max_num_seqs=args.max_num_seqs,
        max_seq_len=args.max_seq_len,
        max_input_len=args.max_seq_len - 1,
        policy="max_utilization",
    )
    config = EngineConfig(
        model=SOURCE,
        engine_dir=folder,
        load_format="random",
        device=args.device,
        scheduler=limits,
        cache=CacheConfig(
            enable_block_reuse=False, free_memory_fraction=0.9, max_tokens=args.cache_tokens
        ),
    )
    with connected(config) as ranks:
        return load_engine(config, ranks), limits


def main() -> int:
    """Run, print the events of each window, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="tiny")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seconds", type=float, default=300.0)
    add(
        "--drain-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="after these seconds more, what has not ended is cancelled",
    )
    add("--max-num-seqs", type=int, default=1024, metavar="N")
    add("--max-num-tokens", type=int, default=8192, metavar="N")
    add("--max-seq-len", type=int, default=4096, metavar="N")
    add("--cache-tokens", type=int, default=0, metavar="N", help="0: what memory holds")
    add("--windows", type=int, default=9, metavar="N", help="parts of the time")
    add("--json", metavar="FILE", help="append the result as a JSON line")
    args = parser.parse_args()
    with random_checkpoint(shape_config(args.shape, "bfloat16", args.max_seq_len)) as folder:
        engine, limits = make_engine(args, folder)
    stress = Stress(engine, limits, SHAPES[args.shape]["vocab_size"])
    outstanding = args.max_num_seqs * 5 // 4
    windows = stress.run(outstanding, args.seconds, args.drain_seconds, args.windows)
    stress.check_empty()
    figures = [window.figures() for window in windows]
    third = max(len(figures) // 3, 1)
    before, after = (
        float(np.median([1.0 / max(f["out_tok_s"], 1e-9) for f in part]))
        for part in (figures[1 : 1 + third], figures[-third:])
    )
    if after > _SLOWER * before:
        stress.problems.append(f"a token took {after / before:.2f} times as long at the end")
    result: dict[str, Any] = {
        "kind": "engine_stress", "shape": args.shape, "seconds": args.seconds,
        "max_num_seqs": args.max_num_seqs, "max_seq_len": args.max_seq_len,
        "requests": stress.num_done, "cancelled": stress.num_cancelled,
        "peak_running": stress.peak_running, "peak_paused": stress.num_paused,
        "windows": figures, "problems": stress.problems[:20],
        **environment(engine.device, None),
    }  # fmt: skip
    if engine.device.type == "cuda":
        result["peak_memory_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 1)
    engine.shutdown()
    for number, window in enumerate(figures):
        print(number, window)
    print({k: v for k, v in result.items() if k not in ("windows", "command")})
    if args.json:
        append(args.json, result)
    return 1 if stress.problems else 0


_Raw = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    sys.exit(main())

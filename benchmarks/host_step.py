"""Host time of a step without a model: planning, processing ids, messages to front ends."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections import deque

import torch

from trimaran.comm.messages.messages import Submit, encode
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.engine.input_processor import request_from
from trimaran.worker.engine.output_processor import step_outputs
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.scheduling.scheduler import Scheduler
from trimaran.worker.scheduling.step_plan import ScheduledStep

VOCAB_SIZE = 128_256
HIDDEN_SIZE = 4096
BLOCK_SIZE = 32
PARTS = ("schedule", "update", "emit")


def make_scheduler(num_rows: int, num_tokens: int, *, reuse: bool) -> Scheduler:
    """A scheduler with room for ``num_rows`` sequences of ``num_tokens``."""
    limits = SchedulerConfig(
        max_num_batched_tokens=8192,
        max_num_seqs=num_rows,
        max_seq_len=num_tokens,
        max_input_len=num_tokens,
        policy="max_utilization",
    )
    num_blocks = num_rows * (num_tokens // BLOCK_SIZE + 2)
    return Scheduler(limits, KVCacheManager([num_blocks], BLOCK_SIZE, enable_reuse=reuse))


def submit_all(scheduler: Scheduler, num_rows: int, prompt: int, output: int) -> None:
    """Queue requests of different prompts; half come from each of two front ends."""
    sampling = SamplingParams(max_tokens=output, temperature=1.0, seed=1).to_wire()
    for number in range(num_rows):
        ids = [(number * 31 + place) % VOCAB_SIZE for place in range(prompt)]
        message = Submit(
            request_id=number, model="m", prompt_ids=pack_ids(ids), sampling=sampling
        )
        model = VOCAB_SIZE, HIDDEN_SIZE, torch.bfloat16
        request = request_from(number % 2, message, number, scheduler.config, *model)
        scheduler.check(request)
        scheduler.add(request)


def run(scheduler: Scheduler, num_rows: int, num_steps: int) -> dict[str, list[float]]:
    """Seconds of each part over ``num_steps`` steps of all rows, two steps in flight."""
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    in_flight: deque[ScheduledStep] = deque()
    clock = time.perf_counter
    while len(times["schedule"]) < num_steps:
        start = clock()
        step = scheduler.schedule()
        planned = clock()
        assert step is not None
        in_flight.append(step)
        if len(in_flight) < 2:
            continue
        step = in_flight.popleft()
        ids = list(range(100, 100 + len(step.sampled)))
        begin = clock()
        emissions = scheduler.update_from_output(step, ids)
        updated = clock()
        for _, message in step_outputs(step.decision.step, emissions):
            encode(message)
        emitted = clock()
        if step.decision.num_decodes == num_rows:
            times["schedule"].append(planned - start)
            times["update"].append(updated - begin)
            times["emit"].append(emitted - updated)
    return times


def main() -> None:
    """Print milliseconds a step, median and slowest tenth, for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--reuse", action="store_true", help="keep blocks findable")
    args = parser.parse_args()
    print(
        f"load {os.getloadavg()[0]:.1f}, reuse {args.reuse}, milliseconds a step: median (p90)"
    )
    for num_rows in args.rows:
        num_tokens = args.prompt + args.steps + 64
        scheduler = make_scheduler(num_rows, num_tokens, reuse=args.reuse)
        submit_all(scheduler, num_rows, args.prompt, args.steps + 40)
        gc.collect()
        gc.freeze()
        times = run(scheduler, num_rows, args.steps)
        cells = []
        for part in PARTS:
            values = sorted(1e3 * value for value in times[part])
            cells.append(
                f"{part} {statistics.median(values):.3f} ({values[-len(values) // 10]:.3f})"
            )
        total = [1e3 * sum(step) for step in zip(*times.values(), strict=True)]
        print(f"{num_rows:5d} rows: {', '.join(cells)}, all {statistics.median(total):.3f}")


if __name__ == "__main__":
    main()

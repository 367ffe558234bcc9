"""The cost of `max_utilization` admission: a scheduler alone, with synthetic output lengths."""

from __future__ import annotations

import argparse
import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import Request
from trimaran.worker.scheduling.scheduler import Scheduler
from trimaran.worker.scheduling.step_plan import ScheduledStep

BLOCK_SIZE = 32
NUM_ROWS = 1024
END_ID, OTHER_ID = 7, 99
WIDE, NARROW, BESIDE_MIXTURE = 28_125, 4_000, 9_648
"""KV blocks: of an H200 beside the 8B shape's weights, of a smaller GPU, and of an H200
beside those of Mixtral 8x7B.
"""

_CACHED_TOKEN_S = 131_072 / 4.2e12


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of a step on an H200 in bfloat16, to weigh steps, not to predict times."""

    fixed_s: float
    """Constant cost of a step: mostly reading the weights."""

    row_s: float
    """Additional cost of each token in a step of few tokens, while weights are read."""

    token_s: float
    """Cost of each token in a step of many tokens."""

    tokens_per_read: float
    """The form of the cost that the engine gives its scheduler."""

    def seconds(self, tokens: int, cached: int) -> float:
        """The cost of a step with a number of tokens whose sequences have a number of cached
        tokens.
        """
        products = max(self.fixed_s + tokens * self.row_s, tokens * self.token_s)
        return products + cached * _CACHED_TOKEN_S


DENSE = StepCost(3.8e-3, 15e-6, 23e-6, 160.0)
MIXTURE = StepCost(22.4e-3, 27e-6, 43e-6, 571.0)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that all arrive at the start."""

    prompt: int
    output: Callable[[random.Random], float]
    """Draws the length of an output; shorter outputs than ``max_tokens`` end by an end id."""

    max_tokens: int
    count: int
    num_blocks: int = WIDE
    cost: StepCost = DENSE


LOADS = {
    "128/128 x 4,096": Load(128, lambda _: 128, 128, 4096),
    "1000/1000 x 768": Load(1000, lambda _: 1000, 1000, 768),
    "128/2048 x 512": Load(128, lambda _: 2048, 2048, 512),
    "1000/1000 x 192, mixture": Load(1000, lambda _: 1000, 1000, 192, BESIDE_MIXTURE, MIXTURE),
    "about 200 of 32,000 x 2,048": Load(128, lambda r: r.expovariate(1 / 200), 32_000, 2048),
    "300 of 32,000 x 512": Load(128, lambda _: 300, 32_000, 512, NARROW),
    "about 300 of 8,000 x 512": Load(
        200, lambda r: r.lognormvariate(5.3, 0.9), 8_000, 512, NARROW
    ),
    "about 800 of 3,000 x 512": Load(
        1000, lambda r: r.expovariate(1 / 800), 3_000, 512, NARROW
    ),
    "about 3,000 of 8,000 x 128": Load(128, lambda r: r.gauss(3000, 500), 8_000, 128, NARROW),
}
"""Tokens of prompt and output, or of an output and the client's limit."""


def make_scheduler(
    load: Load, expected: int, tokens_per_read: float, host_slots: int
) -> Scheduler:
    """A scheduler for the requests of a load."""
    longest = load.prompt + load.max_tokens
    config = SchedulerConfig(
        max_num_seqs=NUM_ROWS,
        max_seq_len=longest,
        max_input_len=longest,
        policy="max_utilization",
        expected_output_tokens=expected,
        tokens_per_read=tokens_per_read,
    )
    cache = KVCacheManager(
        [load.num_blocks], BLOCK_SIZE, enable_reuse=False, host_slots=host_slots
    )
    return Scheduler(config, cache)


def queue(scheduler: Scheduler, load: Load) -> list[int]:
    """Queue all requests; returns the length of each sequence."""
    rng = random.Random(1)
    lengths = []
    for number in range(load.count):
        request = Request(
            source=0,
            request_id=number,
            number=number,
            prompt_ids=array("i", [OTHER_ID] * load.prompt),
            sampling=SamplingParams(max_tokens=load.max_tokens, end_id=END_ID),
        )
        scheduler.check(request)
        scheduler.add(request)
        lengths.append(load.prompt + max(1, int(load.output(rng))))
    return lengths


def run(scheduler: Scheduler, lengths: list[int], cost: StepCost) -> tuple[int, float]:
    """Steps until all have ended, two in flight, and the seconds that they would take."""
    in_flight: deque[ScheduledStep] = deque()
    seconds, begin = 0.0, scheduler.step
    while scheduler.has_requests or in_flight:
        # The host's results are known by the next step.
        scheduler.swap_ins.done_step = scheduler.step
        step = scheduler.schedule()
        if step is not None:
            in_flight.append(step)
            tokens = step.decision.num_tokens
            cached = int(step.decision.num_computed_tokens.sum()) + tokens
            seconds += cost.seconds(tokens, cached)
        if step is None or len(in_flight) == 2:
            step = in_flight.popleft()
            ids = [
                END_ID if len(s.token_ids) >= lengths[s.request.number] else OTHER_ID
                for s in step.sampled
            ]
            scheduler.update_from_output(step, ids)
            scheduler.take_ended()
    return scheduler.step - begin, seconds


def main() -> None:
    """Print the cost of each load under each initial guess, for first and repeated loads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--expected", type=int, nargs="+", default=[1, 256, 1024, 4096],
                        metavar="N", help="values of --expected-output-tokens")  # fmt: skip
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS),
                        metavar="LOAD", help=", ".join(LOADS))  # fmt: skip
    parser.add_argument("--never-pause", action="store_true",
                        help="nobody starts who is expected to be paused")  # fmt: skip
    parser.add_argument("--host-blocks", type=int, default=0, metavar="N",
                        help="of who is paused, kept in the host's memory")  # fmt: skip
    args = parser.parse_args()
    print("load | expected | time | steps | seconds | paused | tokens computed again")
    for name in args.loads:
        load = LOADS[name]
        for expected in args.expected:
            per_read = 0.0 if args.never_pause else load.cost.tokens_per_read
            scheduler = make_scheduler(load, expected, per_read, args.host_blocks)
            for time in ("first", "again"):
                counts = scheduler.preemptions
                before = counts.num_sequences, counts.num_tokens
                steps, seconds = run(scheduler, queue(scheduler, load), load.cost)
                paused, again = counts.num_sequences - before[0], counts.num_tokens - before[1]
                told = f"{paused} | {again:,}"
                print(f"{name} | {expected} | {time} | {steps:,} | {seconds:.1f} | {told}",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

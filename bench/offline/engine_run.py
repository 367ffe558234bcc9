"""Runs one rank's engine without a front end: requests in, tokens out, timed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trimaran.bench.limits.ranks import Ranks
from trimaran.bench.offline.load import Load
from trimaran.comm.control.control_plane import ControlPlane
from trimaran.comm.messages.messages import RequestFailed, StepOutput, Submit
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.worker.config.engine_config import EngineConfig, ProfileConfig, RankConfig
from trimaran.worker.engine.engine import Engine

_SOURCE = "bench"


@dataclass(slots=True)
class OfflineRun:
    """The measurements of one run."""

    seconds: float = 0.0
    num_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    """Seconds of each request from the start of the run."""

    steps_s: list[float] = field(default_factory=list)
    num_paused: int = 0
    """Number of preempted sequences."""

    num_recomputed: int = 0
    """Tokens of preempted sequences that were computed again."""

    @property
    def out_tok_s(self) -> float:
        """Output tokens a second, counted from the outputs."""
        return self.num_tokens / self.seconds


@contextlib.contextmanager
def random_checkpoint(config: dict[str, object]) -> Iterator[str]:
    """A folder that holds a configuration and no weights."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="trimaran-bench-"))
        # The folder's place is that of a server's folder: the next server deletes folders of
        # killed owners.
        lock = stack.enter_context(Path(folder, "lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield folder


def load_engine(
    config: EngineConfig, ranks: Ranks, profile: ProfileConfig | None = None
) -> Engine:
    """This rank's part of a ready engine; traces the steps of ``profile``."""
    rank = RankConfig(engine=config, group=_SOURCE, profile=profile)
    engine = Engine.load(rank, ranks.topology, ranks.control, ranks.group, ranks.all_ranks)
    ranks.ended.callback(engine.links.close)
    ranks.barrier()
    return engine


class OfflineDriver:
    """Submits loads to one engine; request ids and seeds never repeat."""

    def __init__(self, engine: Engine, control: ControlPlane, vocab_size: int) -> None:
        self._engine = engine
        self._control = control
        self._vocab_size = vocab_size
        self._next_id = 1

    def run(self, load: Load) -> OfflineRun:
        """Submit all requests at once, and step until all have ended.

        Raises:
            RuntimeError: a request was refused, or tokens are missing.
        """
        self._submit(load)
        pauses = self._engine.scheduler.preemptions
        before = pauses.num_sequences, pauses.num_tokens
        waiting = set(range(self._next_id - load.requests, self._next_id))
        done = OfflineRun()
        start = last = time.perf_counter()
        while self._engine.has_work:
            messages = self._engine.step().messages
            now = time.perf_counter()
            for _, message in messages:
                if isinstance(message, RequestFailed):
                    raise RuntimeError(f"a request failed: {message.text}")
                if isinstance(message, StepOutput):
                    done.num_tokens += len(message.token_ids) // 4
                    self._note_first(message, waiting, done, now - start)
            done.steps_s.append(now - last)
            last = now
        done.seconds = last - start
        pauses = self._engine.scheduler.preemptions
        done.num_paused = pauses.num_sequences - before[0]
        done.num_recomputed = pauses.num_tokens - before[1]
        self._control.mark_idle()
        expected = load.requests * load.osl
        if done.num_tokens != expected:
            raise RuntimeError(f"{done.num_tokens} tokens came, {expected} were due")
        return done

    def _submit(self, load: Load) -> None:
        random = np.random.default_rng(self._next_id)
        for _ in range(load.requests):
            sampling = SamplingParams(
                max_tokens=load.osl,
                temperature=load.temperature,
                top_k=0 if load.temperature else 1,
                top_p=1.0,
                seed=self._next_id,
            )
            prompt = random.integers(0, self._vocab_size, load.isl)
            message = Submit(
                request_id=self._next_id,
                model=_SOURCE,
                prompt_ids=pack_ids(prompt),
                sampling=sampling.to_wire(),
                streaming=True,
            )
            self._engine.submit(_SOURCE, message)
            self._next_id += 1

    @staticmethod
    def _note_first(
        message: StepOutput, waiting: set[int], done: OfflineRun, elapsed_s: float
    ) -> None:
        if not waiting:
            return
        counts = np.frombuffer(message.num_tokens, dtype=np.uint16)
        ids = np.frombuffer(message.request_ids, dtype=np.uint64)[counts > 0]
        for request_id in waiting.intersection(ids.tolist()):
            waiting.discard(request_id)
            done.first_token_s.append(elapsed_s)

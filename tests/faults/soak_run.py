"""A soak: models under load and chaos, then the account of every request and resource."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos import Chaos, Disturbance
from chaos_server import ChaosServer
from leftovers import Holdings, idle_cpu, left_over, settled
from load import CANCELLED, FAILED, LATE, LOST, RETRYABLE, RIGHT, WRONG, Load, Outcome, running
from models import Model, make_cases, with_answers
from shm import PrivateShm, Shm

_FRONT_END = "kill the front end"
_IDLE_S = 10.0
_SLACK_S = 1.0
"""A refusal may reach its client a little after the model is ready again."""


@dataclass
class Soak:
    """The resources of one soak."""

    repository: Path
    models: tuple[Model, ...]
    folder: Path
    minutes: float
    flags: tuple[str, ...] = ("--dtype", "float32", "--num-threads", "1")
    multi_model: bool = True
    num_clients: int = 64
    deadline_s: float = 180.0
    longest: int = 96
    cases_per_model: int = 16
    seed: int = 1
    kinds: tuple[str, ...] = ()
    pause_s: tuple[float, float] = (1.0, 8.0)
    think_s: float = 0.5
    make_shm: Callable[[], Shm] = PrivateShm
    problems: list[str] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """The whole soak; the report, with all that is wrong under ``problems``."""
        started_s, load_before = time.time(), os.getloadavg()
        cases = make_cases(self.models, self.cases_per_model, self.longest)
        server = self._server()
        with server:
            self._when_idle(server, lambda now: True)
            cases = with_answers(cases, server)
            # A front end and a second of load; the resources held then are the baseline.
            self._with_load(server, cases, seconds=5.0, chaos=None)
            before = self._when_idle(server, lambda now: now.used_blocks == 0)
            idle = idle_cpu(server, _IDLE_S)
            load, chaos = self._with_load(server, cases, self.minutes * 60, self._chaos(server))
            after = self._when_idle(server, lambda now: not now.growth(before))
            self.problems += [f"held after the soak: {g}" for g in after.growth(before)]
            exit_code = server.end()
            self.problems += self._end_problems(server, exit_code)
        assert chaos is not None
        self.problems += chaos.problems
        verdicts = judge(load.outcomes, chaos.disturbances)
        self.problems += verdicts
        return {
            "problems": self.problems,
            "minutes": round((time.time() - started_s) / 60, 1),
            "host": {
                "machine": platform.machine(),
                "cores": os.cpu_count(),
                "load_average_before": load_before,
                "load_average_after": os.getloadavg(),
            },
            "flags": list(self.flags),
            "num_clients": self.num_clients,
            "deadline_s": self.deadline_s,
            "models": {
                m.name: {
                    "tp": m.tp_size,
                    "pp": m.pp_size,
                    "dp": m.num_dp_ranks,
                    "replicas": m.num_replicas,
                }
                for m in self.models
            },
            "faults": _fault_figures(chaos.disturbances),
            "requests": _request_figures(load.outcomes, chaos.disturbances),
            "idle_cpu_percent": idle,
            "held_before": before.to_dict(),
            "held_after": after.to_dict(),
            "exit_code": exit_code,
        }

    def _server(self) -> ChaosServer:
        flags = (
            "--max-restarts", "100000", "--restart-window", "10",
            "--max-replays", "3", "--replay-timeout", "45", *self.flags,
        )  # fmt: skip
        world_size = self.models[0].num_ranks
        return ChaosServer(
            self.repository, world_size, flags, multi_model=self.multi_model,
            folder=self.folder, make_shm=self.make_shm,
        )  # fmt: skip

    def _chaos(self, server: ChaosServer) -> Chaos:
        return Chaos(
            server, self.models, seed=self.seed, kinds=self.kinds, pause_s=self.pause_s
        )

    def _with_load(
        self, server: ChaosServer, cases: list[Any], seconds: float, chaos: Chaos | None
    ) -> tuple[Load, Chaos | None]:
        """Load for so long, under chaos if there is one; returns when both have ended."""
        load = Load(
            server, cases, self.num_clients,
            deadline_s=self.deadline_s, seed=self.seed, think_s=self.think_s,
        )  # fmt: skip
        deadline = time.monotonic() + seconds
        with running(load):
            if chaos is not None:
                chaos.start()
            while time.monotonic() < deadline and server.process.poll() is None:
                time.sleep(0.2)
            if chaos is not None:
                chaos.stop()
        return load, chaos

    def _when_idle(self, server: ChaosServer, is_settled: Any) -> Holdings:
        chaos = self._chaos(server)
        names = [model.name for model in self.models]
        deadline = time.monotonic() + 120
        while not chaos.is_whole(names) and time.monotonic() < deadline:
            time.sleep(0.5)
        return settled(server, is_settled)

    def _end_problems(self, server: ChaosServer, exit_code: int) -> list[str]:
        left = left_over(server)
        found = [f"left over after the end: {what}" for what in left]
        if exit_code != 0:
            found.append(f"exit code {exit_code} after SIGTERM")
        return found


def judge(outcomes: Sequence[Outcome], disturbances: Sequence[Disturbance]) -> list[str]:
    """Violations of the promise: wrong, late or failed requests, and any error of an
    untouched model.
    """
    found: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome.kind in (RIGHT, CANCELLED):
            continue
        touching = [d for d in disturbances if _touches(d, outcome)]
        if outcome.kind in (WRONG, LATE, FAILED):
            found[f"{outcome.kind}: {_describe(outcome, touching)}"] += 1
        elif outcome.kind == LOST and not any(d.kind == _FRONT_END for d in touching):
            found[f"connection lost: {_describe(outcome, touching)}"] += 1
        elif outcome.kind == RETRYABLE and not touching:
            found[f"refused though its model was untouched: {_describe(outcome, [])}"] += 1
    return [f"{count} x {text}" for text, count in found.most_common()]


def _touches(disturbance: Disturbance, outcome: Outcome) -> bool:
    return (
        outcome.model in disturbance.models
        and outcome.start_s < disturbance.end_s + _SLACK_S
        and outcome.end_s > disturbance.start_s
    )


def _is_met(outcome: Outcome, disturbances: Sequence[Disturbance]) -> bool:
    """Whether the request was in flight when a fault struck its model."""
    return any(
        outcome.model in d.models and outcome.start_s < d.start_s < outcome.end_s
        for d in disturbances
    )


def _describe(outcome: Outcome, touching: list[Disturbance]) -> str:
    during = ", ".join(sorted({d.kind for d in touching})) or "no fault"
    text = outcome.text if len(outcome.text) < 400 else f"{outcome.text[:400]}..."
    return f"{outcome.model} by {outcome.protocol} during {during}: {text}"


def _fault_figures(disturbances: Sequence[Disturbance]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for kind in sorted({d.kind for d in disturbances}):
        of_kind = [d for d in disturbances if d.kind == kind]
        ready = [d.ready_s for d in of_kind if d.ready_s]
        figures[kind] = {
            "count": len(of_kind),
            "processes_gone_s": _spread([d.noticed_s for d in of_kind]),
            "ready_again_s": _spread(ready),
        }
    return figures


def _request_figures(
    outcomes: Sequence[Outcome], disturbances: Sequence[Disturbance]
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for model in sorted({o.model for o in outcomes}):
        mine = [o for o in outcomes if o.model == model]
        calm, others, touched = [], [], []
        for outcome in mine:
            if any(_touches(d, outcome) for d in disturbances):
                touched.append(outcome)
            elif any(_overlaps(d, outcome) for d in disturbances):
                others.append(outcome)
            else:
                calm.append(outcome)
        figures[model] = {
            "outcomes": dict(Counter(o.kind for o in mine)),
            "met_by_a_fault": dict(
                Counter(o.kind for o in touched if _is_met(o, disturbances))
            ),
            "tokens": sum(o.num_tokens for o in mine),
            "undisturbed": _latencies(calm),
            "while_others_are_disturbed": _latencies(others),
            "disturbed": _latencies(touched),
        }
    return figures


def _overlaps(disturbance: Disturbance, outcome: Outcome) -> bool:
    return outcome.start_s < disturbance.end_s and outcome.end_s > disturbance.start_s


def _latencies(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    right = [o for o in outcomes if o.kind == RIGHT]
    return {
        "count": len(outcomes),
        "right": len(right),
        "latency_s": _spread([o.end_s - o.start_s for o in right]),
        "first_token_s": _spread([o.first_token_s for o in right]),
        "longest_gap_s": _spread([o.longest_gap_s for o in right]),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 3),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 3),
        "max": round(ordered[-1], 3),
    }

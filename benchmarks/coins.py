"""Synthetic drafts whose acceptance is drawn, and decided on the device as a network's is.

The model's own token in place of a draft becomes the draft with a set probability, and another
token otherwise. In a tree at most one child of a row is right, each rank with a probability of
its own. The engine then verifies drafts as it always does, and plans its steps ahead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimaran.worker.engine.engine import Engine
from trimaran.worker.execution.input_batch import StepInputs
from trimaran.worker.scheduling.sequence_drafts import SequenceDrafts
from trimaran.worker.steps.staging import to_device
from trimaran.worker.steps.step_types import SchedulerOutput

_SPUN = 20_000_000
"""Cycles of the device that are timed."""


class SyntheticHeads:
    """Heads that take a set time for each token of the drafts of all sequences."""

    taps: tuple[int, ...] = ()
    state_size = 0

    def __init__(self, most: int, token_us: float, vocab_size: int, device: torch.device):
        self.num_heads = most
        self._token_us, self._vocab_size = token_us, vocab_size
        self._cycles = 0
        if device.type == "cuda":
            self._cycles = int(token_us / 1e6 * _cycles_of_a_second(device))

    def kv_cache_specs(self) -> list[Any]:
        """None: heads have no cache."""
        return []

    def propose(self, states_NX: Tensor, next_ids_N: Tensor, count: int) -> Tensor:
        """The ids behind the last ones in the vocabulary, int64 [N, count]."""
        if self._cycles:
            torch.cuda._sleep(self._cycles * count)
        else:
            end = time.perf_counter() + count * self._token_us / 1e6
            while time.perf_counter() < end:
                pass
        places = torch.arange(1, count + 1, device=next_ids_N.device)
        return (next_ids_N[:, None] + places) % self._vocab_size


def _cycles_of_a_second(device: torch.device) -> float:
    """Cycles that the device spins in a second."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(3):
        marks[0].record()
        torch.cuda._sleep(_SPUN)
        marks[1].record()
        torch.cuda.synchronize(device)
    return _SPUN / (marks[0].elapsed_time(marks[1]) / 1e3)


class CoinSampler:
    """Replaces the model's own tokens in place of drafts by these with a set probability, and
    by other tokens otherwise."""

    def __init__(self, engine: Engine, rates: Sequence[float]) -> None:
        """From now on the engine samples so. ``rates``: the probability of each rank of a
        likely token behind a verified one; drafts of a chain have the first."""
        self._end = engine.runner.end
        self._sampler, self._sample = self._end._sampler, self._end._sample
        self._rate, self._coins = rates[0], np.random.default_rng(1)
        self._tree = engine.scheduler.config.speculation.draft_tree
        if self._tree is not None:
            known = [*rates, *([0.0] * (1 + max(self._tree.ranks)))]
            own = np.array([known[rank] for rank in self._tree.ranks])
            self._parents = np.array(self._tree.parents)
            # Siblings share one coin, whose range each takes a part of, in order of nodes.
            is_former = self._parents[:, None] == self._parents
            self._ends = np.tril(is_former) @ own
            self._begins = self._ends - own
        self._end._sampler, self._end._sample = self, self._of_step
        # Drafts that were not verified teach nothing.
        SequenceDrafts.compare = _forget  # type: ignore[method-assign]

    def _of_step(
        self, hidden_ND: Tensor, inputs: StepInputs, decision: SchedulerOutput, kept: Any
    ) -> Any:
        self._step = inputs, decision
        return self._sample(hidden_ND, inputs, decision, kept)

    def takes_shards(self, batch: Any) -> bool:
        """As the engine's sampler."""
        return self._sampler.takes_shards(batch)

    def sample(self, logits_NV: Tensor, batch: Any, token_table_RL: Tensor) -> Any:
        """As the engine's sampler, but for rows in place of drafts."""
        output = self._sampler.sample(logits_NV, batch, token_table_RL)
        inputs, decision = self._step
        if decision.num_drafts and self._tree is not None:
            own_n, tokens_n = to_device(self._tossed_nodes(decision), logits_NV.device)
            drafts_n = inputs.token_ids.index_select(0, tokens_n).long()
            output.token_ids.index_copy_(0, own_n, drafts_n)
        elif decision.num_drafts:
            own_n, tokens_n, flips_n = to_device(self._tossed(decision), logits_NV.device)
            drafts_n = inputs.token_ids.index_select(0, tokens_n).long()
            output.token_ids.index_copy_(0, own_n, drafts_n ^ flips_n)
        return output

    def _tossed_nodes(self, decision: SchedulerOutput) -> Any:
        """int64 [2, n]: for each row behind which a child is right, the row's index and the
        child's token in the step. Behind other rows the model's own token remains, which random
        weights nearly never drafted."""
        tokens = np.cumsum(decision.num_scheduled_tokens) - 1
        owns, firsts, counts = decision.tree_runs.T.astype(np.int64)
        runs = np.repeat(np.arange(len(counts)), counts)
        nodes = np.arange(len(runs)) - (np.cumsum(counts) - counts)[runs]
        parents = self._parents[nodes]
        # A coin for the root and for each node of each run.
        coins = self._coins.random(len(runs) + len(counts))
        own = coins[(np.cumsum(counts + 1) - counts)[runs] + parents]
        is_right = (self._begins[nodes] <= own) & (own < self._ends[nodes])
        rows = np.where(parents < 0, owns[runs], firsts[runs] + parents)
        found = np.stack((rows, tokens[decision.sampled[firsts[runs] + nodes]]))
        return found[:, is_right].astype(np.int64)

    def _tossed(self, decision: SchedulerOutput) -> Any:
        """int64 [3, n]: for each draft the index of the row that samples in its place, its
        token in the step, and 1 if it shall be rejected."""
        sampled, end = decision.sampled, decision.num_decodes
        rows = decision.rows[sampled]
        first, last = np.searchsorted(sampled, (end - decision.num_drafts, end))
        owns = np.zeros(rows.max() + 1, dtype=np.int64)
        own = np.r_[:first, last : len(rows)]
        owns[rows[own]] = own
        drafts = np.arange(first, last)
        is_later = (drafts > first) & (rows[drafts - 1] == rows[drafts])
        places = np.where(is_later, drafts - 1, owns[rows[drafts]])
        tokens = (np.cumsum(decision.num_scheduled_tokens) - 1)[sampled[drafts]]
        flips = self._coins.random(len(drafts)) >= self._rate
        return np.stack((places, tokens, flips)).astype(np.int64)


def _forget(drafts: SequenceDrafts, _sequence: Any) -> None:
    drafts.unverified = drafts.unverified[:0]

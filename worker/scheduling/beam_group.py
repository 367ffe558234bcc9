"""The rows and KV blocks of one request's beams, from one selection to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from typing import Any

from trimaran.comm.messages.messages import FinishReason
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.kv_cache.manager import BlockCopy, KVCacheManager
from trimaran.worker.requests.request import RequestStatus, Sequence
from trimaran.worker.sampling.beam_search import BeamSearch, Candidates, Hypothesis
from trimaran.worker.scheduling.step_plan import Emission, ScheduledStep, StepPlan

_INTERVAL = 16
"""Tokens between two messages about beams to a client that does not stream."""


class BeamGroup:
    """A request's beams: each has a row, all have the same length, full blocks are shared.

    The scheduler queues the first beam alone. This leader computes the prompt like any other
    sequence. From then on all beams are scheduled together, and only after the host has
    selected among the candidates of their last step: the selection decides which beam goes on
    with which tokens. A hypothesis keeps the row and the blocks of its parent. A second
    hypothesis of the same parent takes the row of a beam that was dropped, shares the parent's
    full blocks and gets a copy of the partial block.
    """

    def __init__(self, leader: Sequence) -> None:
        self.leader = leader
        self.width = leader.request.sampling.beam_width
        self.beams = [leader]
        for position in range(1, self.width):
            ids = leader.request.prompt_ids[:]
            beam = Sequence(leader.request, position, ids, len(leader.blocks.tables))
            beam.beams = self
            self.beams.append(beam)
        self._max_blocks = 0
        """Blocks reserved for each beam; 0 without reservations."""
        self._num_shown = 0
        self.start_over()

    def start_over(self) -> None:
        """Forget all output: the same output is found again."""
        leader = self.leader
        del leader.token_ids[leader.num_prompt_tokens :]
        self.search = BeamSearch(
            leader.request.sampling, leader.max_len - leader.num_prompt_tokens
        )
        self.awaited_step = 0
        """The step whose result the next selection is made from."""
        self._live = [0]
        """By live hypothesis of the search, the number of its beam."""
        self._forks: dict[int, int] = {}
        """Beams that go on with the tokens of another beam, and the number of that beam."""
        self._is_entered = [True] + [False] * (self.width - 1)
        """By beam, whether a decision has sent its row."""

    # ---- rows and blocks -----------------------------------------------------------------

    def num_further_blocks(self, cache: KVCacheManager, num_blocks: int) -> int:
        """Blocks of all but the leader, if each has ``num_blocks``; the prompt's are shared."""
        leader = self.leader
        return num_further_blocks(
            leader.request.sampling, cache, leader.num_prompt_tokens, num_blocks
        )

    def reserve(self, cache: KVCacheManager, num_blocks: int) -> None:
        """Reserve ``num_blocks`` for each but the leader; the caller has checked."""
        self._max_blocks = num_blocks
        for beam in self.beams[1:]:
            self._reserve_own(beam, cache)

    def _reserve_own(self, beam: Sequence, cache: KVCacheManager) -> None:
        """Reserve for a beam without blocks those that it will not share with its parent."""
        num_shared = len(self.leader.token_ids) // cache.block_size
        if self._max_blocks:
            cache.reserve(beam.blocks, self._max_blocks - num_shared)

    def release(self, cache: KVCacheManager) -> None:
        """Free the blocks and the reservations of all but the leader."""
        self._max_blocks = 0
        for beam in self.beams[1:]:
            cache.release(beam.blocks)

    def enter_rows(self, free_rows: list[int]) -> None:
        """Take rows for all but the leader."""
        for beam in self.beams[1:]:
            beam.row = free_rows.pop()

    def leave_rows(self) -> list[int]:
        """Give back the rows of all but the leader."""
        rows = [beam.row for beam in self.beams[1:]]
        for beam in self.beams[1:]:
            beam.row = -1
        return rows

    # ---- selection -----------------------------------------------------------------------

    def advance(
        self, candidates: List[Candidates], cache: KVCacheManager, logits: List[Any] = ()
    ) -> None:
        """Select among the step's candidates, given for each live hypothesis in order.

        ``logits`` are those of each live hypothesis, if they are kept.
        """
        parents = [self._live[parent] for parent in self.search.advance(candidates, logits)]
        if self.search.is_over:
            return
        # The leader takes the slow path from now on: its capacity stands for no blocks.
        self.leader.capacity = 0
        unused = [number for number in range(self.width) if number not in parents]
        for number in unused:
            self._vacate(number, cache)
        live: list[int] = []
        for parent in parents:
            if parent in live:
                child = unused.pop(0)
                self._forks[child] = parent
                live.append(child)
            else:
                live.append(parent)
        self._live = live
        first = self.leader.num_prompt_tokens
        for number, hypothesis in zip(live, self.search.live, strict=True):
            ids = self.beams[number].token_ids
            if number in self._forks:
                ids[first:] = hypothesis.token_ids
            else:
                ids.append(hypothesis.token_ids[-1])
        if 0 not in live:
            # The scheduler takes the length of all beams from the leader.
            self.leader.token_ids[first:] = self.search.live[0].token_ids

    def _vacate(self, number: int, cache: KVCacheManager) -> None:
        beam = self.beams[number]
        cache.release(beam.blocks)
        self._reserve_own(beam, cache)

    # ---- planning ------------------------------------------------------------------------

    def num_needed(self, cache: KVCacheManager) -> int:
        """Unreserved blocks that the next step takes."""
        if self._max_blocks:
            return 0
        num_known = len(self.leader.token_ids)
        num_blocks = cache.blocks_for(num_known)
        num_full = (num_known - 1) // cache.block_size
        return sum(
            num_blocks
            - (num_full if number in self._forks else self.beams[number].blocks.num_blocks)
            for number in self._live
        )

    def plan_all(
        self,
        plan: StepPlan,
        cache: KVCacheManager,
        preempt_last: Callable[[StepPlan], Sequence],
    ) -> None:
        """Schedule a token of every beam, all or none, and preempt others for their blocks."""
        leader = self.leader
        if plan.budget < self.width:
            return
        while self.num_needed(cache) > cache.num_available:
            if preempt_last(plan) is leader:
                return
        self.plan(plan, cache)
        leader.num_computed_before = leader.num_computed_tokens
        leader.num_computed_tokens += 1
        leader.last_step = plan.step

    def plan(self, plan: StepPlan, cache: KVCacheManager) -> None:
        """Schedule one token of each live beam; there is room."""
        num_computed = len(self.leader.token_ids) - 1
        copies: list[BlockCopy] = []
        for child, parent in self._forks.items():
            copies += self._fork(child, parent, num_computed, cache)
        for number in self._live:
            beam = self.beams[number]
            first_new = beam.blocks.num_blocks
            has_room = cache.grow(beam.blocks, num_computed + 1)
            assert has_room, "a beam was planned without room for its next token"
            if not self._is_entered[number]:
                self._is_entered[number] = True
                plan.add_row(beam, [])
            elif number in self._forks:
                plan.add_tokens(beam, beam.num_prompt_tokens)
                plan.add_blocks(beam.row, beam.blocks, 0)
            else:
                plan.add_tokens(beam, num_computed)
                plan.add_blocks(beam.row, beam.blocks, first_new)
            plan.add_decode(beam, num_computed)
        plan.add_copies(copies)
        plan.num_further_beams += len(self._live) - 1
        self._forks = {}
        self.awaited_step = plan.step

    def _fork(
        self, child: int, parent: int, num_tokens: int, cache: KVCacheManager
    ) -> list[BlockCopy]:
        blocks, source = self.beams[child].blocks, self.beams[parent].blocks
        # The reservation of a beam without blocks.
        cache.release(blocks)
        # Blocks that the window has left need no reservation.
        max_blocks = max(0, self._max_blocks - source.num_skipped)
        return cache.fork(blocks, source, num_tokens, max_blocks)

    # ---- output --------------------------------------------------------------------------

    def payload(self) -> dict[str, Any]:
        """The best outputs so far, best first, for a message's extras."""
        best = self.search.best()
        payload: dict[str, Any] = {
            "ids": [hypothesis.token_ids.tobytes() for hypothesis in best],
            "cum_log_probs": [hypothesis.cum_log_prob for hypothesis in best],
            "scores": [hypothesis.score for hypothesis in best],
            "reasons": [int(self._reason(hypothesis)) for hypothesis in best],
        }
        if self.leader.request.sampling.return_log_probs:
            payload["log_probs"] = [hypothesis.log_probs.tolist() for hypothesis in best]
        return payload

    def logits(self) -> list[list[Any]]:
        """By output as in `payload`, the logits of its ids: of the last id for a client that
        streams; of all ids, once the search is over, for others."""
        if not self.leader.request.sampling.return_generation_logits:
            return []
        if self.leader.request.is_streaming:
            return [hypothesis.notes()[-1:] for hypothesis in self.search.best()]
        if not self.search.is_over:
            return []
        return [hypothesis.notes() for hypothesis in self.search.best()]

    def _reason(self, hypothesis: Hypothesis) -> FinishReason:
        # A live hypothesis ends as its request does.
        return hypothesis.reason or self.leader.finish_reason

    @property
    def finish_reason(self) -> FinishReason:
        """The best output's reason, once all outputs have ended."""
        best = self.search.best()
        return best[0].reason if self.search.is_over else FinishReason.NOT_FINISHED

    def forget(self) -> None:
        """Drop all outputs and their logits, which were sent.

        A group and its beams refer to each other, so their memory would stay until the garbage
        collector runs. The collector runs seldom, and logits of every id take hundreds of
        megabytes.
        """
        self.search.live, self.search.finished = [], []

    def has_changed(self) -> bool:
        """Whether to send the outputs now. A client that does not stream gets them now and then
        as well, in case its request is cancelled."""
        interval = 1 if self.leader.request.is_streaming else _INTERVAL
        if self._num_shown and self.search.num_tokens < self._num_shown + interval:
            return False
        self._num_shown = self.search.num_tokens
        return True


def num_further_blocks(
    sampling: SamplingParams, cache: KVCacheManager, num_prompt_tokens: int, num_blocks: int
) -> int:
    """Blocks of all beams but one, each of ``num_blocks`` of which the prompt's are shared."""
    num_shared = num_prompt_tokens // cache.block_size
    return (sampling.beam_width - 1) * max(0, num_blocks - num_shared)


def num_next_tokens(sequences: Iterable[Sequence]) -> int:
    """Tokens of a step in which each sequence, and each beam, computes one."""
    return sum(1 if each.beams is None else each.beams.width for each in sequences)


def advance_groups(
    step: ScheduledStep,
    candidates: Iterable[Candidates],
    cache: KVCacheManager,
    finish: Callable[[Sequence, FinishReason], None],
) -> list[Emission]:
    """Let every group of a step select, and finish those that are over. Returns the leaders of
    the groups whose outputs are to be sent.

    ``candidates`` are those of the sampled beams, in the order of the step.
    """
    found: dict[BeamGroup, list[Candidates]] = {}
    logits: dict[BeamGroup, list[Any]] = {}
    kept = {} if step.logits is None else step.logits.generation
    indices = [index for index, sequence in enumerate(step.sampled) if sequence.beams]
    for index, each in zip(indices, candidates, strict=True):
        group = step.sampled[index].beams
        assert isinstance(group, BeamGroup)
        found.setdefault(group, []).append(each)
        if index in kept:
            logits.setdefault(group, []).append(kept[index])
    emitted: list[Emission] = []
    for group, each_beam in found.items():
        is_ended = group.leader.status is RequestStatus.FINISHED
        # A group that was preempted meanwhile has started over.
        if is_ended or group.awaited_step != step.decision.step:
            continue
        group.advance(each_beam, cache, logits.get(group, ()))
        if group.search.is_over:
            finish(group.leader, group.finish_reason)
        elif not group.has_changed():
            continue
        emitted.append((group.leader, -1, group.finish_reason))
    return emitted

"""Beam search of one request: live and finished hypotheses, and the end of the search."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from operator import attrgetter, itemgetter
from typing import Any

from trimaran.comm.messages.messages import FinishReason
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.word_automaton import WordAutomaton, WordState

Candidates = tuple[Sequence[int], Sequence[float]]
"""The likeliest next ids of one hypothesis, likeliest first, and their log-probabilities."""

STOP_WHEN_FULL = 1
STOP_BY_BEST = 0
"""Values of ``early_stopping``; with others the search goes on while a live hypothesis could
still win."""

Trail = tuple["Trail", Any] | None
"""The note on a hypothesis's last id, and the trail of its parent."""

_SCORE = attrgetter("score")


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One output: its token ids and its log probability."""

    token_ids: array[int]
    """The output's token ids, without the end id."""

    log_probs: array[float]
    """One log probability per id."""

    cum_log_prob: float
    """The output's log probability, an end id included."""

    score: float
    """The rank's key: ``cum_log_prob`` divided by the length to the power of the length
    penalty."""

    stop_state: WordState[int]
    """How much of stop words the ids end with."""

    reason: FinishReason = FinishReason.NOT_FINISHED
    trail: Trail = None
    """The logits that its ids were chosen from, if they are kept."""

    def notes(self) -> list[Any]:
        """The notes of its trail, one per id."""
        found, trail = [], self.trail
        while trail is not None:
            trail, note = trail
            found.append(note)
        return found[::-1]


def num_candidates(params: SamplingParams) -> int:
    """Next ids of each hypothesis that `BeamSearch` needs.

    Some of them may end the hypothesis, and a beam width of them must remain.
    """
    ends = {word[-1] for word in params.stop_words if word} | {params.end_id, *params.end_ids}
    return params.beam_width + len(ends)


class BeamSearch:
    """The hypotheses of one request: live ones, all of equal length, and finished ones.

    The rules are those of transformers. The likeliest continuations over all hypotheses are
    ranked. A continuation that ends and ranks within the beam width competes with the finished
    hypotheses; the best other continuations live on. A token costs
    O(width + continuations that end), and a copy of the outputs.
    """

    def __init__(self, params: SamplingParams, max_tokens: int) -> None:
        self._params = params
        self._words = WordAutomaton(params.stop_words)
        self._max_tokens = max_tokens
        self.num_tokens = 0
        """Output tokens of every live hypothesis."""
        self.live = [Hypothesis(array("i"), array("f"), 0.0, 0.0, self._words.start)]
        """Live hypotheses, best first; at most beam width."""
        self.finished: list[Hypothesis] = []
        """Finished hypotheses, likewise."""
        self.is_over = False

    def advance(self, candidates: Sequence[Candidates], notes: Sequence[Any] = ()) -> list[int]:
        """Extend the live hypotheses by their candidates.

        ``notes``, one for each live hypothesis, are added to the trails of its children.

        Returns, for each new hypothesis, the index of its parent among the former ones.
        """
        width, before = self._params.beam_width, self.live
        ranked = self._rank(candidates)
        self.num_tokens += 1
        divisor = self._divisor(self.num_tokens)
        live: list[Hypothesis] = []
        ended: list[Hypothesis] = []
        parents: list[int] = []
        rank = -1
        for rank, (_, parent, token_id, log_prob) in enumerate(ranked):
            if rank >= width and len(live) >= width:
                break
            old = before[parent]
            state = self._words.next(old.stop_state, token_id)
            reason = self._reason(state, token_id)
            is_ended = reason is not FinishReason.NOT_FINISHED
            if rank >= width if is_ended else len(live) >= width:
                continue
            ids = array("i", old.token_ids)
            ids.append(token_id)
            total = old.cum_log_prob + log_prob
            log_probs = array("f", old.log_probs)
            log_probs.append(log_prob)
            trail: Trail = (old.trail, notes[parent]) if notes else None
            if reason is FinishReason.END_ID:
                ids.pop()
                log_probs.pop()
                trail = old.trail
            new = Hypothesis(ids, log_probs, total, total / divisor, state, reason, trail)
            if is_ended:
                ended.append(new)
                continue
            live.append(new)
            parents.append(parent)
        if rank < 0:
            # All candidates are masked: no hypothesis can be extended.
            ended = [replace(old, reason=FinishReason.END_ID) for old in before]
        self.live = live
        self.finished = sorted([*self.finished, *ended], key=_SCORE, reverse=True)[:width]
        self.is_over = not live or self._is_settled()
        return parents

    def best(self) -> list[Hypothesis]:
        """The best hypotheses so far, best first: finished ones, and live ones during the
        search."""
        found = self.finished if self.is_over else [*self.finished, *self.live]
        best = sorted(found, key=_SCORE, reverse=True)[: self._params.beam_width]
        return best[: self._params.num_return_sequences]

    def _rank(
        self, candidates: Sequence[Candidates]
    ) -> Iterator[tuple[float, int, int, float]]:
        """The continuations, likeliest first: (rank's key, parent, id, log-probability)."""
        streams = [self._continuations(rank, *each) for rank, each in enumerate(candidates)]
        assert len(streams) == len(self.live)
        return merge(*streams, key=itemgetter(0), reverse=True)

    def _continuations(
        self, rank: int, ids: Sequence[int], log_probs: Sequence[float]
    ) -> Iterator[tuple[float, int, int, float]]:
        """Those of one hypothesis, likeliest first, as far as they are possible."""
        parent = self.live[rank]
        rate = self._params.beam_search_diversity_rate
        for token_id, log_prob in zip(ids, log_probs, strict=True):
            # Neither is NaN, where every id is masked.
            if not log_prob > -math.inf:
                return
            yield parent.cum_log_prob + log_prob + rate * rank, rank, token_id, log_prob

    def _reason(self, state: WordState[int], token_id: int) -> FinishReason:
        if token_id == self._params.end_id or token_id in self._params.end_ids:
            return FinishReason.END_ID
        if state.ends_word:
            return FinishReason.STOP_WORDS
        if self.num_tokens >= self._max_tokens:
            return FinishReason.LENGTH
        return FinishReason.NOT_FINISHED

    def _divisor(self, num_tokens: int) -> float:
        return float(num_tokens**self._params.length_penalty)

    def _is_settled(self) -> bool:
        """Whether no live hypothesis can, or needs to, beat the finished ones."""
        params = self._params
        if len(self.finished) < params.beam_width:
            return False
        if params.early_stopping == STOP_WHEN_FULL:
            return True
        length = self.num_tokens
        if params.early_stopping != STOP_BY_BEST and params.length_penalty > 0:
            length = self._max_tokens
        return self.live[0].cum_log_prob / self._divisor(length) <= self.finished[-1].score

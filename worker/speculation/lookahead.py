"""Lookahead: drafts from n-grams that the model itself makes beside its output."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence as List

from trimaran.worker.config.speculation_config import LookaheadSizes
from trimaran.worker.requests.request import Sequence
from trimaran.worker.speculation.drafters import IndexRoom

_STRIDE = 7919
"""A prime number: guesses of the first window come from many positions of a prompt."""


class LookaheadDrafter:
    """Drafts from n-grams of a pool, and a window of guesses where the pool has none.

    Each verified draft is an iteration of a Jacobi window: the model's own ids in the rows
    behind a wrong draft are the guesses of the next iteration. A diagonal through the last
    ``ngram`` iterations is an n-gram, which enters the pool beside the n-grams of prompt and
    output (Fu et al., Break the Sequential Dependency of LLM Inference Using Lookahead
    Decoding, 2024).

    In the paper a step computes the window and up to ``verification_set`` n-grams as branches,
    which need a mask for trees. Here a step has one chain a sequence. The chain is an n-gram of
    the pool that begins with the last id, or else the window. Where several n-grams match, the
    chain takes the most frequent id at each position, and the latest among equal counts.
    """

    is_asked = False
    is_spent = False

    def __init__(self, sizes: LookaheadSizes, room: IndexRoom) -> None:
        """``room`` is filled up with each step; drafters of one engine share it."""
        self.is_guess = False
        """Whether the last proposal was guesses of the window, and not an n-gram."""
        self._sizes = sizes
        self._room = room
        self._pool: dict[int, dict[tuple[int, ...], int]] = {}
        """By first id, how often each n-gram was seen, by its further ids, the latest last."""
        self._num_entered = 0
        """Ids of prompt and output before the next n-gram to enter."""
        self._iterations: deque[dict[int, int]] = deque(maxlen=sizes.ngram)
        """The model's own ids by position, of the latest iterations."""
        self._guesses: dict[int, int] = {}
        """The window of the next iteration: ids by position."""

    def propose(self, sequence: Sequence, most: int) -> array[int]:
        """The further ids of an n-gram that begins with the last id, or else the window."""
        ids = sequence.token_ids
        self._enter_text(ids)
        found = self._pool.get(ids[-1])
        self.is_guess = not found
        if found:
            return _agreed(found)[:most]
        end = len(ids) + min(most, self._sizes.window)
        # The first window holds ids of the text, as any ids would do.
        return array("i", [
            self._guesses.get(position, ids[position * _STRIDE % len(ids)])
            for position in range(len(ids), end)
        ])  # fmt: skip

    def observe(self, first: int, own: List[int], num_accepted: int) -> None:
        """Learn from a verified draft: the model's own ids from position ``first`` on, of
        which ``num_accepted`` equal the draft."""
        size = self._sizes.ngram
        self._iterations.append(dict(enumerate(own, first)))
        behind = range(num_accepted + 1, min(len(own), num_accepted + 1 + self._sizes.window))
        self._guesses = {first + position: own[position] for position in behind}
        if len(self._iterations) < size:
            return
        # The output itself enters as text.
        for end in range(first + num_accepted + 1, first + len(own)):
            start = end - size + 1
            found = [each.get(start + n) for n, each in enumerate(self._iterations)]
            if None not in found:
                self._add([each for each in found if each is not None])

    def _enter_text(self, ids: array[int]) -> None:
        """Enter n-grams of prompt and output, as many as a step has room for."""
        size = self._sizes.ngram
        end = min(len(ids) - size + 1, self._num_entered + self._room.left)
        for start in range(self._num_entered, end):
            self._add(ids[start : start + size])
        if end > self._num_entered:
            self._room.left -= end - self._num_entered
            self._num_entered = end

    def _add(self, ngram: List[int]) -> None:
        """Enter an n-gram as the latest one; the oldest one leaves a full set."""
        entries = self._pool.setdefault(ngram[0], {})
        further = tuple(ngram[1:])
        entries[further] = entries.pop(further, 0) + 1
        if len(entries) > self._sizes.verification_set:
            del entries[next(iter(entries))]


def _agreed(ngrams: dict[tuple[int, ...], int]) -> array[int]:
    """One chain: at each position the id that is most frequent behind the ids before."""
    chain = array("i")
    left = list(reversed(ngrams.items()))
    for position in range(len(left[0][0])):
        if len(left) == 1:
            chain.extend(left[0][0][position:])
            break
        counts: Counter[int] = Counter()
        for further, count in left:
            counts[further[position]] += count
        # The latest n-gram comes first among equal counts.
        best = max(counts, key=counts.__getitem__)
        chain.append(best)
        left = [each for each in left if each[0][position] == best]
    return chain

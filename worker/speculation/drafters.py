"""Drafters: where the draft tokens of a sequence come from."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as List
from typing import Protocol

import numpy as np

from trimaran.worker.requests.request import Request, Sequence

_MIN_MATCH = 2
"""Least number of equal last ids."""

_MAX_MATCH = 16
"""Ids that are compared at each earlier position."""

_MAX_PLACES = 8
"""Earlier positions that are compared, the latest first."""

MAX_NEW = 8192
"""Ids that enter indices in one step: long prompts take some steps, and delay no step much."""


class IndexRoom:
    """The ids that may still enter indices in a step, those of all sequences together."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_NEW


class Drafter(Protocol):
    """The source of one sequence's draft tokens."""

    is_asked: bool
    """Whether the client brought the drafts: they are verified without regard to the gain."""

    is_spent: bool
    """Whether no drafts will follow."""

    def propose(self, sequence: Sequence, most: int) -> array[int]:
        """At most ``most`` ids that may follow the ids on the host.

        The step in planning samples the first of them itself.
        """
        ...


class RequestDrafter:
    """The draft tokens of a request, at their positions in the output.

    Once an output id differs from its draft there are no further drafts.
    """

    is_asked = True

    def __init__(self, request: Request) -> None:
        self._ids = array("i", request.draft_token_ids)
        self._num_same = 0
        self.is_spent = False

    def propose(self, sequence: Sequence, most: int) -> array[int]:
        """The drafts behind the output, if the output agrees with the drafts so far."""
        first, count = sequence.num_prompt_tokens, sequence.num_output_tokens
        output = sequence.token_ids[first + self._num_same :]
        if self._ids[self._num_same : count] != output:
            self._ids = array("i")
        self._num_same = count
        self.is_spent = count + most >= len(self._ids)
        return self._ids[count : count + most]


class NetworkDrafter:
    """The tokens that a network in the ranks drafted after the last step."""

    is_asked = False
    is_spent = False

    def __init__(self) -> None:
        self._ids = array("i")
        self._place = 0

    def offer(self, sequence: Sequence, token_ids: List[int]) -> None:
        """Take in the ids that a network drafted behind the ids that are known now."""
        self._ids = array("i", token_ids)
        self._place = len(sequence.token_ids)

    def propose(self, sequence: Sequence, most: int) -> array[int]:
        """The network's ids, unless the sequence has gone on without them."""
        is_current = self._place == len(sequence.token_ids)
        return self._ids[:most] if is_current else array("i")


class NgramDrafter:
    """Prompt lookup: the ids that followed the longest match of a sequence's last ids.

    An index finds earlier positions of the last two ids in constant time. The longest match
    among the latest positions counts, as in LZ77. Prompt lookup decoding is by Saxena (2023).
    """

    is_asked = False
    is_spent = False

    def __init__(self, room: IndexRoom) -> None:
        """``room`` is filled up with each step; drafters of one engine share it."""
        self._room = room
        self._last: dict[int, int] = {}
        """By pair of ids, the number of ids up to its latest position."""
        self._earlier = array("i", [0] * _MIN_MATCH)
        """For each number of ids, the earlier position of the pair that ends there; 0 for
        none."""

    def propose(self, sequence: Sequence, most: int) -> array[int]:
        """The ids behind the best earlier position; none if there is no such position."""
        ids = sequence.token_ids
        if not self._index(ids):
            return array("i")
        best, longest = 0, 0
        position = self._earlier[len(ids)] if len(ids) >= _MIN_MATCH else 0
        for _ in range(_MAX_PLACES):
            if not position:
                break
            length = _match(ids, position)
            if length > longest:
                best, longest = position, length
            if length >= _MAX_MATCH:
                break
            position = self._earlier[position]
        return _repeated(ids, best, most) if best else array("i")

    def _index(self, ids: array[int]) -> bool:
        """Enter new ids into the index; False while there are more than one step may enter."""
        start = len(self._earlier)
        end = min(len(ids) + 1, start + self._room.left)
        self._room.left -= end - start
        if end - start > 1:
            wide = np.array(ids[start - 2 : end - 1], dtype=np.int64)
            pairs = (wide[:-1] << 32 | wide[1:]).tolist()
        else:
            pairs = [ids[n - 2] << 32 | ids[n - 1] for n in range(start, end)]
        for position, pair in enumerate(pairs, start):
            self._earlier.append(self._last.get(pair, 0))
            self._last[pair] = position
        return end > len(ids)


def _match(ids: array[int], position: int) -> int:
    """Equal ids before ``position`` and before the end, from the last one backwards."""
    end = len(ids)
    most = min(position, _MAX_MATCH)
    length = _MIN_MATCH
    while length < most and ids[position - 1 - length] == ids[end - 1 - length]:
        length += 1
    return length


def _repeated(ids: array[int], position: int, most: int) -> array[int]:
    """The ids from ``position`` on. If the end comes first, the ids from ``position`` to the
    end repeat."""
    found = ids[position : position + most]
    period = len(found)
    while 0 < len(found) < most:
        found.append(found[len(found) - period])
    return found

"""Bad words as arrays of as many numbers as the words have ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.worker.steps.staging import to_device

# Shapes: W words, B ids of all words before their last ids.

Words = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class BadWords:
    """The last id of each word, and the ids before it, from the end backwards.

    Sorted by length, so that the words of one block of a kernel are about as long.
    """

    last: npt.NDArray[np.int32]
    """[W]"""

    starts: npt.NDArray[np.int32]
    """[W + 1]: where the ids of each word begin in ``before``, and the end of the last."""

    before: npt.NDArray[np.int32]
    """[B]"""

    distance: npt.NDArray[np.int32] = field(init=False)
    """[B]: how far each id of ``before`` is from the end of a sequence that ends with it."""

    longest: int = field(init=False)
    """Ids of a sequence that decide about all words."""

    def __post_init__(self) -> None:
        lengths = np.diff(self.starts)
        distances = np.arange(len(self.before), dtype=np.int32)
        distances -= np.repeat(self.starts[:-1], lengths)
        object.__setattr__(self, "distance", distances)
        object.__setattr__(self, "longest", int(lengths.max(initial=0)))

    def forbidden(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The ids, some maybe twice, that would complete a word behind ``token_ids``.

        The cost is that of one pass over the words' ids.
        """
        positions = len(token_ids) - 1 - self.distance
        is_other = (token_ids[positions.clip(0)] != self.before) | (positions < 0)
        counts = np.concatenate([[0], np.cumsum(is_other)])
        found: npt.NDArray[np.int32] = self.last[
            counts[self.starts[1:]] == counts[self.starts[:-1]]
        ]
        return found


_packed: WeakValueDictionary[Words, BadWords] = WeakValueDictionary()


def pack_bad_words(words: Words) -> BadWords:
    """The arrays of these words; rows of equal words share them."""
    found = _packed.get(words)
    if found is None:
        found = _packed[words] = _pack(words)
    return found


def _pack(words: Words) -> BadWords:
    in_order = sorted(filter(None, words), key=len)
    lengths = np.fromiter(map(len, in_order), np.int64, len(in_order))
    ids = np.fromiter(chain.from_iterable(in_order), np.int32, int(lengths.sum()))
    ends = np.cumsum(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths - 1)]).astype(np.int32)
    # The ids of each word are stored backwards, from the id before the last id.
    backwards = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths - 1)
    before = ids[np.repeat(ends, lengths - 1) - 2 - backwards]
    return BadWords(ids[ends - 1], starts, before)


@dataclass(frozen=True, slots=True)
class DeviceBadWords:
    """The same in GPU memory, int32; see `triton_logits.forbid_bad_words`."""

    last: Tensor
    starts: Tensor
    before: Tensor

    @classmethod
    def of(cls, words: BadWords, device: torch.device) -> DeviceBadWords:
        """A copy of ``words``."""
        return cls(*(to_device(a, device) for a in (words.last, words.starts, words.before)))

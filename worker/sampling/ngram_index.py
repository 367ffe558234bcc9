"""The n-grams of a growing sequence, found in time that does not depend on its length."""

from __future__ import annotations

import secrets
from array import array

import numpy as np
import numpy.typing as npt

_MODULUS = (1 << 61) - 1
_BASE = 2 + secrets.randbelow(_MODULUS - 2)
_INVERSE = pow(_BASE, -1, _MODULUS)
"""The hash of ids is a polynomial of this base (Karp and Rabin, 1987). Ids with equal hashes
are compared, so that no result depends on the base. A client that knew the base could send
many n-grams with equal hashes."""


class _Context:
    """The n - 1 ids at one or more positions of a sequence, and the ids that follow there."""

    __slots__ = ("end", "following", "other")

    def __init__(self, end: int, other: _Context | None) -> None:
        self.end = end
        """Where the ids end for the first time."""
        self.following = array("i")
        """In the order of their first positions; none twice."""
        self.other: _Context | None = other
        """An earlier context with the same hash."""


class NgramIndex:
    """The ids that would complete an n-gram of one sequence a second time.

    A new id costs one step of a rolling hash, a look-up, and a comparison of n - 1 ids in one
    call. Memory is some 300 bytes for each id of the sequence.
    """

    def __init__(self, size: int) -> None:
        """``size`` is n, at least 1."""
        self._width = size - 1
        self._leaving = pow(_BASE, self._width, _MODULUS)
        self._ids = array("i")
        self._num_same = 0
        self._hash = 0
        self._contexts: dict[int, _Context] = {}
        self._first: dict[int, int] = {}
        """Where an id follows a context for the first time; see `_key`."""
        self._path: list[_Context] = []
        """The context that ends at each position from n - 1 on."""
        if self._width == 0:
            self._enter_context()

    def rewrite(self, start: int) -> None:
        """The sequence's ids from ``start`` on may have changed."""
        self._num_same = min(self._num_same, start)

    def forbidden(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The ids that would complete an n-gram of ``token_ids``, which are the whole sequence.

        Only ids that are new or may have changed are read.
        """
        start, known = self._num_same, min(len(self._ids), len(token_ids))
        if start < known:
            own = np.array(self._ids[start:known], np.int32)
            is_other = own != token_ids[start:known]
            known = start + int(is_other.argmax()) if is_other.any() else known
        while len(self._ids) > known:
            self._remove_last()
        for token_id in token_ids[known:].tolist():
            self._append(token_id)
        self._num_same = len(token_ids)
        following = self._path[-1].following if self._path else ()
        return np.array(following, np.int32)

    def _append(self, token_id: int) -> None:
        position = len(self._ids)
        if self._path:
            context = self._path[-1]
            if self._first.setdefault(_key(context, token_id), position) == position:
                context.following.append(token_id)
        self._ids.append(token_id)
        self._hash = (self._hash * _BASE + token_id + 1) % _MODULUS
        if position >= self._width:
            leaving = self._ids[position - self._width] + 1
            self._hash = (self._hash - leaving * self._leaving) % _MODULUS
        if position + 1 >= self._width:
            self._enter_context()

    def _enter_context(self) -> None:
        """Find the context that ends the sequence, or add a new one."""
        end, width = len(self._ids), self._width
        newest = found = self._contexts.get(self._hash)
        while found is not None:
            if self._ids[found.end - width : found.end] == self._ids[end - width :]:
                break
            found = found.other
        if found is None:
            found = self._contexts[self._hash] = _Context(end, newest)
        self._path.append(found)

    def _remove_last(self) -> None:
        """Undo `_append` of the last id."""
        position = len(self._ids) - 1
        token_id = self._ids[position]
        if position + 1 >= self._width:
            self._leave_context()
        if position >= self._width:
            leaving = self._ids[position - self._width] + 1
            self._hash += leaving * self._leaving
        self._hash = (self._hash - token_id - 1) * _INVERSE % _MODULUS
        self._ids.pop()
        if self._path:
            context = self._path[-1]
            if self._first[_key(context, token_id)] == position:
                del self._first[_key(context, token_id)]
                context.following.pop()

    def _leave_context(self) -> None:
        """Undo `_enter_context`."""
        context = self._path.pop()
        if context.end < len(self._ids):
            return
        # The newest context of its hash: newer ones were removed before.
        if context.other is None:
            del self._contexts[self._hash]
        else:
            self._contexts[self._hash] = context.other


def _key(context: _Context, token_id: int) -> int:
    return context.end << 32 | token_id

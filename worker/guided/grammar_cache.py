"""The grammars that were compiled last."""

from __future__ import annotations

from collections import OrderedDict

from trimaran.worker.guided.guide import Grammar


class GrammarCache:
    """Remembers grammars by type and text of their guides, the last used, up to a size."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._grammars: OrderedDict[tuple[str, str], Grammar] = OrderedDict()

    def get(self, guide: tuple[str, str]) -> Grammar | None:
        """The grammar of a guide, unless it was never there or forgotten."""
        if guide not in self._grammars:
            return None
        self._grammars.move_to_end(guide)
        return self._grammars[guide]

    def add(self, guide: tuple[str, str], grammar: Grammar) -> None:
        """Remember a guide that is not there, and forget others for it."""
        self._grammars[guide] = grammar
        self._num_bytes += _size(guide, grammar)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(*self._grammars.popitem(last=False))


def _size(guide: tuple[str, str], grammar: Grammar) -> int:
    return len(guide[1]) + grammar.num_bytes

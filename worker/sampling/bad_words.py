"""A request's bad words as one table, which is compared with the ends of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def bad_words_table(words: Sequence[tuple[int, ...]]) -> npt.NDArray[np.int32]:
    """[W, H]: each word's last id, then those before it, -1 in front of shorter ones."""
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for word in words:
        if word:
            by_length.setdefault(len(word), []).append(word)
    tables = []
    for length, some in by_length.items():
        table = np.full((len(some), max(by_length)), -1, dtype=np.int32)
        ids = np.array(some, dtype=np.int32)
        table[:, 0] = ids[:, -1]
        if length > 1:
            table[:, 1 - length :] = ids[:, :-1]
        tables.append(table)
    return np.concatenate(tables)

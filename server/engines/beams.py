"""What an engine says of a request's beams: whole outputs, best first, each time anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trimaran.comm.messages.messages import FinishReason, unpack_ids

PADDING = -1
"""Behind what is shorter than the longest beam."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beams:
    """The best outputs so far. A later one of the same request replaces it."""

    token_ids: list[list[int]]
    cum_log_probs: list[float]
    """Sums over each output, its end included."""

    scores: list[float]
    """The same by the length to the length penalty: what beams are ranked by."""

    reasons: list[FinishReason]
    """NOT_FINISHED of a beam that still grows."""

    log_probs: list[list[float]]
    """One an id; empty if they were not asked for."""

    num_logits: list[int]
    """How many of the logits beside this are each output's."""

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Beams:
        """From the ``beams`` of a message's extras."""
        return cls(
            token_ids=[unpack_ids(raw).tolist() for raw in wire["ids"]],
            cum_log_probs=wire["cum_log_probs"],
            scores=wire["scores"],
            reasons=[FinishReason(reason) for reason in wire["reasons"]],
            log_probs=wire.get("log_probs", [[] for _ in wire["ids"]]),
            num_logits=wire.get("num_logits", [0] * len(wire["ids"])),
        )

    @property
    def num_tokens(self) -> int:
        """Of all beams together."""
        return sum(map(len, self.token_ids))


def padded(rows: Sequence[Sequence[float]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """[1, rows, longest]: rows of different lengths, padded."""
    table = np.full((1, len(rows), max(map(len, rows), default=0)), PADDING, dtype=dtype)
    for place, row in enumerate(rows):
        table[0, place, : len(row)] = row
    return table


def logits_by_beam(counts: Sequence[int], logits_NV: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[beams, most of ``counts``, V] of logits beam by beam; zeros behind shorter ones."""
    table = np.zeros((len(counts), max(counts), logits_NV.shape[1]), dtype=logits_NV.dtype)
    start = 0
    for place, count in enumerate(counts):
        table[place, :count] = logits_NV[start : start + count]
        start += count
    return table


def longest(wire: Mapping[str, Any]) -> int:
    """Tokens of the longest beam of a message's extras."""
    return max((len(raw) // 4 for raw in wire["ids"]), default=0)

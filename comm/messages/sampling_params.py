"""The sampling parameters of a request: every field of the served interfaces."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

MIN_TEMPERATURE = 1e-5
"""A smaller temperature, other than 0, would leave only the largest logit in float32."""


MAX_END_IDS = 16
"""Most ids of `SamplingParams.end_ids`: a GPU's kernels have room for so many in each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling. A field at its default has no effect.

    Greedy when ``top_k``, ``top_p`` and ``min_p`` are all unset (0), or ``top_k`` is 1, or
    ``temperature`` is 0. Top-k filters first, then top-p over the rest.
    """

    max_tokens: int = 16
    """Most new tokens of a sequence, at least 1."""

    end_id: int = -1
    """Generation ends after this id; -1 means never."""

    end_ids: tuple[int, ...] = ()
    """Further ids after which generation ends."""

    pad_id: int = -1
    """Id that pads ``output_ids``; -1 means ``end_id``."""

    temperature: float = 1.0
    """Divides the logits; 0 means greedy."""

    top_k: int = 0
    """Keep the k likeliest ids; 0 keeps all."""

    top_p: float = 0.0
    """Keep the smallest set of ids with this mass, in (0, 1]; 0 means unset."""

    seed: int = 0
    """Key of the sampling noise, uint64."""

    stop_words: tuple[tuple[int, ...], ...] = ()
    """Generation ends when the output ends with one of these id sequences."""

    min_tokens: int = 1
    """The ids that end generation are masked until this many new tokens exist."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_p: float = 0.0
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_ids: int = -1
    no_repeat_ngram_size: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    embedding_bias: bytes = b""
    """float32 little-endian, one value a vocabulary id."""

    num_return_sequences: int = 1
    beam_width: int = 1
    length_penalty: float = 0.0
    early_stopping: int = 1
    beam_search_diversity_rate: float = 0.0
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    logits_dtype: str = "float32"
    """Dtype of returned logits: float32 or float16."""

    return_perf_metrics: bool = False
    guide_type: str = ""
    guide: str = ""

    @property
    def is_greedy(self) -> bool:
        """Whether the id of highest logit is always taken."""
        has_filter = self.top_k > 0 or self.top_p > 0 or self.min_p > 0
        return self.temperature == 0 or self.top_k == 1 or not has_filter

    def changed_fields(self) -> dict[str, Any]:
        """The fields that differ from their defaults, by name."""
        return {
            name: value
            for (name, default), value in zip(_DEFAULTS, _VALUES(self), strict=True)
            if value != default
        }

    def to_wire(self) -> dict[str, Any]:
        """The fields that differ from their defaults, for msgpack."""
        return self.changed_fields()

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> SamplingParams:
        """The inverse of `to_wire`; msgpack turned tuples into lists."""
        values = dict(wire)
        for name in ("stop_words", "bad_words"):
            # A tuple has not been on the wire yet.
            if isinstance(values.get(name), list):
                values[name] = tuple(tuple(word) for word in values[name])
        if "end_ids" in values:
            values["end_ids"] = tuple(values["end_ids"])
        return cls(**values)


_DEFAULTS = tuple((f.name, f.default) for f in fields(SamplingParams))
_VALUES = attrgetter(*(name for name, _ in _DEFAULTS))

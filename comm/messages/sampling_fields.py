"""The table of sampling fields: wire names, ranges and the code that serves each field.

The server reads its inputs by the table, both the server and rank 0 refuse values by it, and
docs/decoding.md is compared with it. Types and defaults are those that `SamplingParams`
declares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.sampling_params import MAX_END_IDS, SamplingParams

_PROCESSORS = "worker/sampling/logits_processors.py"
_DRAW = "worker/sampling/draw.py"
_LOGITS = "worker/execution/stage_ends.py"
_REQUEST = "worker/requests/request.py"
_BEAMS = "worker/sampling/beam_search.py"
_LOGITS_DTYPES = ("float32", "float16")
_DECLARED = {declared.name: declared for declared in fields(SamplingParams)}


class Range(NamedTuple):
    """One condition on a value."""

    is_valid: Callable[[Any, int], bool]
    """The condition, given the value and the vocabulary size."""

    allowed: str
    """As refusals say it; ``{vocab_size}`` stands for the vocabulary size."""


@dataclass(frozen=True, slots=True)
class SamplingField:
    """One row of the table."""

    name: str
    """The field of `SamplingParams`."""

    inputs: tuple[str, ...]
    """Inputs of the token model that set the field, the first name first; empty if none."""

    served_by: str | None
    """File and name of the code that serves it; None: requests that set the field are refused.
    Empty: accepted without effect."""

    ranges: tuple[Range, ...] = ()
    """Checked in this order; empty: every value of the type is valid."""

    contents: str = ""
    """What a list of values may hold, which the input processor of rank 0 checks."""

    type_name: str = field(init=False)
    """The type that `SamplingParams` declares, as text."""

    default: Any = field(init=False)
    """The value of a request that does not set the field."""

    def __post_init__(self) -> None:
        declared = _DECLARED[self.name]
        object.__setattr__(self, "type_name", str(declared.type))
        object.__setattr__(self, "default", declared.default)

    def check(self, value: Any, vocab_size: int) -> None:
        """Check one value of this field.

        Raises:
            RequestError: names the field, its value and the allowed range.
        """
        # True is an int for isinstance, and 2.0 equals one.
        if self.type_name == "int" and type(value) is not int:
            raise self._refusal(value, "a whole number")
        for is_valid, allowed in self.ranges:
            if not is_valid(value, vocab_size):
                raise self._refusal(value, allowed.format(vocab_size=vocab_size))

    def _refusal(self, value: Any, allowed: str) -> RequestError:
        is_renamed = bool(self.inputs) and self.inputs[0] != self.name
        also = f" (also called {self.inputs[0]})" if is_renamed else ""
        return RequestError(f"'{self.name}' is {value!r} but must be {allowed}{also}")


def _at_least(least: int, text: str) -> Range:
    return Range(lambda value, _: value >= least, text)


def _is_id(value: Any, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size


_INT64 = Range(lambda value, _: value < 1 << 63, "below 2**63")
_SHARE = Range(lambda value, _: 0 <= value <= 1, "between 0 and 1")
_POSITIVE_SHARE = Range(lambda value, _: 0 < value <= 1, "above 0 and at most 1")
_FINITE = Range(lambda value, _: math.isfinite(value), "a finite number")

_ROWS = (
    SamplingField(
        "max_tokens",
        ("request_output_len",),
        f"{_REQUEST}: Sequence",
        (_at_least(1, "at least 1"),),
    ),
    SamplingField(
        "end_id",
        ("end_id",),
        f"{_REQUEST}: Sequence",
        (
            _at_least(-1, "-1 or an id of the {vocab_size} of the vocabulary"),
            Range(
                lambda v, vocab_size: v < vocab_size, "below the vocabulary size {vocab_size}"
            ),
        ),
    ),
    SamplingField(
        "end_ids",
        (),
        f"{_REQUEST}: Sequence",
        (
            Range(
                lambda value, vocab_size: (
                    len(value) <= MAX_END_IDS
                    and all(_is_id(each, vocab_size) for each in value)
                ),
                f"at most {MAX_END_IDS} ids below the vocabulary size {{vocab_size}}",
            ),
        ),
    ),
    SamplingField("pad_id", ("pad_id",), ""),
    SamplingField(
        "temperature",
        ("temperature",),
        f"{_DRAW}: draw",
        (Range(lambda value, _: 0 <= value < math.inf, "a finite number >= 0"),),
    ),
    SamplingField(
        "top_k", ("runtime_top_k",), f"{_DRAW}: draw", (_at_least(0, "0 (all) or more"), _INT64)
    ),
    SamplingField("top_p", ("runtime_top_p",), f"{_DRAW}: draw", (_SHARE,)),
    SamplingField(
        "seed",
        ("random_seed", "seed"),
        "worker/sampling/noise.py: noise_keys",
        (Range(lambda value, _: 0 <= value < 1 << 64, "an unsigned 64-bit number"),),
    ),
    SamplingField(
        "stop_words",
        ("stop_words_list",),
        f"{_REQUEST}: Sequence",
        contents="32-bit ids",
    ),
    SamplingField(
        "min_tokens",
        ("min_length", "min_tokens"),
        f"{_PROCESSORS}: forbid_early_end",
        (_at_least(0, "0 or more"), _INT64),
    ),
    SamplingField(
        "repetition_penalty",
        ("repetition_penalty",),
        f"{_PROCESSORS}: apply_penalties",
        (Range(lambda value, _: 0 < value < math.inf, "above 0, and finite"),),
    ),
    SamplingField(
        "presence_penalty",
        ("presence_penalty",),
        f"{_PROCESSORS}: apply_penalties",
        (_FINITE,),
    ),
    SamplingField(
        "frequency_penalty",
        ("frequency_penalty",),
        f"{_PROCESSORS}: apply_penalties",
        (_FINITE,),
    ),
    SamplingField("min_p", ("runtime_min_p",), f"{_DRAW}: draw", (_SHARE,)),
    SamplingField(
        "top_p_decay", ("runtime_top_p_decay",), f"{_DRAW}: decay_steps", (_POSITIVE_SHARE,)
    ),
    SamplingField("top_p_min", ("runtime_top_p_min",), f"{_DRAW}: draw", (_POSITIVE_SHARE,)),
    SamplingField(
        "top_p_reset_ids",
        ("runtime_top_p_reset_ids",),
        f"{_DRAW}: with_resets",
        (
            Range(
                lambda value, vocab_size: -1 <= value < vocab_size,
                "-1 or below the vocabulary size {vocab_size}",
            ),
        ),
    ),
    SamplingField(
        "no_repeat_ngram_size",
        ("no_repeat_ngram_size",),
        f"{_PROCESSORS}: forbid_repeated_ngrams",
        (_at_least(0, "0 (off) or more"), _INT64),
    ),
    SamplingField(
        "bad_words",
        ("bad_words_list",),
        f"{_PROCESSORS}: forbid_bad_words",
        contents="ids of the vocabulary",
    ),
    SamplingField(
        "embedding_bias",
        ("embedding_bias",),
        f"{_PROCESSORS}: add_bias",
        contents="float32, one finite value or -inf for each id, not -inf for all",
    ),
    SamplingField(
        "num_return_sequences",
        ("num_return_sequences",),
        f"{_REQUEST}: Request",
        (_at_least(1, "at least 1"),),
    ),
    SamplingField(
        "beam_width", ("beam_width",), f"{_BEAMS}: BeamSearch", (_at_least(1, "at least 1"),)
    ),
    SamplingField(
        "length_penalty",
        ("len_penalty",),
        f"{_BEAMS}: BeamSearch",
        (Range(lambda value, _: abs(value) <= 10, "between -10 and 10"),),
    ),
    SamplingField("early_stopping", ("early_stopping",), f"{_BEAMS}: BeamSearch"),
    SamplingField(
        "beam_search_diversity_rate",
        ("beam_search_diversity_rate",),
        f"{_BEAMS}: BeamSearch",
        (Range(lambda value, _: abs(value) <= 1e6, "between -1e6 and 1e6"),),
    ),
    SamplingField(
        "return_log_probs",
        ("return_log_probs", "output_log_probs"),
        "worker/sampling/sampler.py: sample",
    ),
    SamplingField(
        "return_context_logits", ("return_context_logits",), f"{_LOGITS}: keep_context"
    ),
    SamplingField(
        "return_generation_logits", ("return_generation_logits",), f"{_LOGITS}: keep_generation"
    ),
    SamplingField(
        "logits_dtype",
        (),
        f"{_LOGITS}: LogitsRows",
        (Range(lambda value, _: value in _LOGITS_DTYPES, " or ".join(_LOGITS_DTYPES)),),
    ),
    SamplingField(
        "return_perf_metrics",
        ("return_perf_metrics", "return_kv_cache_reuse_stats"),
        f"{_REQUEST}: SequenceFigures",
    ),
    SamplingField(
        "guide_type",
        ("guided_decoding_guide_type",),
        "worker/guided/compiler.py: GuideCompiler",
    ),
    SamplingField("guide", ("guided_decoding_guide",), f"{_PROCESSORS}: apply_masks"),
)

FIELDS = {row.name: row for row in _ROWS}
"""Every row by its field's name, in the order of `SamplingParams`."""

SERVED_FIELDS = frozenset(row.name for row in _ROWS if row.served_by is not None)


def refuse_unserved(sampling: SamplingParams) -> None:
    """Refuse, by name, a field that is set and that no code serves.

    Raises:
        RequestError: names the field, its value and the fields that are served.
    """
    for name, value in sampling.changed_fields().items():
        if name not in SERVED_FIELDS:
            raise RequestError(
                f"sampling parameter '{name}' (value {value!r}) is not served by this "
                f"engine; leave it unset. Served: {', '.join(sorted(SERVED_FIELDS))}."
            )


def check_values(values: Mapping[str, Any], vocab_size: int) -> None:
    """Check the values of these fields, by name, against their rows.

    Raises:
        RequestError: names the field, its value and the allowed range.
    """
    for name, value in values.items():
        FIELDS[name].check(value, vocab_size)

"""The draft tokens of a token-level request, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimaran.comm.errors import RequestError
from trimaran.server.models.sample_inputs import SampleInputs

IDS, LOGITS, THRESHOLD = "draft_input_ids", "draft_logits", "draft_acceptance_threshold"
INPUTS = frozenset((IDS, LOGITS, THRESHOLD))
MAX_DRAFT_LEN = "max_draft_len"
"""The engine's fact: most draft tokens that one step verifies; 0 for none."""

_PARAMETER = "max_draft_tokens"


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of one sample. The engine draws each token as without drafts, and accepts a
    draft token that equals the drawn token: drafts change no token and no probability.
    """

    token_ids: tuple[int, ...] = ()
    acceptance_threshold: float = 0.0
    max_draft_tokens: int | None = None
    """Most draft tokens of a step, with those that the engine drafts itself; None for the
    engine's limit."""

    ends_after: bool = False
    """Whether the output ends with the first id that is no draft id, or follows the last."""


NO_DRAFTS = Drafts()


def max_draft_len(facts: Mapping[str, Any]) -> int:
    """Most draft tokens that one step of an engine verifies, by the engine's facts."""
    return int(facts.get(MAX_DRAFT_LEN, 0))


def read_drafts(
    inputs: SampleInputs, parameters: Mapping[str, Any], facts: Mapping[str, Any]
) -> Drafts:
    """The drafts of one sample.

    Raises:
        RequestError: names the value, the limit and the remedy.
    """
    most = parameters.get(_PARAMETER)
    if most is None and not inputs.has_any(INPUTS):
        return NO_DRAFTS
    if most is not None and (type(most) is not int or most < 0):
        raise RequestError(
            f"parameter '{_PARAMETER}' is {most!r} but must be a whole number; 0 asks for no "
            "drafts"
        )
    ids = tuple(inputs.ids(IDS))
    _check_logits(inputs, len(ids), facts)
    threshold = inputs.scalar(THRESHOLD)
    if threshold is not None and not ids:
        raise RequestError(f"input '{THRESHOLD}' is set without {IDS}; send both")
    if not ids:
        return Drafts(max_draft_tokens=most)
    check_drafts(ids, facts)
    _check_sequences(inputs)
    return Drafts(ids, _checked_threshold(threshold), most, ends_after=True)


def check_drafts(ids: tuple[int, ...], facts: Mapping[str, Any]) -> None:
    """Refuse drafts that the engine cannot verify.

    Raises:
        RequestError: names the value, the limit and the remedy.
    """
    most, vocab_size = max_draft_len(facts), int(facts["vocab_size"])
    if not most:
        raise RequestError(
            f"input '{IDS}' is set but speculative decoding is not served by this engine: the "
            "engine verifies no draft tokens. Leave the input out, or build the engine with "
            "--speculative_decoding_mode draft_tokens_external --max_draft_len N."
        )
    if len(ids) > most:
        raise RequestError(
            f"input '{IDS}' holds {len(ids)} ids but this engine verifies at most {most}. Send "
            f"fewer, or build the engine with --max_draft_len {len(ids)}."
        )
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise RequestError(
            f"input '{IDS}' holds {low if low < 0 else high}, which is no token id: ids are 0 "
            f"to {vocab_size - 1}"
        )


def _check_sequences(inputs: SampleInputs) -> None:
    width = inputs.scalar("beam_width") or 1
    if width > 1:
        raise RequestError(
            f"beam_width is {width} together with {IDS}, but beams are not drafted. Leave one "
            "of the two out."
        )


def _check_logits(inputs: SampleInputs, num_ids: int, facts: Mapping[str, Any]) -> None:
    """Draft logits are checked against the ids, and have no effect beyond that."""
    logits = inputs.array(LOGITS)
    if logits is None:
        return
    if not num_ids:
        raise RequestError(f"input '{LOGITS}' is set without {IDS}; send both")
    sizes = {int(facts["vocab_size"]), int(facts.get("vocab_size_padded", 0))}
    if logits.ndim != 2 or logits.shape[0] != num_ids or logits.shape[1] not in sizes:
        raise RequestError(
            f"input '{LOGITS}' has the shape {list(logits.shape)} but must be [{num_ids}, "
            f"{facts['vocab_size']}]: one row for each of the {IDS}, one value for each id of "
            "the vocabulary"
        )


def _checked_threshold(threshold: float | None) -> float:
    if threshold is None:
        return 0.0
    # Written so that NaN is refused too.
    if not 0 <= threshold <= 1:
        raise RequestError(f"'{THRESHOLD}' is {threshold} but must be between 0 and 1")
    return float(threshold)

"""From the tensors of a token-level request to its sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.sampling_fields import FIELDS, check_values
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.server.inference.request import Tensor
from trimaran.server.inference.text_limits import refuse_many
from trimaran.server.models.sample_inputs import SampleInputs

PERF_METRICS = FIELDS["return_perf_metrics"].inputs
"""The newer and the older name of the input."""

MAX_WORD_BYTES = 1 << 18
"""Most bytes of the words of one input of a request."""

_NUMBERS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": bool}
# Field, inputs and type of fields that one number sets. The prompts of a batch must agree on
# num_return_sequences, so `transaction.py` reads that field.
_SCALARS = tuple(
    (row.name, row.inputs, _NUMBERS[row.type_name])
    for row in FIELDS.values()
    if row.type_name in _NUMBERS and row.name != "num_return_sequences"
)
_ROWS_OF = {name: row for row, (_, names, _) in enumerate(_SCALARS) for name in names}
"""The row of `_SCALARS` of each input."""

LOOKAHEAD = (
    "lookahead_window_size",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
)
_GUIDES = frozenset(("guided_decoding_guide_type", "guided_decoding_guide"))
_WORD_LISTS = frozenset(("stop_words_list", "bad_words_list", "embedding_bias"))
_WHOLE = "context_and_generation"
# Inputs of unsupported features; a request with one of them is refused.
_REFUSED: tuple[tuple[str, str], ...] = (
    ("encoder_input_features", "encoder-decoder models are not served"),
    ("cross_attention_mask", "cross attention is not served"),
    ("skip_cross_attn_blocks", "cross attention is not served"),
    ("mrope_rotary_cos_sin", "multimodal positions are not served"),
    ("mrope_position_deltas", "multimodal positions are not served"),
    ("context_phase_params", "disaggregated serving is not served"),
)
_UNSERVED = frozenset(name for name, _ in _REFUSED)


def read_sampling(
    inputs: SampleInputs,
    vocab_size: int,
    logits_dtype: str = "float32",
    *,
    clamps: bool = False,
) -> SamplingParams:
    """The sampling parameters of one sample; an absent input keeps its default.

    Raises:
        RequestError: as for `read_fields`.
    """
    return SamplingParams(**read_fields(inputs, vocab_size, logits_dtype, clamps=clamps))


def read_fields(
    inputs: SampleInputs,
    vocab_size: int,
    logits_dtype: str = "float32",
    *,
    clamps: bool = False,
) -> dict[str, Any]:
    """The fields of `SamplingParams` that one sample sets, by name. With ``clamps``, an
    ``end_id`` beyond the vocabulary is none.

    Raises:
        RequestError: a malformed word list, a value out of range, or an input of an
            unsupported feature.
    """
    if inputs.has_any(_UNSERVED):
        _refuse_unserved(inputs)
    values: dict[str, Any] = {}
    # Most inputs of most requests are absent.
    for row in sorted({_ROWS_OF[name] for name in inputs.names if name in _ROWS_OF}):
        field, names, convert = _SCALARS[row]
        value = _only_value(inputs, names)
        if value is not None:
            values[field] = _exact(field, convert(value))
    if "max_tokens" not in values:
        raise RequestError("request_output_len is not present in the request")
    if clamps and values.get("end_id", -1) >= vocab_size:
        del values["end_id"]
    # NaN does not mean unset: the check below refuses NaN.
    if values.get("top_p", 1.0) <= 0:
        del values["top_p"]
    if inputs.has_any(_GUIDES):
        values["guide_type"], values["guide"] = _guide(inputs)
    if inputs.has_any(_WORD_LISTS):
        values["stop_words"] = word_list(inputs, "stop_words_list")
        values["bad_words"] = word_list(inputs, "bad_words_list")
        values["embedding_bias"] = _bias(inputs, vocab_size)
    if values.get("return_context_logits") or values.get("return_generation_logits"):
        values["logits_dtype"] = logits_dtype
    check_values(values, vocab_size)
    return values


def _only_value(inputs: SampleInputs, names: tuple[str, ...]) -> Any:
    """The value of inputs with one meaning, or None."""
    if len(names) == 1:
        return inputs.scalar(names[0])
    given = [(name, inputs.scalar(name)) for name in names]
    given = [(name, value) for name, value in given if value is not None]
    for name, value in given[1:]:
        if value != given[0][1]:
            raise RequestError(
                f"{given[0][0]} is {given[0][1]} but {name}, another name for it, is {value}; "
                "send one of them"
            )
    return given[0][1] if given else None


def _guide(inputs: SampleInputs) -> tuple[str, str]:
    """Type and text of the guide; both may be empty."""
    kind, guide = (
        (inputs.texts(name) or [""])[0]
        for name in ("guided_decoding_guide_type", "guided_decoding_guide")
    )
    if guide and not kind:
        raise RequestError(
            "guided_decoding_guide is set without guided_decoding_guide_type; send both"
        )
    return kind, guide


def _exact(field: str, value: Any) -> Any:
    """The default if the value is the default in 32 bits."""
    default = FIELDS[field].default
    if isinstance(value, float) and np.float32(value) == np.float32(default):
        return default
    return value


def _bias(inputs: SampleInputs, vocab_size: int) -> bytes:
    """One value for each id of the engine, whose vocabulary may differ from the tokenizer's."""
    given = inputs.array("embedding_bias")
    if given is None or not np.any(given):
        return b""
    bias = np.asarray(given, dtype="<f4").reshape(-1)
    if bias[vocab_size:].any():
        raise RequestError(
            f"embedding_bias has {bias.size} values, but the vocabulary has {vocab_size} ids"
        )
    return np.pad(bias[:vocab_size], (0, max(vocab_size - bias.size, 0))).tobytes()


def word_list(inputs: SampleInputs, name: str) -> tuple[tuple[int, ...], ...]:
    """The words of a ``[2, L]`` list: concatenated ids, and the end of each word.

    Raises:
        RequestError: the offsets are malformed.
    """
    array = inputs.array(name)
    if array is None:
        return ()
    refuse_many(name, array.size // 2, "ids")
    flat = array.reshape(-1).tolist()
    if len(flat) % 2:
        raise RequestError(f"{name}: Sparse list must not have odd length: {_start(flat)}")
    half = len(flat) // 2
    ids, ends = flat[:half], flat[half:]
    used = [end for end in ends if end != -1]
    if ends[: len(used)] != used:
        raise RequestError(f"{name}: Sparse list must not have additional -1s: {_start(flat)}")
    words, start = [], 0
    for end in used:
        if end > half or end < 0:
            raise RequestError(
                f"{name}: Sparse list must not have out-of-bound offsets: {_start(flat)}"
            )
        if end <= start:
            raise RequestError(
                f"{name}: Sparse list must not have non-increasing offsets: {_start(flat)}"
            )
        words.append(tuple(ids[start:end]))
        start = end
    return tuple(words)


def check_words(inputs: Mapping[str, Tensor], name: str) -> int:
    """Refuse lists of texts that are too long, all samples together; the number of words.

    Raises:
        RequestError: names the input, the value, the limit and the remedy.
    """
    tensor = inputs.get(name)
    if tensor is None:
        return 0
    count: int = tensor.data.size
    refuse_many(name, count, "words")
    num_bytes = sum(map(len, tensor.data.flat))
    if num_bytes > MAX_WORD_BYTES:
        raise RequestError(
            f"input '{name}' holds words of {num_bytes} bytes together but may hold at most "
            f"{MAX_WORD_BYTES}; send fewer or shorter words"
        )
    return count


def _start(values: list[int]) -> str:
    """A list, shortened for an error message."""
    shown = str(values[:100])
    return shown if len(values) <= 100 else f"{shown[:-1]}, ... ({len(values)} values)"


def check_request_type(parameters: Mapping[str, Any]) -> None:
    """Refuse the context and generation requests of disaggregated serving.

    Raises:
        RequestError: the parameter ``request_type`` names one of them, or is unknown.
    """
    found = parameters.get("request_type", _WHOLE)
    if found != _WHOLE:
        raise RequestError(
            f"parameter 'request_type' is {found!r} but disaggregated serving is not served. "
            f"Leave it out, or send '{_WHOLE}'."
        )


def _refuse_unserved(inputs: SampleInputs) -> None:
    for name, reason in _REFUSED:
        if inputs.array(name) is not None:
            raise RequestError(f"input '{name}' is set but {reason}; leave it out")

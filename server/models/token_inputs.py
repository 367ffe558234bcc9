"""LoRA, KV-cache, prompt-table and draft inputs of a token-level request, read and checked."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from trimaran.comm.errors import RequestError
from trimaran.server.inference.request import Tensor
from trimaran.server.models.sample_inputs import SampleInputs, to_text
from trimaran.server.models.sampling_inputs import LOOKAHEAD

_TABLE = "prompt_embedding_table"
_EXTRA_IDS = "prompt_table_extra_ids"


def read_table(inputs: SampleInputs, tensor: Tensor | None) -> dict[str, Any] | None:
    """The prompt table in the engine's form; ``tensor`` covers the whole batch.

    Raises:
        RequestError: the shape is not [entries, hidden size].
    """
    array = inputs.array(_TABLE)
    if array is None or tensor is None:
        return None
    if array.ndim != 2:
        raise RequestError(
            f"{_TABLE} has the shape {list(array.shape)} but must be [entries, hidden size]"
        )
    data = _bytes_of(array)
    return {"dtype": tensor.datatype, "shape": list(array.shape), "data": data}


def cache_key(inputs: SampleInputs, num_tokens: int, table: dict[str, Any] | None) -> bytes:
    """The key that prompts must share, besides equal ids, to share KV cache blocks: the extra
    ids up to the last non-zero one, or else a digest of the table; empty without a table.

    Raises:
        RequestError: the number of extra ids differs from the number of tokens.
    """
    extra = inputs.array(_EXTRA_IDS)
    if extra is not None:
        extra = extra.reshape(-1)
        prompt = inputs.array("input_ids")
        padded = 0 if prompt is None else prompt.size
        if len(extra) not in (num_tokens, padded):
            raise RequestError(
                f"{_EXTRA_IDS} has {len(extra)} values, but the prompt has {num_tokens} "
                "tokens; send one value a token"
            )
        places = np.flatnonzero(extra[:num_tokens])
        if len(places):
            return _table_digest(b"extra", extra[: places[-1] + 1].astype("<u8").tobytes())
    if table is None:
        return b""
    return _table_digest(
        b"table", repr((table["dtype"], table["shape"])).encode(), table["data"]
    )


def _table_digest(*parts: bytes) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()


_WEIGHTS, _CONFIG = "lora_weights", "lora_config"
_MAPPED_BYTES = 8 << 20
"""A tensor of a body from this size on is sent to engines, and kept, without a copy."""

_MAX_NAME_BYTES = 255
"""The longest name of a folder on the file systems of Linux."""


def read_adapter(
    inputs: SampleInputs, tensors: Mapping[str, Tensor]
) -> tuple[int, dict[str, Any] | None]:
    """A sample's task id and the field ``adapter`` of `Submit`; 0 and None without LoRA.

    ``tensors`` cover the whole batch. Weights without an id have one of their own, by their
    digest.

    Raises:
        RequestError: weights without a config, or both an id and a name.
    """
    task, name = inputs.scalar("lora_task_id"), inputs.scalar("lora_name")
    given = [other for other in (_WEIGHTS, _CONFIG) if inputs.array(other) is not None]
    if name is not None:
        if task is not None or given:
            raise RequestError(
                "lora_name is set beside lora_task_id, lora_weights or lora_config; send the "
                "name alone"
            )
        if not name:
            raise RequestError(
                "lora_name is empty; leave it out, or name a folder of lora_prefetch_dir"
            )
        if len(name) > _MAX_NAME_BYTES:
            raise RequestError(
                f"lora_name has {len(name)} bytes, but the name of a folder has at most "
                f"{_MAX_NAME_BYTES}. Name a folder of lora_prefetch_dir."
            )
        return 0, {"name": to_text("lora_name", name)}
    if len(given) == 1:
        raise RequestError(
            f"{given[0]} is set alone; lora_weights and lora_config must come together"
        )
    if task is None and not given:
        return 0, None
    adapter: dict[str, Any] = {
        other.removeprefix("lora_"): _on_the_wire(inputs.array(other), tensors[other].datatype)
        for other in given
    }
    if task is None:
        # Clients up to version 0.8 know no ids.
        adapter["digest"] = _digest(adapter)
        task = int.from_bytes(adapter["digest"][:8], "little") | 1
    return task, adapter


def _on_the_wire(array: np.ndarray[Any, Any] | None, datatype: str) -> dict[str, Any]:
    assert array is not None
    return {"datatype": datatype, "shape": list(array.shape), "data": _bytes_of(array)}


def _bytes_of(array: np.ndarray[Any, Any]) -> bytes | memoryview:
    """The bytes of a tensor: a view where they are most of a buffer that never changes, which
    is a message, or the mapping of a long body.

    An adapter may have all the bytes of a body. A view of a small part would keep the whole
    body as long as the adapter, and a client may write to its shared memory, of which tensors
    are copies.
    """
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    owner = base.obj if isinstance(base, memoryview) else base
    # A mapping holds a descriptor as long as the adapter is kept: only long ones are worth it.
    least = _MAPPED_BYTES if isinstance(owner, mmap.mmap) else 0
    is_most = (
        isinstance(owner, (bytes, mmap.mmap))
        and array.nbytes >= least
        and 2 * array.nbytes >= len(owner)
    )
    if is_most and array.flags.c_contiguous:
        return array.reshape(-1).view(np.uint8).data
    return np.ascontiguousarray(array).tobytes()


async def add_digests(adapters: Sequence[dict[str, Any] | None]) -> None:
    """Add digests of adapter weights, by which engines recognise cached adapters."""
    for adapter in adapters:
        if adapter is not None and "weights" in adapter and "digest" not in adapter:
            # Hashed in a thread: adapters have tens of megabytes.
            adapter["digest"] = await asyncio.to_thread(_digest, adapter)


def _digest(adapter: dict[str, Any]) -> bytes:
    digest = blake2b(digest_size=16)
    for part in ("weights", "config"):
        tensor = adapter[part]
        digest.update(repr((tensor["datatype"], tensor["shape"])).encode())
        digest.update(tensor["data"])
    return digest.digest()


_STARTS = "retention_token_range_starts"
_ENDS = "retention_token_range_ends"
_PRIORITIES = "retention_token_range_priorities"
_DURATIONS = "retention_token_range_durations_ms"
_OUTPUT_PRIORITY = "retention_decode_priority"
_OUTPUT_DURATION = "retention_decode_duration_ms"
_RETENTION = frozenset(
    (_STARTS, _ENDS, _PRIORITIES, _DURATIONS, _OUTPUT_PRIORITY, _OUTPUT_DURATION)
)
_SALT = "cache_salt"
_DEFAULT_PRIORITY = 35
_MAX_PRIORITY = 100
_FOREVER = -1
_END = 1 << 62
_MAX_RANGES = 1 << 10


def read_retention(inputs: SampleInputs) -> dict[str, Any] | None:
    """The field ``retention`` of `Submit`; None if the request sets no retention.

    Raises:
        RequestError: ranges are incomplete or invalid.
    """
    if not inputs.has_any(_RETENTION):
        return None
    names = (_STARTS, _ENDS, _PRIORITIES, _DURATIONS)
    for name in names:
        _refuse_many_ranges(name, inputs)
    starts, ends, priorities, durations = (inputs.ids(name) for name in names)
    for name, values in ((_ENDS, ends), (_PRIORITIES, priorities), (_DURATIONS, durations)):
        if len(values) != len(starts) and (values or name != _DURATIONS):
            raise RequestError(
                f"{name} must be provided, and have the same length as {_STARTS}"
            )
    output = inputs.scalar(_OUTPUT_PRIORITY)
    lasting = inputs.scalar(_OUTPUT_DURATION)
    if not starts and output is None:
        if lasting is not None:
            raise RequestError(
                f"{_OUTPUT_DURATION} is {lasting} but nothing says what is kept so long. Set "
                f"{_OUTPUT_PRIORITY} too."
            )
        return None
    durations = durations or [_FOREVER] * len(starts)
    rows = zip(starts, ends, priorities, durations, strict=True)
    ranges = [_range(*row) for row in rows]
    output = _DEFAULT_PRIORITY if output is None else output
    lasting = _FOREVER if lasting is None else lasting
    _check(_OUTPUT_PRIORITY, output, _OUTPUT_DURATION, lasting)
    return {"ranges": ranges, "output": [output, lasting]}


def _refuse_many_ranges(name: str, inputs: SampleInputs) -> None:
    array = inputs.array(name)
    if array is not None and array.size > _MAX_RANGES:
        raise RequestError(
            f"{name} holds {array.size} values but a prompt has at most {_MAX_RANGES} ranges; "
            "send fewer"
        )


def _range(start: int, end: int, priority: int, duration_ms: int) -> list[int]:
    _check(_PRIORITIES, priority, _DURATIONS, duration_ms)
    end = _END if end == -1 else end
    if not 0 <= start < end:
        raise RequestError(
            f"{_STARTS} and {_ENDS} hold the range {start} to {end}, but ranges start at 0 or "
            "later and end behind their start, or at -1, the end of the prompt"
        )
    return [start, end, priority, duration_ms]


def _check(priority_name: str, priority: int, duration_name: str, duration_ms: int) -> None:
    if not 0 <= priority <= _MAX_PRIORITY:
        raise RequestError(
            f"{priority_name} holds {priority} but priorities are 0 to {_MAX_PRIORITY}, "
            f"{_DEFAULT_PRIORITY} being that of other blocks"
        )
    if duration_ms != _FOREVER and duration_ms < 1:
        raise RequestError(
            f"{duration_name} holds {duration_ms} but must be a time of 1 ms or more, or "
            f"{_FOREVER} for ever"
        )


def salted(parameters: Mapping[str, Any], cache_key: bytes) -> bytes:
    """``cache_key`` under the salt of the request's parameter ``cache_salt``, if it has one.

    Raises:
        RequestError: the parameter is not a text, or is empty.
    """
    salt = parameters.get(_SALT)
    if salt is None:
        return cache_key
    if not isinstance(salt, str) or not salt:
        raise RequestError(
            f"parameter '{_SALT}' is {salt!r} but must be a text that is not empty; requests "
            "share cached blocks only under equal texts"
        )
    raw = salt.encode("utf-8", "surrogateescape")
    return blake2b(raw, digest_size=16, person=b"salt").digest() + cache_key


_IDS, _LOGITS, _THRESHOLD = "draft_input_ids", "draft_logits", "draft_acceptance_threshold"
_DRAFT_INPUTS = frozenset((_IDS, _LOGITS, _THRESHOLD))
_LOOKAHEAD_INPUTS = frozenset(LOOKAHEAD)
_MAX_DRAFT_LEN = "max_draft_len"
"""The engine's fact: most draft tokens that one step verifies; 0 for none."""

MAX_DRAFT_TOKENS = "max_draft_tokens"
"""The parameter of a request that limits the draft tokens of a step."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of one sample.

    The engine draws each token as without drafts, and accepts a draft token that equals the
    drawn token: drafts change no token and no probability. With logits the engine accepts by
    rejection sampling, which changes no probability; with a threshold, all draft tokens that
    are likely enough.
    """

    token_ids: tuple[int, ...] = ()
    acceptance_threshold: float = 0.0
    max_draft_tokens: int | None = None
    """Most draft tokens of a step, with those that the engine drafts itself; None for the
    engine's limit."""

    logits: bytes = b""
    """float32 [n, V]: the logits from which the last n ids were drawn; empty for none."""

    lookahead: tuple[int, ...] = ()
    """The three sizes of lookahead decoding; empty for the engine's."""

    ends_after: bool = False
    """Whether the output ends with the first id that is no draft id, or follows the last."""


NO_DRAFTS = Drafts()


def max_draft_len(facts: Mapping[str, Any]) -> int:
    """Most draft tokens that one step of an engine verifies, by the engine's facts."""
    return int(facts.get(_MAX_DRAFT_LEN, 0))


def draft_limit(parameters: Mapping[str, Any]) -> int | None:
    """The draft tokens of a step that a request allows; None for the engine's limit.

    Raises:
        RequestError: the parameter is no whole number from 0.
    """
    most: int | None = parameters.get(MAX_DRAFT_TOKENS)
    if most is not None and (type(most) is not int or most < 0):
        raise RequestError(
            f"parameter '{MAX_DRAFT_TOKENS}' is {most!r} but must be a whole number; 0 asks "
            "for no drafts"
        )
    return most


def read_drafts(
    inputs: SampleInputs, parameters: Mapping[str, Any], facts: Mapping[str, Any]
) -> Drafts:
    """The drafts of one sample.

    Raises:
        RequestError: names the value, the limit and the remedy.
    """
    most = draft_limit(parameters)
    if inputs.has_any(_LOOKAHEAD_INPUTS):
        sizes = _lookahead(inputs, facts)
        return replace(_read_drafts(inputs, most, facts), lookahead=sizes)
    if most is None and not inputs.has_any(_DRAFT_INPUTS):
        return NO_DRAFTS
    return _read_drafts(inputs, most, facts)


def _lookahead(inputs: SampleInputs, facts: Mapping[str, Any]) -> tuple[int, ...]:
    """The sizes of lookahead decoding; raises RequestError if the engine cannot serve them."""
    values = [inputs.scalar(name) for name in LOOKAHEAD]
    names = ", ".join(LOOKAHEAD)
    sizes = tuple(int(value) for value in values if value is not None)
    if len(sizes) != len(values):
        raise RequestError(f"{names} must be given together or not at all")
    most = tuple(facts.get("lookahead", ()))
    if not most:
        raise RequestError(
            "Cannot set the request lookahead decoding configuration when model instance "
            "lookahead parameters are not set. Lookahead decoding is not served by this "
            f"engine: leave the inputs {names} out, or build the engine with "
            "--speculative_decoding_mode lookahead_decoding."
        )
    if any(not low <= n <= high for n, low, high in zip(sizes, (1, 2, 1), most, strict=True)):
        raise RequestError(
            f"{names} are {list(sizes)} but must be at least [1, 2, 1] and at most the "
            f"engine's {list(most)}. Send smaller ones, or set larger ones in config.pbtxt."
        )
    width = inputs.scalar("beam_width") or 1
    both = _IDS if inputs.array(_IDS) is not None else f"beam_width {width}"
    if width > 1 or both == _IDS:
        raise RequestError(
            f"{names} are {list(sizes)} together with {both}, but then lookahead drafts "
            "nothing. Leave one of the two out."
        )
    return sizes


def _read_drafts(inputs: SampleInputs, most: int | None, facts: Mapping[str, Any]) -> Drafts:
    array = inputs.array(_IDS)
    logits = _logits(inputs, 0 if array is None else array.size, facts)
    threshold = inputs.scalar(_THRESHOLD)
    if array is None:
        if threshold is not None:
            raise RequestError(f"input '{_THRESHOLD}' is set without {_IDS}; send both")
        return Drafts(max_draft_tokens=most)
    _check_drafts(array, facts)
    _check_sequences(inputs)
    ids = tuple(inputs.ids(_IDS))
    threshold = _checked_threshold(threshold)
    if logits is None or (is_seeded(inputs) and not threshold):
        return Drafts(ids, threshold, most, ends_after=True)
    raw = logits.astype("<f4").tobytes()
    return Drafts(ids, threshold, most, raw, ends_after=True)


def is_seeded(inputs: SampleInputs) -> bool:
    """Whether a sample has a seed, with which its text is the same with and without drafts."""
    return any(inputs.scalar(name) is not None for name in ("random_seed", "seed"))


def _check_drafts(ids: np.ndarray[Any, Any], facts: Mapping[str, Any]) -> None:
    """Refuse drafts that the engine cannot verify; raises RequestError."""
    most, vocab_size = max_draft_len(facts), int(facts["vocab_size"])
    if not most:
        raise RequestError(
            f"input '{_IDS}' is set but speculative decoding is not served by this engine: the "
            "engine verifies no draft tokens. Leave the input out, or build the engine with "
            "--speculative_decoding_mode draft_tokens_external --max_draft_len N."
        )
    if ids.size > most:
        raise RequestError(
            f"input '{_IDS}' holds {ids.size} ids but this engine verifies at most {most}. "
            f"Send fewer, or build the engine with --max_draft_len {ids.size}."
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise RequestError(
            f"input '{_IDS}' holds {low if low < 0 else high}, which is no token id: ids are 0 "
            f"to {vocab_size - 1}"
        )


def _check_sequences(inputs: SampleInputs) -> None:
    width = inputs.scalar("beam_width") or 1
    if width > 1:
        raise RequestError(
            f"beam_width is {width} together with {_IDS}, but beams are not drafted. Leave one "
            "of the two out."
        )


def _logits(
    inputs: SampleInputs, num_ids: int, facts: Mapping[str, Any]
) -> np.ndarray[Any, Any] | None:
    """The draft logits, [ids, V]; None without any.

    Raises:
        RequestError: there is not one row for each id.
    """
    logits = inputs.array(_LOGITS)
    if logits is None:
        return None
    if not num_ids:
        raise RequestError(f"input '{_LOGITS}' is set without {_IDS}; send both")
    sizes = {int(facts["vocab_size"]), int(facts.get("vocab_size_padded", 0))}
    if logits.ndim != 2 or logits.shape[0] != num_ids or logits.shape[1] not in sizes:
        raise RequestError(
            f"input '{_LOGITS}' has the shape {list(logits.shape)} but must be [{num_ids}, "
            f"{facts['vocab_size']}]: one row for each of the {_IDS}, one value for each id of "
            "the vocabulary"
        )
    return logits[:, : int(facts["vocab_size"])]


def _checked_threshold(threshold: float | None) -> float:
    if threshold is None:
        return 0.0
    # Written so that NaN is refused too.
    if not 0 <= threshold <= 1:
        raise RequestError(f"'{_THRESHOLD}' is {threshold} but must be between 0 and 1")
    return float(threshold)

"""What a request says of the KV cache: how long its blocks are kept, and who may share them."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from trimaran.comm.errors import RequestError
from trimaran.server.models.sample_inputs import SampleInputs

_STARTS = "retention_token_range_starts"
_ENDS = "retention_token_range_ends"
_PRIORITIES = "retention_token_range_priorities"
_DURATIONS = "retention_token_range_durations_ms"
_OUTPUT_PRIORITY = "retention_decode_priority"
_OUTPUT_DURATION = "retention_decode_duration_ms"
_SALT = "cache_salt"
_DEFAULT_PRIORITY = 35
_MAX_PRIORITY = 100
_FOREVER = -1
_END = 1 << 62


def read_retention(inputs: SampleInputs) -> dict[str, Any] | None:
    """The field ``retention`` of `Submit`; None if the request says nothing of it.

    Raises:
        RequestError: ranges are incomplete or mean nothing.
    """
    starts, ends, priorities, durations = (
        inputs.ids(name) for name in (_STARTS, _ENDS, _PRIORITIES, _DURATIONS)
    )
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
        RequestError: the parameter is no text, or an empty one.
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

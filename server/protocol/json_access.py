"""Strict reading of JSON bodies: types are never converted; errors name the JSON found."""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import encoder as json_encoder
from typing import Any

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.inference.tensor_bytes import Buffer
from trimaran.server.protocol.limits import (
    MAX_MEMBERS,
    max_json_bytes,
    max_num_values,
    too_many_values,
)

MAX_NESTING = 100
"""Deepest nesting of lists in tensor data."""

# Shared: json.dumps would make a new encoder for every value.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

_REASONS = {
    "Expecting value": "Invalid value",
    "Expecting ',' delimiter": "Missing a comma or '}' after an object member",
    "Expecting ':' delimiter": "Missing a colon after a name of object member",
    "Expecting property name enclosed in double quotes": "Missing a name for object member",
    "Illegal trailing comma before end of object": "Missing a name for object member",
    "Illegal trailing comma before end of array": "Invalid value",
    "Unterminated string starting at": "Missing a closing quotation mark in string",
    "Extra data": "The document root must not be followed by other values",
    "Invalid control character at": "Invalid encoding in string",
}

_HALF_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_HALF = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+', re.DOTALL)
"""A string, or the rest of a text whose last string has no end. Possessive: a choice for each
character would take a hundred bytes of memory, and an open string would be read anew from each
of its quotes on."""

_COUNTED_BYTES = 1 << 20
_LONG_CHARACTERS = 1 << 20

JsonObject = dict[str, Any]


class RepeatedKeys(dict[str, Any]):
    """A JSON object in which a key occurs more than once; the last value wins."""

    repeated: tuple[str, ...] = ()


def _object_from_pairs(pairs: list[tuple[str, Any]]) -> JsonObject:
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    marked = RepeatedKeys(members)
    counts = Counter(name for name, _ in pairs)
    marked.repeated = tuple(name for name, count in counts.items() if count > 1)
    return marked


_DECODER = json.JSONDecoder(object_pairs_hook=_object_from_pairs)


def unparsable(reason: str, offset: int) -> RequestError:
    """The error of a body that is not JSON."""
    return RequestError(
        f"failed to parse the request JSON buffer: {reason}. at {offset}", ErrorKind.INTERNAL
    )


def parse(body: Buffer) -> Any:
    """Decode a JSON text. Bytes that are not UTF-8 survive, escaped as surrogates.

    Raises:
        RequestError: not JSON; names the reason and the offset in bytes.
    """
    text = str(body, "utf-8", "surrogateescape").removeprefix("\ufeff")
    if not text.strip(" \t\r\n"):
        raise unparsable("The document is empty", 0)
    _check_surrogates(text)
    try:
        if len(text) < _LONG_CHARACTERS:
            return _DECODER.decode(text)
        with _collector_off():
            return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        reason = _REASONS.get(error.msg, error.msg)
        offset = len(text[: error.pos].encode("utf-8", "surrogateescape"))
        raise unparsable(reason, offset) from None
    except ValueError:
        # An integer of thousands of digits.
        raise too_big() from None
    except RecursionError:
        raise unparsable(f"Nested deeper than {MAX_NESTING} levels", 0) from None


def check_json(body: Buffer, max_input_bytes: int) -> None:
    """Refuse a JSON text that is longer, or has more values, than a request may have, before
    any value is made.

    Raises:
        RequestError: more than `max_json_bytes` or `max_num_values` of ``max_input_bytes``, or
            more objects and members of objects than `MAX_MEMBERS`.
    """
    if len(body) > max_json_bytes(max_input_bytes):
        raise RequestError(
            f"the JSON of a request may have {max_json_bytes(max_input_bytes)} bytes, three "
            f"quarters of --http-max-input-size, and this has {len(body)}. Send tensors as "
            "binary data, or use --http-max-input-size to increase the limit."
        )
    limit = max_num_values(max_input_bytes)
    if _exceeds(body, b"{:", MAX_MEMBERS):
        raise RequestError(
            f"a request has at most {MAX_MEMBERS} JSON objects and members of objects, and "
            "this has more. Send only the members that the model knows."
        )
    # Each value but the first of its list or object follows a comma. Strings hold the same
    # characters: they are left out only where they could decide.
    if _exceeds(body, b",[{", limit):
        raise too_many_values(limit, "--http-max-input-size")


def _exceeds(body: Buffer, marks: bytes, limit: int) -> bool:
    """Whether more than ``limit`` of these characters are outside of strings."""
    if len(body) <= limit:
        return False
    if _count(body, marks) <= limit:
        return False
    # One string after the other: a copy without strings would take many times their memory.
    view, count, start = memoryview(body), 0, 0
    for string in _STRING.finditer(body):
        count += _count(view[start : string.start()], marks)
        if count > limit:
            return True
        start = string.end()
    return count + _count(view[start:], marks) > limit


def _count(body: Buffer, marks: bytes) -> int:
    view, count = memoryview(body), 0
    for start in range(0, len(view), _COUNTED_BYTES):
        part = bytes(view[start : start + _COUNTED_BYTES])
        count += sum(part.count(mark) for mark in marks)
    return count


@contextmanager
def _collector_off() -> Iterator[None]:
    """The context disables garbage collection: a collection among millions of new lists takes
    longer than the parse, finds no garbage, and blocks every request.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _check_surrogates(text: str) -> None:
    """Refuse escapes of unpaired surrogates, which are neither text nor bytes."""
    if "\\u" not in text or _HALF_ESCAPE.search(text) is None:
        return
    # An escaped backslash does not start an escape.
    lone = _LONE_HALF.search(text.replace("\\\\", "  "))
    if lone is not None:
        offset = len(text[: lone.start()].encode("utf-8", "surrogateescape"))
        raise unparsable("The surrogate pair in string is invalid", offset)


def too_big() -> RequestError:
    """The error of a number beyond a double's range."""
    return unparsable("Number too big to be stored in double", 0)


def wrong_type(field: str, found: str, wanted: str, verb: str = "parse") -> RequestError:
    """The error of a field with another JSON type. Texts about settings name no field."""
    start = f"Unable to {verb} {field}: " if field else ""
    return RequestError(
        f"{start}attempt to access JSON {found} as {wanted}", ErrorKind.INTERNAL
    )


def as_string(value: object, field: str) -> str:
    """The value, if it is a string."""
    if not isinstance(value, str):
        raise wrong_type(field, "non-string", "string")
    return value


def as_bool(value: object, field: str) -> bool:
    """The value, if it is true or false."""
    if not isinstance(value, bool):
        raise wrong_type(field, "non-boolean", "boolean")
    return value


def as_unsigned(value: object, field: str, verb: str = "parse") -> int:
    """The value, if it is an unsigned integer of 64 bits."""
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise wrong_type(field, "non-unsigned-integer", "unsigned-integer", verb)
    return value


def as_list(value: object, field: str) -> list[Any]:
    """The value, if it is a list."""
    if not isinstance(value, list):
        raise wrong_type(field, "non-array", "array")
    return value


def as_object(value: object, field: str) -> JsonObject:
    """The value, if it is an object."""
    if not isinstance(value, dict):
        raise wrong_type(field, "non-object", "object")
    return value


def _encode_quickly(value: object) -> str:
    # `JSONEncoder.encode` makes the library's encoder in C for each value anew.
    return "".join(_QUICK_ENCODER(value, 0))


_MAKE_ENCODER = getattr(json_encoder, "c_make_encoder", None)
_QUICK_ENCODER: Any = _MAKE_ENCODER and _MAKE_ENCODER(
    None, _ENCODER.default, json_encoder.encode_basestring, None, ":", ",", False, False, True
)
_encode: Callable[[object], str] = _encode_quickly if _QUICK_ENCODER else _ENCODER.encode


def dump(value: object) -> bytes:
    """Compact JSON; surrogates become the bytes that they escaped."""
    return _encode(value).encode("utf-8", "surrogateescape")


class Fragment(bytes):
    """A value of `dump_in_parts` that is JSON already."""


_PARTS_DEPTH = 4
"""From an answer's object to the items of a list in one of its choices."""


def dump_in_parts(value: object, depth: int = _PARTS_DEPTH) -> bytes:
    """As `dump`, in many short steps, for a thread. The encoder keeps Python's lock until its
    value is written, so that the event loop would have no turn meanwhile."""
    parts: list[bytes] = []
    _add_parts(parts, value, depth)
    return b"".join(parts)


def _add_parts(parts: list[bytes], value: object, depth: int) -> None:
    if isinstance(value, Fragment):
        parts.append(value)
    elif depth and isinstance(value, dict):
        parts.append(b"{")
        for number, (name, member) in enumerate(value.items()):
            parts += (b"," * bool(number), dump(name), b":")
            _add_parts(parts, member, depth - 1)
        parts.append(b"}")
    elif depth and isinstance(value, list):
        parts.append(b"[")
        for number, item in enumerate(value):
            parts.append(b"," * bool(number))
            _add_parts(parts, item, depth - 1)
        parts.append(b"]")
    else:
        parts.append(dump(value))

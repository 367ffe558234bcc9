"""Limits of a request that hold on every wire, and the errors that name them."""

from __future__ import annotations

from trimaran.comm.errors import RequestError

MAX_NUMBER = 1 << 16
"""Most inputs of a request, most outputs, and most parameters."""

MAX_DIMENSIONS = 64
"""Most dimensions of a shape: arrays have no more."""

MAX_MEMBERS = 4 * MAX_NUMBER
"""Most objects and members of objects in a JSON text: each takes some 250 bytes of memory."""

MAX_NAME_BYTES = 4 << 10
"""Limit on a request's id and on the names in a message: each answer repeats the id."""

_VALUE_BYTES = 64
"""Bytes of the limit on input for each value: a value that takes two bytes on the wire takes up
to 110 in memory."""


def check_number(what: str, number: int) -> None:
    """Refuse a request of more parts than `MAX_NUMBER`.

    Raises:
        RequestError: with the number and the limit.
    """
    if number > MAX_NUMBER:
        raise RequestError(f"a request has at most {MAX_NUMBER} {what}, got {number}")


def check_dimensions(name: str, number: int) -> None:
    """Refuse an input with more dimensions than `MAX_DIMENSIONS`.

    Raises:
        RequestError: with the number and the limit.
    """
    if number > MAX_DIMENSIONS:
        raise RequestError(
            f"the shape of input '{name}' has {number} dimensions, and at most "
            f"{MAX_DIMENSIONS} are allowed"
        )


def check_id(what: str, text: str) -> str:
    """An id of at most `MAX_NAME_BYTES` bytes.

    Raises:
        RequestError: with the length and the limit.
    """
    # No character takes more than four bytes, and most take one.
    if len(text) > MAX_NAME_BYTES // 4:
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        if num_bytes > MAX_NAME_BYTES:
            raise RequestError(
                f"{what} has {num_bytes} bytes, and at most {MAX_NAME_BYTES} are allowed. Send "
                "a shorter one."
            )
    return text


def max_json_bytes(max_input_bytes: int) -> int:
    """Most bytes of JSON of a request under a limit on input: a string is three times in memory
    while it is parsed (the body, the text of all JSON, and the string)."""
    return max_input_bytes // 4 * 3


def max_num_values(max_input_bytes: int) -> int:
    """Most values of a request (members, elements and parameters) under a limit on input."""
    return max_input_bytes // _VALUE_BYTES


def too_many_values(limit: int, flag: str) -> RequestError:
    """The error of a request whose values would take too much memory."""
    return RequestError(
        f"a request has at most {limit} values (members, elements and parameters), and this "
        f"has more. Send tensors as binary data, or use {flag} to increase the limit."
    )

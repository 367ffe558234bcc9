"""Types of the values that flags of every command take, for argparse."""

from __future__ import annotations

import argparse

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_MAX_WHOLE = (1 << 31) - 1
"""The largest value that gRPC, torch and messages between processes all hold."""
_MAX_BYTES = (1 << 63) - 1
_MAX_WORKERS = 1024
"""Threads of a rank, or processes of a command, at most: as many as Linux binds to cores."""


def boolean(text: str) -> bool:
    """A flag's value ``true`` or ``false``, in the spellings that tritonserver takes."""
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    return _whole(text, 1)


def workers(text: str) -> int:
    """A number of threads or of processes that work side by side, 1 or more."""
    return _whole(text, 1, _MAX_WORKERS)


def count(text: str) -> int:
    """A whole number of 0 or more."""
    return _whole(text, 0)


def size(text: str) -> int:
    """A number of bytes, 1 or more."""
    return _whole(text, 1, _MAX_BYTES)


def _whole(text: str, least: int, most: int = _MAX_WHOLE) -> int:
    is_number = text.isascii() and text.isdecimal()
    if not is_number or (least and not text.strip("0")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    if len(text.lstrip("0")) > len(str(most)) or int(text) > most:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {most}: name less")
    return int(text)


def port(text: str) -> int:
    """A port that can be listened on."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return int(text)


def seconds(text: str) -> float:
    """A time of 0 or more."""
    return _measure(text, "number of seconds")


def amount(text: str) -> float:
    """A number of 0 or more."""
    return _measure(text, "number")


def _measure(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what}, 0 or more")
    return value

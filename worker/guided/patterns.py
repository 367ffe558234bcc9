"""What a regular expression may have to be followed, beyond what its compiler refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trimaran.comm.errors import RequestError

MAX_DEPTH = 250
"""Groups within groups: the compiler calls itself for each, and what is too deep for its
stack ends the process, with the work of everybody."""

_LOOKS = ("(?=", "(?!")
_OTHER = re.compile(r"(\\[\x00-\x7f])|\\?([^\x00-\x7f])")
"""An escape, which stays as it is, or a character beyond ASCII, escaped or not."""


def check_pattern(pattern: str) -> None:
    """Refuse what ends the compiler's process, and what it would leave out.

    Raises:
        RequestError: groups nest too deep, or there is a look ahead or an anchor inside.
    """
    depth = 0
    for place, character in _syntax(pattern):
        depth += (character == "(") - (character == ")")
        if depth > MAX_DEPTH:
            raise RequestError(
                f"groups nest deeper than {MAX_DEPTH} in the regular expression that begins "
                f"with {pattern[:20]!r}. Write it with fewer parentheses."
            )
        if pattern.startswith(_LOOKS, place):
            raise RequestError(
                f"{pattern[place : place + 3]!r} at place {place} of a regular expression "
                "looks ahead, which cannot be followed. Leave it out."
            )
        is_start = place == 0 or pattern[place - 1] in "(|:"
        is_end = place + 1 == len(pattern) or pattern[place + 1] in ")|"
        if (character == "^" and not is_start) or (character == "$" and not is_end):
            raise RequestError(
                f"{character!r} at place {place} is inside of a regular expression, where it "
                f"cannot be followed. Write \\{character} for the character itself, or leave "
                "it out: the whole text matches."
            )


def in_ascii(pattern: str) -> str:
    """The same with other characters as escapes.

    Of a string of a schema the compiler checks only such an expression for characters that
    would end the string.
    """
    return _OTHER.sub(lambda found: found[1] or f"\\u{{{ord(found[2]):x}}}", pattern)


def _syntax(pattern: str) -> Iterator[tuple[int, str]]:
    """The places of characters that do not stand for themselves, or may not."""
    is_escaped, in_class = False, False
    for place, character in enumerate(pattern):
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        else:
            yield place, character

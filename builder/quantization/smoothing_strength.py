"""The strength of SmoothQuant as flags name it; free of torch."""

from __future__ import annotations

from trimaran.builder.weight_only_flags import is_on
from trimaran.comm.errors import ConfigError

DEFAULT_STRENGTH = 0.5
"""That of the method's authors: inputs and weights share the sizes of channels."""


def strength_of(flag: str, word: str | None) -> float:
    """The strength that a flag names; 0.0 if SmoothQuant is off.

    Raises:
        ConfigError: the word is no number, or the number is not from 0 to 1.
    """
    if word is None or not is_on(word):
        return 0.0
    try:
        strength = float(word)
    except ValueError:
        strength = -1.0
    if not 0 <= strength <= 1:
        raise ConfigError(
            f"{flag} {word}: the strength is from 0 to 1. Name {DEFAULT_STRENGTH}, or "
            "a larger number where inputs have large outliers."
        )
    return strength

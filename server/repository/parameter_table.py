"""What a table of known parameters says of one model's parameters: served, without effect or
refused."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.server.repository.model_parameters import ModelParameters

logger = logging.getLogger(__name__)


class Effect(Enum):
    """What setting a parameter does here."""

    SERVED = "takes effect"
    ACCEPTED = "accepted without effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One parameter: how it parses, the values it may have, and its effect."""

    kind: str
    """``str``, ``int``, ``float``, ``bool`` or ``loose_bool``."""
    effect: Effect = Effect.SERVED
    allowed: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    neutral: tuple[str, ...] = ()
    """Values of a refused parameter that ask for nothing."""
    reason: str = ""
    template_name: str = ""
    """The placeholder that fills a required parameter; empty if it may stay unset."""


def served(
    kind: str, *allowed: str, low: float | None = None, high: float | None = None
) -> Known:
    """A parameter that takes effect; it may be limited to some values or to a range."""
    return Known(kind=kind, allowed=allowed, low=low, high=high)


def required(template_name: str) -> Known:
    """A text that must be set."""
    return Known(kind="str", template_name=template_name)


def accepted(kind: str, reason: str) -> Known:
    """A parameter that changes nothing here, which is logged when it is set."""
    return Known(kind=kind, effect=Effect.ACCEPTED, reason=reason)


def refused(kind: str, reason: str, *neutral: str, allowed: tuple[str, ...] = ()) -> Known:
    """A parameter that asks for what is not served, unless its value is neutral."""
    return Known(
        kind=kind, effect=Effect.REFUSED, neutral=neutral, reason=reason, allowed=allowed
    )


def check_parameters(
    path: Path, parameters: ModelParameters, table: Mapping[str, Known]
) -> None:
    """Check each parameter of a model; log what has no effect, warn of unknown keys.

    Raises:
        ConfigError: a value does not parse, is not allowed, or asks for what is not
            served; the message names file, key, value and what is allowed.
    """
    for key in parameters.names:
        if key not in table:
            near = difflib.get_close_matches(key, table, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            logger.warning("%s: parameter '%s' is not known and is ignored%s", path, key, hint)
    for key, known in table.items():
        value = parameters.get_str(key)
        if value is not None:
            _check_value(path, parameters, key, known)
        elif known.template_name:
            raise ConfigError(
                f"{path}: parameter '{key}' is not set. Fill it: trimaran fill-template -i "
                f"{path} {known.template_name}:VALUE"
            )


def _check_value(path: Path, parameters: ModelParameters, key: str, known: Known) -> None:
    value = parameters.get_str(key)
    number = _parse(parameters, key, known.kind)
    if known.allowed and value not in known.allowed:
        raise ConfigError(
            f"{path}: {_documented(key)}parameter '{key}' is {value!r} but must be one of "
            f"{', '.join(known.allowed)}"
        )
    _check_range(path, key, number, known)
    if known.effect is Effect.REFUSED and value not in known.neutral:
        neutral = f" (or set it to {known.neutral[0]})" if known.neutral else ""
        raise ConfigError(
            f"{path}: parameter '{key}' is {value!r}, but {known.reason}. "
            f"Leave it unset{neutral}."
        )
    if known.effect is Effect.ACCEPTED and known.reason:
        logger.info(
            "%s: '%s' = %s is accepted without effect: %s", path, key, value, known.reason
        )


def _parse(parameters: ModelParameters, key: str, kind: str) -> float | None:
    """The value if it is a number; a value that does not parse is refused."""
    if kind == "int":
        return parameters.get_int(key)
    if kind == "float":
        return parameters.get_float(key)
    if kind == "bool":
        parameters.get_bool(key)
    elif kind == "loose_bool":
        parameters.get_loose_bool(key)
    return None


def _check_range(path: Path, key: str, number: float | None, known: Known) -> None:
    if number is None:
        return
    # Written so that nan, which is neither above nor below anything, is refused too.
    is_low = known.low is not None and not number >= known.low
    is_high = known.high is not None and not number <= known.high
    if is_low or is_high:
        bounds = f"at least {known.low:g}" if known.low is not None else ""
        if known.high is not None:
            bounds += f"{' and ' if bounds else ''}at most {known.high:g}"
        raise ConfigError(f"{path}: parameter '{key}' is {number:g} but must be {bounds}")


def _documented(key: str) -> str:
    """The text of the replaced system that tools look for in its log."""
    if key != "gpt_model_type":
        return ""
    return "Invalid gpt_model_type. Must be v1/inflight_batching/inflight_fused_batching. The "

"""The request parameters of ``infer``: their types, and custom ones."""

from __future__ import annotations

from collections.abc import Mapping

from trimaran.comm.errors import RequestError
from trimaran.server.inference.request import InferRequest, ParameterValue
from trimaran.server.protocol.json_access import as_bool, as_string, as_unsigned, too_big

MAX_NUMBER = 1 << 16
"""Of a request's inputs, of its outputs, and of its parameters."""

RESERVED_PREFIX = "triton_"


def check_custom_name(name: str) -> None:
    """Refuse names that the protocol keeps for itself."""
    if name.startswith(RESERVED_PREFIX):
        raise RequestError(
            f"parameter keys starting with '{RESERVED_PREFIX}' are reserved for the server "
            f"and should not be specified, got '{name}'"
        )


def check_number(what: str, number: int) -> None:
    """Refuse what would only keep others waiting: no client has that many of anything."""
    if number > MAX_NUMBER:
        raise RequestError(f"a request has at most {MAX_NUMBER} {what}, got {number}")


def custom_value(name: str, value: object) -> ParameterValue:
    """The value of a custom parameter, if it has a type that parameters can have. An
    integer of more than 64 bits is a double, as clients are used to."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return _double(value)
    if isinstance(value, (str, bool, int, float)):
        return value
    raise RequestError(
        f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'."
    )


def _double(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise too_big() from None


def apply_json_parameters(request: InferRequest, members: Mapping[str, object]) -> bool:
    """Move the ``parameters`` of a JSON request into it. Returns ``binary_data_output``."""
    check_number("parameters", len(members))
    wants_binary = False
    for name, value in members.items():
        if name == "sequence_id":
            is_text = isinstance(value, str)
            request.sequence_id = (
                as_string(value, "'sequence_id'")
                if is_text
                else as_unsigned(value, "'sequence_id'")
            )
        elif name == "sequence_start":
            request.sequence_start = as_bool(value, "'sequence_start'")
        elif name == "sequence_end":
            request.sequence_end = as_bool(value, "'sequence_end'")
        elif name == "priority":
            request.priority = as_unsigned(value, "'priority'")
        elif name == "timeout":
            request.timeout_us = as_unsigned(value, "'timeout'")
        elif name == "binary_data_output":
            wants_binary = as_bool(value, "'binary_data_output'")
        else:
            check_custom_name(name)
            request.parameters[name] = custom_value(name, value)
    return wants_binary

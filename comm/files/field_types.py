"""Values of a JSON object held against the annotations of the dataclass that they are for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trimaran.comm.files.json_types import JsonType, check_types

_TYPES = {
    "int": JsonType.WHOLE,
    "float": JsonType.NUMBER,
    "str": JsonType.TEXT,
    "bool": JsonType.FLAG,
    "dict[str, Any]": JsonType.OBJECT,
    "tuple[int, ...]": JsonType.WHOLES,
}
_OR_NULL = " | None"


def check_field_types(owner: type, values: Mapping[str, Any], *, inside: str = "") -> None:
    """Refuse values of other types than the fields of their names.

    Raises:
        ConfigError: names the key, behind ``inside``, and its value.
    """
    types: dict[str, JsonType] = {}
    for field in fields(owner):
        # Annotations are text, as in all of our modules.
        annotation = str(field.type)
        types[field.name] = _TYPES[annotation.removesuffix(_OR_NULL)]
        if annotation.endswith(_OR_NULL) and values.get(field.name) is None:
            del types[field.name]
    check_types(values, types, inside=inside, may_be_null=False)

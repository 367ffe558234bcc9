"""JSON schemas as guides: what their compiler cannot survive, or would ignore, is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from trimaran.comm.errors import RequestError
from trimaran.worker.guided.patterns import check_pattern

MAX_DEPTH = 100
"""Schemas within schemas: the compiler's time grows with the third power."""

_ONE = (
    "items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties",
    "propertyNames",
)  # fmt: skip
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def check_schema(guide: str) -> None:
    """Refuse a schema that the compiler cannot take.

    What is no JSON, or no schema, passes: the compiler says why in its own words.

    Raises:
        RequestError: the schema, or a regular expression in it, is too deep or cannot be
            followed.
    """
    try:
        root = json.loads(guide)
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        return
    level = [root]
    for _ in range(MAX_DEPTH):
        schemas = [schema for schema in level if isinstance(schema, dict)]
        for schema in schemas:
            _check_patterns(schema)
        level = [inner for schema in schemas for inner in _inner(schema)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> RequestError:
    return RequestError(
        f"guided_decoding_guide has schemas more than {MAX_DEPTH} levels deep. Flatten it, or "
        "let a definition refer to itself with $ref."
    )


def _inner(schema: dict[str, Any]) -> Iterator[Any]:
    for key in _ONE:
        if key in schema:
            yield schema[key]
    for key in _LISTS:
        found = schema.get(key)
        yield from found if isinstance(found, list) else ()
    for key in _MAPS:
        found = schema.get(key)
        yield from found.values() if isinstance(found, dict) else ()


def _check_patterns(schema: dict[str, Any]) -> None:
    patterns = [schema.get("pattern")]
    if isinstance(schema.get("patternProperties"), dict):
        patterns += schema["patternProperties"]
    for pattern in patterns:
        if isinstance(pattern, str):
            check_pattern(pattern)

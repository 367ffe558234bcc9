"""Checks structural tags: texts, schemas and choices among them, as XGrammar writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from trimaran.comm.errors import RequestError
from trimaran.worker.guided.json_schemas import MAX_LEVELS, check_pattern, read_schema

_PARTS = {
    "const_string": (),
    "any_text": (),
    "token": (),
    "json_schema": (),
    "regex": (),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("content",),
    "triggered_tags": ("tags",),
    "tags_with_separator": ("tags",),
    "optional": ("content",),
    "star": ("content",),
    "plus": ("content",),
}
"""The members of each type that hold further forms."""


def read_structural_tag(guide: str) -> tuple[str, set[str]]:
    """The tag as the compiler follows it, and the regular expressions of its schemas.

    Raises:
        RequestError: no structural tag, a form of an unknown type, or what `read_schema`
            refuses.
    """
    try:
        root = json.loads(guide)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"guided_decoding_guide is no JSON, as a structural tag must be: {error}"
        ) from None
    if not isinstance(root, dict) or not isinstance(root.get("format"), dict):
        raise RequestError(
            "guided_decoding_guide is no structural tag: it must be a JSON object whose "
            "'format' is an object"
        )
    patterns: set[str] = set()
    level = [root["format"]]
    for _ in range(MAX_LEVELS):
        for form in level:
            patterns |= _check(form)
        level = [part for form in level for part in _parts_of(form)]
        if not level:
            return json.dumps(root), patterns
    raise RequestError(
        f"guided_decoding_guide has forms more than {MAX_LEVELS} levels deep. Flatten it."
    )


def _check(form: Any) -> set[str]:
    """Check one form, and write its schema as the compiler follows it, in place."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in _PARTS:
        raise RequestError(
            f"guided_decoding_guide has a form of the type {str(kind)[:50]!r} but must be of "
            f"{', '.join(_PARTS)}"
        )
    if kind == "regex":
        check_pattern(str(form.get("pattern", "")))
    if kind != "json_schema":
        return set()
    text, patterns = read_schema(json.dumps(form.get("json_schema")))
    form["json_schema"] = json.loads(text)
    return patterns


def _parts_of(form: dict[str, Any]) -> Iterator[Any]:
    for name in _PARTS[form["type"]]:
        found = form.get(name)
        yield from found if isinstance(found, list) else [found]

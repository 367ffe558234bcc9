"""Checks JSON schemas and regular expressions: refuses what the compiler cannot serve."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trimaran.comm.errors import RequestError

MAX_GROUP = 250
"""Deepest nesting of groups: the compiler recurses for each, and a stack overflow would end
the process with all its requests."""

_LOOKS = ("(?=", "(?!")
_OTHER = re.compile(r"(\\[\x00-\x7f])|\\?([^\x00-\x7f])")
"""An escape, which stays unchanged, or a character beyond ASCII, escaped or not."""


def check_pattern(pattern: str) -> None:
    """Refuse an expression that would crash the compiler's process or that the compiler would
    partly ignore.

    Raises:
        RequestError: groups nest too deep, or the expression has a lookahead or an inner
        anchor.
    """
    depth = 0
    for index, character in _syntax(pattern):
        depth += (character == "(") - (character == ")")
        if depth > MAX_GROUP:
            raise RequestError(
                f"groups nest deeper than {MAX_GROUP} in the regular expression that begins "
                f"with {pattern[:20]!r}. Write it with fewer parentheses."
            )
        if pattern.startswith(_LOOKS, index):
            raise RequestError(
                f"{pattern[index : index + 3]!r} at position {index} of a regular expression "
                "looks ahead, which cannot be followed. Leave it out."
            )
        is_start = index == 0 or pattern[index - 1] in "(|:"
        is_end = index + 1 == len(pattern) or pattern[index + 1] in ")|"
        if (character == "^" and not is_start) or (character == "$" and not is_end):
            raise RequestError(
                f"{character!r} at position {index} is inside of a regular expression, where "
                f"it cannot be followed. Write \\{character} for the character itself or leave "
                "it out: the whole text matches."
            )


def in_ascii(pattern: str) -> str:
    """The expression with all characters beyond ASCII as escapes.

    In a string of a schema, the compiler checks only ASCII expressions for characters that
    would end the string.
    """
    return _OTHER.sub(lambda found: found[1] or f"\\u{{{ord(found[2]):x}}}", pattern)


def _syntax(pattern: str) -> Iterator[tuple[int, str]]:
    """(position, character) of all unescaped characters outside of character classes."""
    is_escaped, in_class = False, False
    for index, character in enumerate(pattern):
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        else:
            yield index, character


MAX_LEVELS = 100
"""Deepest nesting of schemas: the compiler's time grows with the third power of the depth."""

_IGNORED = {
    "not": None,
    "if": None,
    "then": None,
    "else": None,
    "contains": None,
    "minContains": None,
    "maxContains": None,
    "dependentRequired": None,
    "dependentSchemas": None,
    "dependencies": None,
    "$dynamicRef": None,
    "$recursiveRef": None,
    "uniqueItems": False,
}
"""Keywords without effect, with the value that asks for nothing."""

# The compiler follows the first of these keys in a schema, and ignores its siblings.
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_ONE = (
    "items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties",
    "propertyNames",
)  # fmt: skip
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_NAMES_ALONE = ("patternProperties", "propertyNames")
_SAY_TYPE = ("type", "properties", "additionalProperties", "items", "prefixItems", *_WHOLE)
"""Keywords that give a schema a type; without any of them the others have no effect."""

_NEED_TYPE = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
    "maxLength", "pattern", "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip
_ASSERTIONS = frozenset({"required", *_SAY_TYPE, *_NEED_TYPE, *_ONE, *_LISTS, *_NAMES_ALONE})
"""Keywords with an effect; others are notes to readers."""

_FORMATS = (
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri",
    "uri-reference", "uri-template", "json-pointer", "relative-json-pointer",
)  # fmt: skip
"""Values of ``format`` that the compiler follows; others are notes to readers."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int, float),
    "number": (int, float),
}


def read_schema(guide: str) -> tuple[str, set[str]]:
    """The schema in the form that the compiler follows, and the regular expressions of its
    strings.

    Text that is not JSON, or not a schema, passes: the compiler reports its own error.

    Raises:
        RequestError: the compiler would ignore a keyword, or the schema is too deep.
    """
    try:
        root = json.loads(guide)
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        return guide, set()
    level, patterns, has_changed = [root], set(), False
    for _ in range(MAX_LEVELS):
        schemas = [schema for schema in level if isinstance(schema, dict)]
        for schema in schemas:
            _check_keywords(schema)
            has_changed |= _spell_patterns(schema)
            patterns.update(_patterns(schema))
        level = [inner for schema in schemas for inner in _inner(schema)]
        if not level:
            return json.dumps(root) if has_changed else guide, patterns
    raise _too_deep()


def _too_deep() -> RequestError:
    return RequestError(
        f"guided_decoding_guide has schemas more than {MAX_LEVELS} levels deep. Flatten it, or "
        "let a definition refer to itself with $ref."
    )


def _inner(schema: dict[str, Any]) -> Iterator[Any]:
    for key in _ONE:
        if key not in schema:
            continue
        inner = schema[key]
        # A property's name is a string even if its schema has no type.
        named = key == "propertyNames" and isinstance(inner, dict)
        yield {"type": "string", **inner} if named else inner
    for key in _LISTS:
        found = schema.get(key)
        yield from found if isinstance(found, list) else ()
    for key in _MAPS:
        found = schema.get(key)
        yield from found.values() if isinstance(found, dict) else ()


def _check_keywords(schema: dict[str, Any]) -> None:
    for key, harmless in _IGNORED.items():
        if key in schema and (harmless is None or schema[key] != harmless):
            raise _refused(key, "cannot be followed", "Leave it out")
    reference = schema.get("$ref", "#")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        raise _refused(
            "$ref",
            f"is {reference[:100]!r}, which is no place in the schema",
            "Copy what it names into $defs, and refer to '#/$defs/NAME'",
        )
    for key in _NEED_TYPE:
        if key in schema and not any(each in schema for each in _SAY_TYPE):
            raise _refused(key, "has no effect without 'type'", "Say the type")
    _check_whole(schema)
    _check_names(schema)
    _check_strings(schema)


def _check_whole(schema: dict[str, Any]) -> None:
    key = next((key for key in _WHOLE if key in schema), None)
    if key is None:
        return
    value = schema[key]
    if key in _LISTS and value == []:
        raise _refused(key, "is empty, which no value follows", "Name a schema in it")
    if key == "allOf" and isinstance(value, list) and len(value) > 1:
        raise _refused(key, "has several schemas", "Merge them into one")
    for other in schema:
        if other == key or other not in _ASSERTIONS:
            continue
        if other == "type" and _says_type(schema, key):
            continue
        raise _refused(
            other, f"has no effect beside '{key}'", f"Move it into what '{key}' stands for"
        )


def _says_type(schema: dict[str, Any], key: str) -> bool:
    """Whether all values that ``key`` allows have the schema's type anyway."""
    asked, value = schema["type"], schema[key]
    if key in _LISTS:
        return isinstance(value, list) and all(
            isinstance(each, dict) and each.get("type") == asked for each in value
        )
    values = value if key == "enum" and isinstance(value, list) else [value]
    types = asked if isinstance(asked, list) else [asked]
    return key != "$ref" and all(any(_is_of(v, t) for t in types) for v in values)


def _is_of(value: Any, name: Any) -> bool:
    if name in ("integer", "number") and isinstance(value, bool):
        return False
    if name == "integer" and isinstance(value, float) and not value.is_integer():
        return False
    return isinstance(value, _TYPES.get(name, ())) if isinstance(name, str) else False


def _check_names(schema: dict[str, Any]) -> None:
    """Check that each required property is declared, in the only form that is followed."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list):
        return
    for name in required:
        if name not in properties:
            raise _refused(
                "required",
                f"names {str(name)[:100]!r}, which 'properties' does not have",
                "Add it there",
            )
    for key in _NAMES_ALONE:
        if properties and key in schema:
            raise _refused(key, "has no effect beside 'properties'", "Leave out one of them")


def _check_strings(schema: dict[str, Any]) -> None:
    for pattern in _patterns(schema):
        check_pattern(pattern)
    other = "pattern" if "pattern" in schema else "format"
    if other == "pattern" or schema.get("format") in _FORMATS:
        for key in ("minLength", "maxLength"):
            if key in schema:
                raise _refused(
                    key,
                    f"has no effect beside '{other}'",
                    "Use a pattern that counts, as '^[a-z]{2,5}$'",
                )
    if schema.get("type") == "number" and "multipleOf" in schema:
        raise _refused("multipleOf", "is followed by integers alone", "Leave it out")


def _spell_patterns(schema: dict[str, Any]) -> bool:
    """Write the regular expressions in ASCII, in place; returns whether any changed."""
    patterns = _patterns(schema)
    if all(pattern.isascii() for pattern in patterns):
        return False
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = in_ascii(schema["pattern"])
    names = schema.get("patternProperties")
    if isinstance(names, dict):
        schema["patternProperties"] = {in_ascii(name): names[name] for name in names}
    return True


def _patterns(schema: dict[str, Any]) -> list[str]:
    patterns = [schema.get("pattern")]
    if isinstance(schema.get("patternProperties"), dict):
        patterns += schema["patternProperties"]
    return [pattern for pattern in patterns if isinstance(pattern, str)]


def _refused(key: str, why: str, remedy: str) -> RequestError:
    return RequestError(f"guided_decoding_guide: '{key}' of a JSON schema {why}. {remedy}.")

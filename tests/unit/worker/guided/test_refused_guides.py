"""Guides that cannot be followed, in whole or in part, and guides that only look so."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest

from tests.unit.worker.guided_engine import (
    TOKENIZER,
    follows,
    ids,
    make_engine,
    submit,
    text_of,
)


@pytest.fixture(scope="module")
def driver():
    made = make_engine()
    yield made
    made.engine.shutdown()


def nested(pattern, depth):
    return "(" * depth + pattern + ")" * depth


@pytest.mark.parametrize(
    ("kind", "guide"),
    [
        ("regex", nested("a", 300)),
        ("json_schema", json.dumps({"type": "string", "pattern": nested("a", 300_000)})),
        ("json_schema", json.dumps({"propertyNames": {"pattern": nested("a", 100_000)}})),
        ("json_schema", json.dumps({"patternProperties": {nested("a", 100_000): {}}})),
        ("ebnf_grammar", f'root ::= Regex("{nested("a", 100_000)}")'),
    ],
)
def test_deeply_nested_groups_of_a_regular_expression_crash_no_process(driver, kind, guide):
    good = submit(driver, "regex")
    bad = submit(driver, kind, guide)

    driver.run()

    assert "groups nest deeper than 250" in driver.failed[bad]
    assert follows("regex", text_of(driver, good))


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)b", "looks ahead"),
        ("(?!a)b", "looks ahead"),
        ("a^b", "'^' at"),
        ("a$b", "'$' at"),
    ],
)
def test_unsupported_parts_of_a_regular_expression_are_refused(driver, pattern, reason):
    guides = [
        ("regex", pattern),
        ("json_schema", json.dumps({"type": "string", "pattern": pattern})),
        ("ebnf_grammar", f'root ::= "x" Regex("{pattern}")'),
    ]
    requests = [submit(driver, *guide) for guide in guides]

    driver.run()

    assert all(reason in driver.failed[request] for request in requests)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("^a{2}$", "aa"), ("(^ab$)", "ab"), ("x[$^(]{2}y|z", None), (r"\(\$\^", "($^")],
)
def test_anchors_at_the_ends_and_characters_that_look_like_syntax_are_followed(
    driver, pattern, expected
):
    request = submit(driver, "regex", pattern)

    driver.run()

    text = text_of(driver, request)
    assert text == expected or (expected is None and re.fullmatch(pattern, text))


@pytest.mark.parametrize("depth", [101, 1000, 30_000])
def test_a_schema_nested_too_deep_is_refused_without_minutes_of_work(driver, depth):
    guide = '{"type": "array", "items": ' * depth + "{}" + "}" * depth
    started = time.monotonic()
    request = submit(driver, "json_schema", guide)

    driver.run()

    assert "more than 100 levels deep" in driver.failed[request]
    assert time.monotonic() - started < 10.0


def test_a_schema_with_a_hundred_levels_is_served(driver):
    guide = '{"type": "array", "items": ' * 99 + '{"type": "null"}' + "}" * 99
    request = submit(driver, "json_schema", guide)

    driver.run()

    assert request not in driver.failed


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "integer", "not": {"minimum": 5}}, "'not' of a JSON schema cannot"),
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, "'uniqueItems' of"),
        ({"type": "array", "contains": {"const": 1}}, "'contains' of"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired' of"),
        ({"type": "object", "required": ["a"]}, "names 'a', which 'properties' does not"),
        ({"type": "object", "properties": {"a": {"if": {}}}}, "'if' of"),
        (
            {"$defs": {"a": {"minLength": 2}}, "$ref": "#/$defs/a"},
            "has no effect without 'type'",
        ),
        ({"$defs": {"a": {}}, "$ref": "#/$defs/a", "type": "null"}, "beside '$ref'"),
        ({"$ref": "http://example.com/schema"}, "is no place in the schema"),
        ({"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}}, "is no place in the schema"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3, "type": "integer"}]}, "has several"),
        ({"anyOf": [{"type": "null"}, {"type": "boolean"}], "const": 1}, "beside 'const'"),
        ({"anyOf": [{"type": "null"}, {"type": "boolean"}], "type": "null"}, "beside 'anyOf'"),
        ({"anyOf": []}, "'anyOf' of a JSON schema is empty"),
        ({"enum": [1, "a"], "type": "string"}, "'type' of a JSON schema has no effect"),
        ({"type": "string", "pattern": "a+", "minLength": 3}, "beside 'pattern'"),
        ({"type": "string", "format": "email", "maxLength": 9}, "beside 'format'"),
        ({"type": "number", "multipleOf": 0.5}, "is followed by integers alone"),
        (
            {"properties": {"a": {}}, "patternProperties": {"^x": {"type": "null"}}},
            "has no effect beside 'properties'",
        ),
    ],
)
def test_unsupported_keywords_of_a_schema_are_refused_by_name(driver, schema, reason):
    good = submit(driver, "regex")
    bad = submit(driver, "json_schema", json.dumps(schema))

    driver.run()

    assert reason in driver.failed[bad]
    assert follows("regex", text_of(driver, good))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "enum": ["to", "be"], "title": "Word", "default": "to"},
        {"type": ["string", "null"], "enum": ["to", None]},
        {"type": "integer", "const": 7, "$comment": "x"},
        {"type": "object", "anyOf": [{"type": "object", "properties": {"a": {"const": 1}}}]},
        {"allOf": [{"$ref": "#/$defs/a"}], "description": "x", "$defs": {"a": {"const": 1}}},
        {"oneOf": [{"const": 1}, {"const": 2}], "discriminator": {"propertyName": "a"}},
        {"type": "array", "items": {"type": "null"}, "maxItems": 1, "uniqueItems": False},
        {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "maxProperties": 1},
        {"type": "string", "format": "colour", "maxLength": 3},
        {"properties": {"not": {"type": "null"}}, "required": ["not"]},
        {"enum": [{"not": 1, "if": 2}]},
        {"anyOf": [{"const": 1}, {"const": 2}], "x-order": 3, "contentMediaType": "text/x"},
        {"type": "integer", "multipleOf": 7, "minimum": 7, "maximum": 14},
    ],
)
def test_schemas_with_annotations_and_supported_keywords_are_served(driver, schema):
    request = submit(driver, "json_schema", json.dumps(schema), max_tokens=60)

    driver.run()

    assert request not in driver.failed


@pytest.mark.parametrize("limits", [{"minLength": 2, "maxLength": 4}, {"maxLength": 600}])
def test_a_string_with_a_length_has_no_unescaped_control_characters(driver, limits):
    # The bias makes control characters as likely as possible.
    bias = np.zeros(TOKENIZER.get_vocab_size(), dtype="<f4")
    bias[ids("\x01") + ids("\x1f") + ids("\t")] = 100.0
    schema = json.dumps({"type": "string", **limits})

    request = submit(
        driver, "json_schema", schema, embedding_bias=bias.tobytes(), max_tokens=20
    )
    driver.run()

    text = TOKENIZER.decode(driver.output(request))
    assert re.match('"[^\x00-\x1f]{2}', text), text
    assert not re.search("[\x00-\x1f]", text), text


@pytest.mark.parametrize(
    ("kind", "guide"),
    [
        ("json_schema", '{"enum": ["' + "long" * 50_000),
        ("ebnf_grammar", "root ::= " + "long" * 50_000),
    ],
)
def test_an_error_does_not_repeat_a_long_guide(driver, kind, guide):
    request = submit(driver, kind, guide)

    driver.run()

    assert "that can be followed: " in driver.failed[request]
    assert len(driver.failed[request]) < 1000


@pytest.mark.parametrize("pattern", ['a"b', r"\t+", r"C:\\[a-z]+", "[\\n]"])
def test_a_pattern_that_needs_escaped_characters_is_refused(driver, pattern):
    request = submit(driver, "json_schema", json.dumps({"type": "string", "pattern": pattern}))

    driver.run()

    assert "no place in a JSON string" in driver.failed[request]


@pytest.mark.parametrize(
    "pattern", ["", "é[à-ü]?", '^(?:a|")$', r"[^\w ]{1,3}", "日本|😀", r"\s"]
)
def test_strings_of_supported_patterns_are_json(driver, pattern):
    schema = json.dumps({"type": "string", "pattern": pattern})
    requests = [
        submit(driver, "json_schema", schema, seed=seed, temperature=2.0) for seed in range(4)
    ]

    driver.run()

    assert all(
        re.fullmatch(pattern, json.loads(text_of(driver, request))) for request in requests
    )


@pytest.mark.parametrize("pattern", ["é[^a]", r"(日|\é|\u{1f600})\W", "[^日]"])
def test_a_pattern_with_letters_of_any_script_keeps_the_string_valid(driver, pattern):
    bias = np.zeros(TOKENIZER.get_vocab_size(), dtype="<f4")
    bias[ids('"') + ids("\x01")] = 100.0
    schema = json.dumps({"type": "string", "pattern": pattern}, ensure_ascii=False)

    request = submit(driver, "json_schema", schema, embedding_bias=bias.tobytes())
    driver.run()

    assert re.fullmatch(
        pattern.replace(r"\u{1f600}", "\U0001f600"), json.loads(text_of(driver, request))
    )


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        ("x", "no JSON"),
        ("[]", "no structural tag"),
        ({"type": "grammar", "grammar": "root ::= root"}, "of the type 'grammar'"),
        ({"type": "optional", "content": {"type": "json_schema", "json_schema": {"not": {}}}},
         "'not' of a JSON schema"),
        ({"type": "sequence", "elements": [{"type": "regex", "pattern": "(?=a)b"}]},
         "looks ahead"),
    ],
)  # fmt: skip
def test_a_structural_tag_that_cannot_be_followed_is_refused(driver, guide, reason):
    if isinstance(guide, dict):
        guide = json.dumps({"type": "structural_tag", "format": guide})
    bad = submit(driver, "structural_tag", guide)
    driver.run()
    assert reason in driver.failed[bad]


def test_strings_of_limited_length_hold_no_control_characters_in_a_structural_tag(driver):
    schema = {"type": "string", "minLength": 3, "maxLength": 8}
    form = {"type": "json_schema", "json_schema": schema}
    guide = json.dumps({"type": "structural_tag", "format": form})
    requests = [
        submit(driver, "structural_tag", guide, seed=seed, temperature=3.0) for seed in range(8)
    ]
    driver.run()
    for request in requests:
        assert 3 <= len(json.loads(text_of(driver, request))) <= 8

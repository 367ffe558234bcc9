"""Tool calls of each family: spellings, reasoning beside calls, and grammars of calls."""

import json
import random
import sys
import tracemalloc

import numpy as np
import pytest
import xgrammar
from parsed_outputs import expected, parsed, segment
from written_calls import TOOLS, WRITE, hermes

from trimaran.server.openai.parsing.argument_types import ArgumentType, argument_type
from trimaran.server.openai.parsing.output_parser import OutputParser
from trimaran.server.openai.parsing.reasoning_formats import (
    REASONING_FORMATS,
    Reasoning,
    reasoning_of_template,
)
from trimaran.server.openai.parsing.scanner import Kind
from trimaran.server.openai.parsing.structural_tags import Pieces
from trimaran.server.openai.parsing.tool_formats import FORMATS, format_of_template

NAMES = sorted(FORMATS)


def work_of_a_delta(parser, text):
    """Calls of functions and the bytes that the parser allocates for one delta."""
    num_events = 0

    def count(*_):
        nonlocal num_events
        num_events += 1

    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        sys.setprofile(count)
        parser.feed(text)
        sys.setprofile(None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        sys.setprofile(None)
        tracemalloc.stop()
    return num_events, peak - before


@pytest.mark.parametrize("name", NAMES)
def test_the_work_of_a_delta_does_not_grow_with_the_text(name):
    before, _, _ = WRITE[name]([("search", {"query": "Köln"})]).partition("Köln")
    parser = OutputParser(FORMATS[name], TOOLS)
    parser.feed(before + "x, y " * 10)
    work_of_a_delta(parser, "x, y ")
    num_events, num_bytes = work_of_a_delta(parser, "x, y ")
    for _ in range(2_000):
        parser.feed("x, y " * 10)
    later_events, later_bytes = work_of_a_delta(parser, "x, y ")
    assert later_events == num_events
    # A copy of the text would take 100,000 bytes.
    assert max(num_bytes, later_bytes) < 20_000


@pytest.mark.matrix(keep=20)
@pytest.mark.parametrize(
    "text",
    [
        "A plain answer.", "  spaces stay  ", "a < b <tool", "[1, 2]", '{"name": 5}', "{}",
        '{"name": "unknown", "parameters": {}}', "[no(call)]", "<tool_call> no", "[TOOL", "",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_is_no_call_stays_a_text(name, text):
    for parts in ([text], list(text)):
        found = segment(name, parts)
        assert "".join(t for _, t in found).strip() == text.strip()
        assert {kind for kind, _ in found} <= {Kind.TEXT}


@pytest.mark.matrix(keep=8)
@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_ends_early_is_told_as_far_as_it_came(name):
    text = WRITE[name]([("search", {"query": "long enough"})])
    for end in range(len(text)):
        found = segment(name, text[:end])
        assert len([kind for kind, _ in found if kind is Kind.CALL]) <= 1


def test_reasoning_comes_before_text_and_calls():
    calls = [("search", {"query": "x"})]
    text = f"<think>\nHm, 1 < 2.\n</think>\n\nSo.\n{hermes(calls)}"
    for parts in ([text], list(text)):
        found = segment("hermes", parts, reasoning=Reasoning())
        assert found[:2] == [(Kind.REASONING, "Hm, 1 < 2."), (Kind.TEXT, "So.")]
        assert parsed(found[2:]) == expected(calls)
    opened = text.removeprefix("<think>\n")
    found = segment("hermes", opened, reasoning=Reasoning(), starts_in_reasoning=True)
    assert found[0] == (Kind.REASONING, "Hm, 1 < 2.")
    assert segment("hermes", " no", reasoning=Reasoning()) == [(Kind.TEXT, " no")]


UNCLOSED = ("kimi_k2", "deepseek_v3", "minimax_m2", "minimax_m3", "deepseek_v32", "deepseek_v4",
            "glm45", "qwen3_coder", "seed_oss", "kimi_k3", "cohere", "lfm2")  # fmt: skip


@pytest.mark.parametrize("name", UNCLOSED)
def test_a_call_ends_a_reasoning_that_was_left_open(name):
    calls = [("search", {"query": "x"})]
    opening = FORMATS[name].ends_reasoning[0]
    text = f"<think>Not {opening} yet.\n{WRITE[name](calls)} So."
    for cut in range(len(text)):
        found = segment(name, [text[:cut], text[cut:]], reasoning=Reasoning())
        assert found[0] == (Kind.REASONING, f"Not {opening} yet."), cut
        assert parsed(found[1:3]) == expected(calls)
        assert found[3:] == [(Kind.TEXT, "So.")]


@pytest.mark.parametrize("name", UNCLOSED)
def test_a_quoted_opening_in_closed_reasoning_is_reasoning(name):
    opening = FORMATS[name].ends_reasoning[0]
    calls = [("search", {"query": "x"})]
    text = f"<think>Is {opening} right?</think>So.\n{WRITE[name](calls)}"
    for cut in range(len(text)):
        found = segment(name, [text[:cut], text[cut:]], reasoning=Reasoning())
        assert found[:2] == [(Kind.REASONING, f"Is {opening} right?"), (Kind.TEXT, "So.")], cut
        assert parsed(found[2:]) == expected(calls)


def test_a_text_between_frames_is_told_without_them():
    for name, wanted in (("kimi_k3", "Yes. "), ("cohere", "Yes. ")):
        opening, closing, *_ = FORMATS[name].frames
        form = REASONING_FORMATS[name]
        for text in (f"{opening}Yes. {closing}", f"Yes. {closing}"):
            for cut in range(len(text)):
                parts = [text[:cut], text[cut:]]
                parser = OutputParser(FORMATS[name])
                found = [s for part in parts for s in parser.feed(part)] + parser.finish()
                assert "".join(each.text for each in found) == wanted
            reasoned = f"{form.opening}Hm.{form.closing}{text}"
            found = segment(name, reasoned, reasoning=form)
            assert found[0] == (Kind.REASONING, "Hm.")
            assert [kind for kind, _ in found[1:]] == [Kind.TEXT]


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_each_form_of_reasoning_is_read_however_it_is_cut(name):
    form = REASONING_FORMATS[name]
    assert reasoning_of_template(f"{{{{ x }}}}{form.opening}..{form.closing}") == name
    calls = [("search", {"query": "x"})]
    text = f"{form.opening}\nHm, 1 < 2.\n{form.closing}\nSo.\n{hermes(calls)}"
    for cut in range(len(text)):
        found = segment("hermes", [text[:cut], text[cut:]], reasoning=form)
        assert found[:2] == [(Kind.REASONING, "Hm, 1 < 2."), (Kind.TEXT, "So.")], cut
    assert segment("hermes", "So.", reasoning=form) == [(Kind.TEXT, "So.")]


def test_special_tokens_of_calls_end_a_reasoning_that_was_left_open():
    calls = [("search", {"query": "x"})]
    text = f"<think>Hm.\n{WRITE['kimi_k2'](calls)} So."
    for cut in range(len(text)):
        found = segment("kimi_k2", [text[:cut], text[cut:]], reasoning=Reasoning())
        assert found[0] == (Kind.REASONING, "Hm.")
        assert parsed(found[1:3]) == expected(calls)
        assert found[3:] == [(Kind.TEXT, "So.")]


@pytest.mark.matrix(keep=3)
@pytest.mark.parametrize("name", NAMES)
def test_text_that_was_told_takes_no_memory(name):
    parser = OutputParser(FORMATS[name], TOOLS, reasoning=Reasoning())
    parser.feed("<think>Hm.</think>So. ")
    tracemalloc.start()
    try:
        for _ in range(5_000):
            parser.feed("東京 x.")
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 20_000


def test_other_spellings_of_a_call_are_read():
    named = 'One: [TOOL_CALLS]search[ARGS]{"query": "x"}[TOOL_CALLS]search{"query": "y"}'
    calls = [("search", {"query": "x"}), ("search", {"query": "y"})]
    assert parsed(segment("mistral", named)[1:]) == expected(calls)
    late = '<tool_call>{"arguments": {"query": "x"}, "id": 1, "name": "search"}</tool_call>'
    assert parsed(segment("hermes", late)) == expected(calls[:1])
    quoted = '<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"x\\"}"}</tool_call>'
    assert parsed(segment("hermes", quoted)) == expected(calls[:1])
    half = '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'
    assert parsed(segment("hermes", half)) == expected([("\ufffd", {})])
    twice = quoted.replace('"}</tool', '", "name": "two", "parameters": {}}</tool')
    assert parsed(segment("hermes", twice)) == expected(calls[:1])
    bare = '<|python_tag|>{"name": "search", "parameters": {"query": "x"}}'
    assert parsed(segment("llama3", bare)) == expected(calls[:1])


def test_further_spellings_of_tags_and_objects_are_read():
    calls = [("search", {"query": "x"})]
    bare = "I look.\n<function=search>\n<parameter=query>\nx\n</parameter>\n</function>"
    assert parsed(segment("qwen3_coder", bare)[1:]) == expected(calls)
    inline = "<tool_call>search<arg_key>query</arg_key><arg_value>x</arg_value></tool_call>"
    assert parsed(segment("glm45", inline)) == expected(calls)
    assert parsed(segment("glm45", "<tool_call>now\n</tool_call>")) == expected([("now", {})])
    assert segment("glm45", "<tool_call>no\nmore") == [(Kind.TEXT, "<tool_call>no\nmore")]
    json_like = '<|tool_call>call:search{"query": "x", <|"|>n<|"|>: -1.5}<tool_call|>'
    assert parsed(segment("gemma4", json_like)) == expected(
        [("search", {"query": "x", "n": -1.5})]
    )
    numbered = '[TOOL_CALLS]search[CALL_ID]c00000001[ARGS]{"query": "x"}'
    parser = OutputParser(FORMATS["mistral"], TOOLS)
    assert parser.feed(numbered)[0].call_id == "c00000001"
    assert parsed(segment("mistral", numbered)) == expected(calls)
    deep = f"<|tool_call>call:search{{query:{'[' * 5000}"
    assert segment("gemma4", deep)[0] == (Kind.CALL, "search")
    singular = WRITE["kimi_k2"](calls).replace("tool_calls_section", "tool_call_section")
    assert parsed(segment("kimi_k2", f"So.{singular}")[1:]) == expected(calls)
    parser = OutputParser(FORMATS["kimi_k2"], TOOLS)
    found = parser.feed(WRITE["kimi_k2"](calls * 2))
    ids = [each.call_id for each in found if each.kind is Kind.CALL]
    assert ids == ["functions.search:0", "functions.search:1"]
    assert {each.text for each in found if each.call_id} == {"search"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "true", "true"),
        ({"$ref": "#/$defs/Unit"}, " 2 ", "2"),
        ({"allOf": [{"$ref": "#/$defs/Unit"}]}, "c", "c"),
        ({"enum": [1, "2"]}, "1", 1),
        ({"type": "boolean"}, "True", True),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "integer"}, "many", "many"),
        ({"type": "array"}, "['a', True]", ["a", True]),
        ({"type": "array"}, "[a", "[a"),
        ({}, "12", 12),
        ({"$ref": "#/$defs/none"}, "x", "x"),
    ],
)
def test_a_value_in_a_tag_has_the_type_that_its_schema_says(schema, text, value):
    root = {"properties": {"a": schema}, "$defs": {"Unit": {"enum": ["c", "2"]}}}
    for name, written in (
        ("glm45", f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n"),
        ("qwen3_coder", f"<tool_call><function=f><parameter=a>\n{text}\n</parameter>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f">'
         f'<parameter name="a">{text}</parameter>'),
    ):  # fmt: skip
        parser = OutputParser(FORMATS[name], {"f": root})
        found = parser.feed(written + "</")
        assert json.loads("".join(each.text for each in found[1:])) == {"a": value}


def test_a_template_tells_its_form():
    marks = {"<|tool_calls_section_begin|>": "kimi_k2", "<minimax:tool_call>": "minimax_m2",
             "<tool_call>{name}<arg_key>": "glm45", "<|tool_call>": "gemma4",
             "'｜DSML｜' + 'function_calls>' + 'tool_calls>'": "deepseek_v32",
             "<function=name>{}": "", "]<]minimax[>[<tool_call>": "minimax_m3",
             "<|open|>call<|sep|><|close|>": "kimi_k3", "<|START_ACTION|>": "cohere",
             "<|tool_call_start|>[": "lfm2",
             '{"tool_name": "", "parameters": ""}': ""}  # fmt: skip
    for mark, name in marks.items():
        assert format_of_template(f"{{{{ tools }}}}{mark}") == name
    assert format_of_template("{{ tools }}<tool_call>") == "hermes"
    assert format_of_template("{{ tools }}<tool_call><function=<parameter=") == "qwen3_coder"
    assert format_of_template("{{ tools }}[TOOL_CALLS]") == "mistral"
    assert format_of_template("{{ tools }}<|channel|>analysis") == "harmony"
    assert format_of_template("<tool_call>") == ""
    composed = "{{ tools }}{% macro o(n) %}<|open|>{{ n }}<|sep|>{% endmacro %}<|close|>think"
    assert format_of_template(composed) == reasoning_of_template(composed) == "kimi_k3"


_ENDS = (
    "\n</parameter>",
    "</｜DSML｜parameter>",
    "</arg_value>",
    '<|"|>',
    "<escape>",
    "<|close|>argument<|sep|>",
    "]<]minimax[>[</",
    '"',
    "}",
)


def generated(matcher, vocabulary, draw, most):
    """A text that the grammar allows, drawn id by id, with a liking for ends of values."""
    mask, text = xgrammar.allocate_token_bitmask(1, len(vocabulary)), ""
    for _ in range(most):
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
        allowed = {vocabulary[i]: i for i in np.flatnonzero(bits[: len(vocabulary)]) if i}
        if not allowed or (bits[0] and draw.random() < 0.3):
            return text
        ends = [(k, end[k]) for end in _ENDS for k in range(len(end)) if text.endswith(end[:k])]
        liked = [each for each in sorted(ends) if each[1] in allowed]
        longest = [character for k, character in liked if k == liked[-1][0]]
        is_liked = liked and draw.random() < (0.95 if liked[-1][0] else 0.3)
        character = draw.choice(longest) if is_liked else draw.choice(list(allowed))
        assert matcher.accept_token(int(allowed[character]))
        text += character
    return None


@pytest.mark.matrix(keep=4)
@pytest.mark.parametrize("name", NAMES)
def test_what_the_grammar_of_a_form_allows_is_read_as_calls(name):
    vocabulary = ["</s>", *(chr(c) for c in range(32, 127)), "\n", "｜", "▁", "ü"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    draw, num_read = random.Random(name), 0
    for is_one in (True, False):
        form = FORMATS[name].structure(TOOLS, Pieces(), is_one=is_one)
        tag = json.dumps({"type": "structural_tag", "format": form})
        compiled = compiler.compile_structural_tag(tag)
        for _ in range(8):
            text = generated(xgrammar.GrammarMatcher(compiled), vocabulary, draw, 1500)
            if text is None:
                continue
            found = parsed(segment(name, [text]))
            assert {kind for kind, _ in found} == {Kind.CALL, Kind.ARGUMENTS}, text
            assert not is_one or len(found) == 2
            num_read += 1
            for called, arguments in zip(found[::2], found[1::2], strict=True):
                assert set(TOOLS[called[1]]["required"]) <= set(arguments[1]), text
        for calls in (
            [("search", {"query": "x"})],
            [("get_weather", {"place": "a", "days": 1})],
        ):
            text = WRITE[name](calls)
            if name in ("pythonic", "lfm2"):
                text = text.replace("'", '"')
            matcher = xgrammar.GrammarMatcher(compiled)
            assert matcher.accept_string(text), text
            assert matcher.accept_token(0)
    assert num_read >= 4


def test_schemas_that_refer_to_each_other_have_the_type_that_is_near():
    """Each level of the references multiplies what there is to look at."""
    wide = [{"$ref": "#/$defs/a"}] * 1000
    root = {
        "properties": {"a": {"$ref": "#/$defs/a"}, "b": {"$ref": "#/$defs/b"}},
        "$defs": {
            "a": {"anyOf": [{"type": "string"}, *wide]},
            "b": {"anyOf": [{"enum": ["x"]}]},
        },
    }
    assert argument_type(root, "a") is None
    assert argument_type(root, "b") == ArgumentType(frozenset(("string",)), ("x",))
    for form in ("kimi_k3", "minimax_m3"):
        assert FORMATS[form].structure({"f": root}, Pieces(frozenset()), is_one=True)


def test_a_list_of_more_texts_than_are_looked_at_tells_no_type():
    texts = [f"word {number}" for number in range(1025)]
    assert argument_type({"properties": {"a": {"enum": texts}}}, "a") is None
    few = argument_type({"properties": {"a": {"enum": texts[:1000]}}}, "a")
    assert few is not None and len(few.choices) == 1000

"""Outputs in the form of harmony, divided by their channels however they are cut."""

import json

import pytest
import xgrammar
from parsed_outputs import MAX_BURST, segment
from written_calls import TOOLS, WRITE

from trimaran.server.openai.parsing.reasoning_formats import Reasoning
from trimaran.server.openai.parsing.scanner import Kind
from trimaran.server.openai.parsing.structural_tags import Pieces, json_schema
from trimaran.server.openai.parsing.tool_formats import FORMATS

ANALYSIS = "<|channel|>analysis<|message|>Hm, 1 < 2.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"{ANALYSIS}{FINAL} Yes.\n<|return|>",
         [(Kind.REASONING, "Hm, 1 < 2."), (Kind.TEXT, " Yes.\n")]),
        (f"{ANALYSIS}{ANALYSIS}{FINAL}Yes.",
         [(Kind.REASONING, "Hm, 1 < 2.\nHm, 1 < 2."), (Kind.TEXT, "Yes.")]),
        ("<|channel|>commentary<|message|>One.<|end|><|start|>assistant" + FINAL + "Two.",
         [(Kind.TEXT, "One.\nTwo.")]),
        # The recipient may come before the channel, and the type without its mark.
        (' to=functions.search<|channel|>commentary json<|message|>{"query": "x"}<|call|>',
         [(Kind.CALL, "search"), (Kind.ARGUMENTS, '{"query": "x"}')]),
        (ANALYSIS + ' to=functions.search<|channel|>analysis<|message|>\n{"query": "x"}\n',
         [(Kind.REASONING, "Hm, 1 < 2."), (Kind.CALL, "search"),
          (Kind.ARGUMENTS, '{"query": "x"}')]),
        ("<|channel|>commentary to=functions.search<|message|><|call|>",
         [(Kind.CALL, "search"), (Kind.ARGUMENTS, "{}")]),
        # A tool that no request offers.
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>",
         [(Kind.REASONING, "1 + 1")]),
        (" to be continued", [(Kind.TEXT, " to be continued")]),
        (" to=day", [(Kind.TEXT, " to=day")]),
        (f"{ANALYSIS}<|channel|>fin", [(Kind.REASONING, "Hm, 1 < 2.")]),
        ("rest of a text<|return|>", [(Kind.TEXT, "rest of a text")]),
        ("", []),
    ],
)  # fmt: skip
def test_messages_of_harmony_are_reasoning_texts_and_calls_however_they_are_cut(text, wanted):
    assert segment("harmony", [text], reasoning=Reasoning()) == wanted
    for cut in range(1, len(text)):
        parts = [text[:cut], text[cut:]]
        assert segment("harmony", parts, reasoning=Reasoning()) == wanted, cut
    for size in range(1, MAX_BURST + 1):
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        assert segment("harmony", parts, reasoning=Reasoning()) == wanted, size


def test_without_a_reasoning_parser_the_analysis_is_text():
    found = segment("harmony", [f"{ANALYSIS}{FINAL}Yes."])
    assert found == [(Kind.TEXT, "Hm, 1 < 2.\nYes.")]


def test_the_grammar_of_harmony_allows_reasoning_before_an_answer_or_a_call():
    form = FORMATS["harmony"]
    calls = form.structure(TOOLS, Pieces(), is_one=False)
    answer = form.answer(json_schema({"type": "object"}), Pieces())
    either = {"type": "or", "elements": [answer, calls]}
    tag = {"type": "structural_tag", "format": form.behind_reasoning(either, Pieces())}
    vocabulary = ["</s>", *(chr(c) for c in range(32, 127))]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    compiled = compiler.compile_structural_tag(json.dumps(tag))
    call = WRITE["harmony"]([("search", {"query": "x"})])
    for text, is_allowed in (
        (call, True), (ANALYSIS + call, True), (FINAL + "{}", True),
        (ANALYSIS + FINAL + "{}", True), (FINAL + "Yes.", False), ("{}", False),
        (call.replace("search", "other"), False),
    ):  # fmt: skip
        matcher = xgrammar.GrammarMatcher(compiled)
        assert (matcher.accept_string(text) and matcher.accept_token(0)) == is_allowed, text

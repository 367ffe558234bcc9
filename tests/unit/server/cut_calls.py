"""Random calls of each family, whose text is cut in every way: equal segments."""

import codecs
import functools
import itertools
import random
from pathlib import Path

from parsed_outputs import MAX_BURST, expected, parsed, segment
from written_calls import PREFACE, WRITE, WRITE_PREFACE, random_calls

from trimaran.server.models.tokenizer import Tokenizer
from trimaran.server.openai.parsing.scanner import Kind
from trimaran.server.openai.parsing.tool_formats import FORMATS

JSON_FAMILIES = ("cohere", "deepseek_v3", "deepseek_v31", "granite", "harmony", "hermes",
                 "jamba", "kimi_k2", "llama3", "longcat", "mistral",
                 "phi4_mini_json")  # fmt: skip
"""Families that write arguments as one JSON object."""

NUM_CASES = 40
"""Parts of ten thousand calls of a family."""

CALLS_OF_A_CASE = 250

DEMO_MODEL = Path(__file__).resolve().parents[3] / "examples" / "demo_models" / "base"
APART = 48
"""Bytes between the cuts of one text, more than a literal of most forms has."""


def bursts(draw, tokens):
    """The tokens in bursts of one to eight."""
    place = 0
    while place < len(tokens):
        count = draw.randint(1, 8)
        yield "".join(tokens[place : place + count])
        place += count


def tokens_of(draw, text):
    """A random cut of a text, as a tokenizer may make it."""
    place = 0
    while place < len(text):
        count = draw.choice((1, 1, 2, 3, 4, 7))
        yield text[place : place + count]
        place += count


def cut_at(raw, cuts):
    """A text whose bytes come in parts. Only whole characters reach the parser."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    places = [0, *cuts, len(raw)]
    return tuple(
        decoder.decode(raw[begin:end], final=end == len(raw))
        for begin, end in itertools.pairwise(places)
    )


@functools.cache
def tokenizer():
    return Tokenizer(str(DEMO_MODEL))


def detokenized(ids, size):
    """The text of ids, in bursts of so many, as the front end makes it."""
    detokenizer = tokenizer().detokenizer([])
    for start in range(0, len(ids), size):
        yield detokenizer.push(ids[start : start + size], is_last=start + size >= len(ids))


def check_calls(name, seed, *, is_each_pair):
    """Calls of one output, cut at each byte, and in bursts of one to eight tokens of a
    tokenizer: equal segments. ``is_each_pair``: cut in two at each byte as well. Returns the
    number of calls."""
    draw = random.Random(seed)
    calls = random_calls(draw, name)
    text = WRITE[name](calls)
    if not FORMATS[name].is_at_start and draw.random() < 0.5:
        text = WRITE_PREFACE.get(name, PREFACE + "\n") + text
        whole = segment(name, [text])
        assert whole[0] == (Kind.TEXT, PREFACE), text
        calls_found = whole[1:]
    else:
        calls_found = whole = segment(name, [text])
    assert parsed(calls_found) == expected(calls), text
    raw = text.encode()
    cuts = [range(first, len(raw), APART) for first in range(1, min(APART, len(raw) - 1) + 1)]
    if is_each_pair:
        cuts += [(cut,) for cut in range(1, len(raw))]
    # Cuts inside one character give the same parts.
    parts_of_cuts = {cut_at(raw, each): each for each in cuts}
    for parts, each in parts_of_cuts.items():
        assert segment(name, parts) == whole, (text, each)
    assert segment(name, text) == whole
    assert segment(name, bursts(draw, list(tokens_of(draw, text)))) == whole
    ids = tokenizer().encode_short(text, add_special_tokens=False)
    for size in range(1, MAX_BURST + 1):
        assert segment(name, detokenized(ids, size)) == whole, (text, size)
    return len(calls)


def check_many_calls(name, case):
    """Calls of one part of a family's ten thousand, each tenth output cut at each pair."""
    numbers, count = itertools.count(), 0
    while count < CALLS_OF_A_CASE:
        number = next(numbers)
        is_each_pair = number % 10 == 0
        count += check_calls(name, f"{name} {case} {number}", is_each_pair=is_each_pair)

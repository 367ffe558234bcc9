"""Segments of outputs, as tests compare them."""

import itertools
import json

from written_calls import TOOLS

from trimaran.server.openai.parsing.output_parser import OutputParser
from trimaran.server.openai.parsing.scanner import Kind
from trimaran.server.openai.parsing.tool_formats import FORMATS

MAX_BURST = 8


def segment(name, parts, **options):
    """(kind, text) of the segments, those of one kind in a row joined."""
    parser = OutputParser(FORMATS[name], TOOLS, **options)
    found = [s for part in parts for s in parser.feed(part)] + parser.finish()
    joined = []
    for each in found:
        is_more = joined and joined[-1][0] is each.kind and each.kind is not Kind.CALL
        if is_more:
            joined[-1] = (each.kind, joined[-1][1] + each.text)
        else:
            joined.append((each.kind, each.text))
    return joined


def expected(calls):
    kinds = itertools.cycle((Kind.CALL, Kind.ARGUMENTS))
    texts = itertools.chain.from_iterable(calls)
    return list(zip(kinds, texts, strict=False))


def parsed(segments):
    return [(k, json.loads(t) if k is Kind.ARGUMENTS else t) for k, t in segments]

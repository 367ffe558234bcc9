"""The inputs of the text and token models, and honest and dishonest values for them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TEMPLATES = Path(__file__).resolve().parents[3] / "server" / "repository" / "templates"
MODELS = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm", "preprocessing", "postprocessing")
_WEIGHTS = (5, 3, 4, 2, 2)
_REQUIRED = {
    "ensemble": ("text_input", "max_tokens"),
    "tensorrt_llm_bls": ("text_input", "max_tokens"),
    "tensorrt_llm": ("input_ids", "input_lengths", "request_output_len"),
    "preprocessing": ("QUERY", "REQUEST_OUTPUT_LEN"),
    "postprocessing": ("TOKENS_BATCH", "SEQUENCE_LENGTH"),
}

_OFTEN = {
    "bad_words", "stop_words", "end_id", "pad_id", "top_k", "top_p", "min_p", "temperature",
    "repetition_penalty", "min_tokens", "presence_penalty", "frequency_penalty", "seed",
    "return_log_probs", "return_perf_metrics", "return_num_input_tokens", "beam_width",
    "return_num_output_tokens", "return_finish_reason", "num_return_sequences", "stream",
    "embedding_bias_words", "embedding_bias_weights", "exclude_input_in_output", "streaming",
    "runtime_top_k", "runtime_top_p", "random_seed", "stop_words_list", "bad_words_list",
    "return_context_logits", "return_generation_logits", "no_repeat_ngram_size",
    "guided_decoding_guide", "guided_decoding_guide_type", "early_stopping", "len_penalty",
    "length_penalty", "beam_search_diversity_rate", "embedding_bias", "stop", "END_ID",
    "STOP_WORDS_DICT", "BAD_WORDS_DICT", "EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS",
    "draft_input_ids", "draft_acceptance_threshold", "num_draft_tokens", "use_draft_logits",
    "lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size",
}  # fmt: skip
"""Inputs that the demo model has a use for."""

WORDS = ("the", " night", "a", "\n\n", "</s>", "é", "日本", "\U0001f600", " ", "stop", "zz")
GUIDES = (
    ("json", ""), ("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}}}'),
    ("regex", "[0-9]{3}"), ("regex", "(a?){50}a{50}"), ("regex", "((a*)*)*b"), ("regex", "["),
    ("ebnf_grammar", 'root ::= "a" | "b" root'),
    ("ebnf_grammar", "root ::= root root root | root root | [a-z ]"),
    ("ebnf_grammar", "root ::="), ("choice", '["yes","no"]'), ("choice", "[]"),
    ("structural_tag", "{}"), ("none", "x"), ("json_schema", '{"$ref":"#"}'),
    ("json_schema", '{"type":"string","maxLength":100000}'), ("json_schema", "[" * 200),
)  # fmt: skip
_INTEGERS = (
    0, 1, -1, 2, 7, 255, 65536, 2**31 - 1, 2**31, -(2**31), 2**32, 2**63 - 1, 2**63, -(2**63),
    2**64 - 1, 2**64, 10**30, -(10**30),
)  # fmt: skip
_FLOATS = (
    0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-45, 1e-7, 1e38, 1e39, 1.7e308, float("nan"),
    float("inf"), float("-inf"), 1e-300,
)  # fmt: skip
_STRANGE: tuple[Any, ...] = (
    None, True, False, "", "1", [], {}, [[]], {"a": 1}, 1.5, "\ud800", "\x00", [None], -1,
)  # fmt: skip


@dataclass(frozen=True)
class Input:
    """An input of a model's configuration."""

    name: str
    datatype: str
    """The protocol's name, such as INT32 or BYTES."""
    dims: tuple[int, ...]


def _inputs(model: str) -> dict[str, Input]:
    text = (_TEMPLATES / model / "config.pbtxt").read_text()
    section = re.search(r"^input \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert section is not None, model
    found = re.findall(
        r'name: "(\w+)"\s+data_type: (\S+)\s+dims: \[([^]]*)\]', section.group(1)
    )
    return {name: Input(name, _datatype(kind), _dims(dims)) for name, kind, dims in found}


def _datatype(kind: str) -> str:
    name = kind.removeprefix("TYPE_")
    return {"STRING": "BYTES"}.get(name, name if name.isalnum() else "FP32")


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(each) if each.strip("- ").isdigit() else -1 for each in text.split(","))


INPUTS = {model: _inputs(model) for model in MODELS}


def choose_model(rng: random.Random, *, is_unary: bool = False) -> str:
    """A model of the repository; decoupled models refuse requests without a stream."""
    if is_unary and rng.random() < 0.7:
        return rng.choice(MODELS[3:])
    return rng.choices(MODELS, _WEIGHTS)[0]


_TOGETHER = (
    ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"),
    ("draft_input_ids", "draft_logits"), ("draft_input_ids", "draft_acceptance_threshold"),
    ("num_draft_tokens", "use_draft_logits"), ("lora_task_id", "lora_weights", "lora_config"),
    ("retention_token_range_starts", "retention_token_range_ends",
     "retention_token_range_priorities", "retention_token_range_durations_ms"),
    ("guided_decoding_guide_type", "guided_decoding_guide"),
)  # fmt: skip
"""Inputs that mean something together alone."""


def choose_inputs(rng: random.Random, model: str) -> list[Input]:
    """The inputs of a request: the required inputs, and some optional inputs."""
    known = INPUTS[model]
    names = [name for name in _REQUIRED[model] if rng.random() > 0.03]
    others = [name for name in known if name not in _REQUIRED[model]]
    if rng.random() < 0.6:
        # Others are refused where the model has no adapter, no images or no draft.
        others = [name for name in others if name in _OFTEN]
    names += rng.sample(others, min(len(others), rng.choice((0, 0, 1, 2, 3, 6, 12))))
    if rng.random() < 0.2:
        names += rng.choice(_TOGETHER)
    chosen = [known[name] for name in dict.fromkeys(names) if name in known]
    rng.shuffle(chosen)
    return chosen


def honest(rng: random.Random, one: Input) -> Any:
    """A plausible value of a client in JSON: a scalar or a list."""
    name = one.name.lower()
    if name in _OWN:
        return _OWN[name](rng)
    if one.datatype == "BYTES":
        return "".join(rng.choices(WORDS, k=rng.randint(1, 12)))
    if one.datatype == "BOOL":
        return rng.random() < 0.5
    if one.datatype.startswith("FP"):
        return round(rng.uniform(0.05, 1.5), 3)
    return rng.choice((0, 1, 1, 2, 3, 5, 20))


def dishonest(rng: random.Random, one: Input) -> Any:
    """A value that no honest client sends."""
    roll = rng.random()
    if roll < 0.2:
        return rng.choice(_STRANGE)
    if one.datatype == "BYTES" and roll < 0.75:
        return _text(rng)
    if one.datatype.startswith("FP") and roll < 0.8:
        return rng.choice(_FLOATS)
    if roll < 0.9:
        return rng.choice(_INTEGERS)
    # Many of them, and nested.
    count = rng.choice((2, 17, 300, 5000))
    values: list[Any] = [rng.choice(_INTEGERS + _FLOATS + _STRANGE) for _ in range(8)]
    return (values * count)[:count] if rng.random() < 0.7 else [[value] for value in values]


def value_of(rng: random.Random, one: Input, malice: float) -> Any:
    """An honest value, or with this chance another."""
    return dishonest(rng, one) if rng.random() < malice else honest(rng, one)


def _text(rng: random.Random) -> str:
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(WORDS) * rng.choice((100, 3000, 40_000))
    if kind == 1:
        return "".join(map(chr, rng.choices(range(0xD7FF), k=rng.randint(1, 200))))
    if kind == 2:
        return ",".join(f"w{number}" for number in range(rng.choice((10, 500, 4000))))
    if kind == 3:
        return rng.choice(GUIDES)[1]
    if kind == 4:
        return "\x00\x01\x7f\ufffe\u202e" * rng.randint(1, 50)
    return rng.choice(("", " ", "null", "NaN", "-1", "a" * 70_000, "\ud83d"))


def _words(rng: random.Random) -> Any:
    words = rng.choices(WORDS, k=rng.choice((1, 2, 5, 40)))
    return words if rng.random() < 0.7 else words[0]


def _ids(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 4096) for _ in range(rng.choice((1, 4, 16, 100, 400)))]


def _few(rng: random.Random) -> int:
    return rng.choice((1, 2, 5, 16, 16, 40, 120))


_OWN: dict[str, Any] = {
    "input_ids": _ids,
    "decoder_input_ids": _ids,
    "draft_input_ids": lambda rng: _ids(rng)[: rng.choice((1, 3, 6, 400))],
    "draft_logits": lambda rng: [rng.uniform(-4, 4)] * rng.choice((1, 4096, 4096, 8192)),
    "draft_acceptance_threshold": lambda rng: rng.choice((0.0, 0.3, 1.0)),
    "num_draft_tokens": lambda rng: rng.choice((0, 1, 3, 6, 40)),
    "lookahead_window_size": lambda rng: rng.choice((1, 2, 4)),
    "lookahead_ngram_size": lambda rng: rng.choice((2, 2, 3)),
    "lookahead_verification_set_size": lambda rng: rng.choice((1, 2, 4)),
    "retention_token_range_starts": lambda rng: [0],
    "retention_token_range_ends": lambda rng: [rng.choice((-1, 4, 64))],
    "retention_token_range_priorities": lambda rng: [rng.choice((0, 35, 100))],
    "retention_token_range_durations_ms": lambda rng: [rng.choice((-1, 1, 5000))],
    "lora_task_id": lambda rng: rng.choice((1, 1, 2, 7)),
    "lora_name": lambda rng: rng.choice(("north", "..", "a" * 300)),
    "lora_config": lambda rng: [1, rng.choice((0, 1, 9)), rng.choice((1, 1, 64))],
    "lora_weights": lambda rng: [0.5] * 512,
    "tokens_batch": lambda rng: [[_ids(rng)]],
    "sequence_length": lambda rng: [[rng.choice((1, 4, 16))]],
    "input_lengths": lambda rng: rng.choice((1, 4, 16, 100)),
    "max_tokens": _few,
    "request_output_len": _few,
    "stop_words": _words,
    "bad_words": _words,
    "embedding_bias_words": _words,
    "embedding_bias_weights": lambda rng: [
        rng.uniform(-5, 5) for _ in range(rng.choice((1, 2)))
    ],
    "num_return_sequences": lambda rng: rng.choice((1, 1, 2, 4)),
    "beam_width": lambda rng: rng.choice((1, 1, 2, 4)),
    "top_k": lambda rng: rng.choice((0, 1, 5, 50)),
    "end_id": lambda rng: rng.choice((-1, 0, 2)),
    "stop": lambda rng: rng.random() < 0.1,
    "guided_decoding_guide_type": lambda rng: rng.choice(GUIDES)[0],
    "guided_decoding_guide": lambda rng: rng.choice(GUIDES)[1],
}

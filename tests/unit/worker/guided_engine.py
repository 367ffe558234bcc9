"""An engine that serves guides, and a check that texts follow them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import Tokenizer

from tests.driver import Driver
from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    GuidedConfig,
    SchedulerConfig,
)
from trimaran.worker.config.speculation_config import SpeculationConfig

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples" / "demo_models" / "base"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
END = 1
NONE = SpeculationConfig()
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
GUIDES = {
    "json_schema": SCHEMA,
    "regex": "(red|green|blue) [0-9]{2,4}",
    "ebnf_grammar": 'root ::= "yes" | "no" root',
    "choice": json.dumps(["to be", "not to be", 'a "quoted" word']),
    "structural_tag": json.dumps({"type": "structural_tag", "format": {
        "type": "sequence", "elements": [
            {"type": "const_string", "value": "call: "},
            {"type": "json_schema", "json_schema": json.loads(SCHEMA)}]}}),
}  # fmt: skip


def slow_schema(number):
    """A schema that takes more than a minute; each number gives another schema."""
    lengths = range(10 + number, 610 + number)
    properties = {f"of {most}": {"type": "string", "maxLength": most} for most in lengths}
    return json.dumps({"type": "object", "properties": properties})


def texts(count):
    """A choice of ``count`` texts: some 0.4 s for 4000."""
    return json.dumps([f"value number {place * 7919 % 1000003}" for place in range(count)])


def make_engine(
    depth=1, max_tokens=2048, guided=None, max_queue_size=0, speculation=NONE, **changes
):
    driver = Driver(
        EngineConfig(
            model="test",
            engine_dir=str(MODEL),
            dtype="float32",
            device="cpu",
            scheduler=SchedulerConfig(
                max_num_batched_tokens=64,
                max_num_seqs=16,
                max_queue_size=max_queue_size,
                max_seq_len=256,
                max_input_len=200,
                policy="max_utilization",
                expected_output_tokens=1,
                depth=depth,
                speculation=speculation,
            ),
            cache=CacheConfig(tokens_per_block=16, max_tokens=max_tokens),
            guided=guided or GuidedConfig(backend="xgrammar"),
            **changes,
        )
    )
    driver.failed = {}
    return driver


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def submit(driver, kind, guide=None, seed=1, **fields):
    return driver.submit(
        ids("Once upon a time there was"),
        **{
            "max_tokens": 100, "end_id": END, "temperature": 1.2, "top_p": 1.0, "seed": seed,
            "guide_type": kind, "guide": GUIDES.get(kind, "") if guide is None else guide,
            **fields,
        },
    )  # fmt: skip


def text_of(driver, request):
    assert driver.reasons[request, 0] is FinishReason.END_ID
    return TOKENIZER.decode(driver.output(request))


def follows(kind, text):
    if kind == "structural_tag" and text.startswith("call: "):
        return follows("json_schema", text.removeprefix("call: "))
    if kind == "json_schema":
        value = json.loads(text)
        return set(value) == {"name", "age"} and 0 <= value["age"] <= 99
    if kind == "regex":
        return re.fullmatch(GUIDES["regex"], text) is not None
    if kind == "ebnf_grammar":
        return re.fullmatch("(no)*yes", text) is not None
    return text in json.loads(GUIDES["choice"])

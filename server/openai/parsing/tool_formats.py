"""The forms in which families of models write tool calls.

One entry of the table reads a form, and makes the structural tag by which guided decoding
allows nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from trimaran.server.openai.parsing.gemma_calls import GemmaToolParser
from trimaran.server.openai.parsing.harmony import HarmonyToolParser
from trimaran.server.openai.parsing.json_calls import (
    CohereToolParser,
    HermesToolParser,
    LlamaToolParser,
    MistralToolParser,
)
from trimaran.server.openai.parsing.kimi_calls import KimiK3ToolParser
from trimaran.server.openai.parsing.minimax_calls import MinimaxM3ToolParser
from trimaran.server.openai.parsing.named_calls import DeepSeekToolParser, KimiToolParser
from trimaran.server.openai.parsing.pythonic_calls import PythonicToolParser
from trimaran.server.openai.parsing.structural_tags import Pieces
from trimaran.server.openai.parsing.tagged_calls import GlmToolParser, XmlToolParser

ToolFormat = (
    HermesToolParser | LlamaToolParser | MistralToolParser | DeepSeekToolParser | XmlToolParser
    | CohereToolParser | KimiK3ToolParser | MinimaxM3ToolParser
    | GlmToolParser | GemmaToolParser | PythonicToolParser | HarmonyToolParser
)  # fmt: skip


def _dsml(section: str) -> XmlToolParser:
    """DeepSeek's tags, with the calls in a section of this name."""
    mark = "｜DSML｜"
    return XmlToolParser(
        opening=f"<{mark}{section}>",
        closing=f"</{mark}{section}>",
        function=f'<{mark}invoke name="',
        name_end='">',
        function_end=f"</{mark}invoke>",
        parameter=f'<{mark}parameter name="',
        key_ends=('" string="true">', '" string="false">', '">'),
        parameter_end=f"</{mark}parameter>",
        style="deepseek_xml",
        has_line_breaks=False,
        holds_several=True,
    )


FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HermesToolParser(),
    "longcat": HermesToolParser("<longcat_tool_call>", "</longcat_tool_call>"),
    "llama3": LlamaToolParser(),
    "mistral": MistralToolParser(),
    "jamba": MistralToolParser("<tool_calls>", "</tool_calls>"),
    "granite": MistralToolParser("<|tool_call|>"),
    "phi4_mini_json": MistralToolParser("functools"),
    "pythonic": PythonicToolParser(),
    "qwen3_coder": XmlToolParser(may_lack_opening=True),
    "seed_oss": XmlToolParser("<seed:tool_call>", "</seed:tool_call>"),
    "minimax_m2": XmlToolParser(
        opening="<minimax:tool_call>",
        closing="</minimax:tool_call>",
        function='<invoke name="',
        name_end='">',
        function_end="</invoke>",
        parameter='<parameter name="',
        key_ends=('">',),
        style="minimax_xml",
        has_line_breaks=False,
        holds_several=True,
    ),
    "glm45": GlmToolParser(),
    "deepseek_v3": DeepSeekToolParser(
        before_name="function<｜tool▁sep｜>",
        before_arguments="\n```json\n",
        after_arguments="\n```",
    ),
    "deepseek_v31": DeepSeekToolParser(),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k2": KimiToolParser(),
    "kimi_k3": KimiK3ToolParser(),
    "minimax_m3": MinimaxM3ToolParser(),
    "cohere": CohereToolParser(),
    "lfm2": PythonicToolParser("<|tool_call_start|>", "<|tool_call_end|>"),
    "gemma4": GemmaToolParser(),
    "functiongemma": GemmaToolParser(
        "<start_function_call>", "<end_function_call>", "<escape>"
    ),
    "harmony": HarmonyToolParser(),
}
"""By the names that vLLM and Triton's OpenAI front end use."""

OTHER_NAMES: Mapping[str, str] = {
    "qwen": "hermes", "qwen25": "hermes", "granite4": "hermes",
    "hunyuan_a13b": "jamba", "llama3_json": "llama3", "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder", "mimo": "qwen3_coder", "minimax-m2": "minimax_m2",
    "glm": "glm45", "glm47": "glm45", "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32", "deepseekv4": "deepseek_v4",
    "openai": "harmony", "gpt-oss": "harmony",
    "cohere_command3": "cohere", "cohere_command4": "cohere",
    "minimax-m3": "minimax_m3", "minimax_m3_nom": "minimax_m3",
}  # fmt: skip
"""Further names of vLLM's and SGLang's parsers, and the entries that read their forms."""


def literals_of(name: str) -> str:
    """A text that holds every literal of a form."""
    form = FORMATS[name]
    tag = form.structure({"name": {"type": "object"}}, Pieces(), is_one=False)
    return form.literals + "".join(form.frames) + json.dumps(tag, ensure_ascii=False)


_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>",), "harmony"),
    (("｜DSML｜", "function_calls>"), "deepseek_v32"),
    (("｜DSML｜", "tool_calls>"), "deepseek_v4"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
    (("]<]minimax[>[",), "minimax_m3"),
    (("<|START_ACTION|>",), "cohere"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<longcat_tool_call>",), "longcat"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>",), "gemma4"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<function=",), ""),
    (("<tool_calls>[",), "jamba"),
    (("<|tool_call|>",), "granite"),
    (("functools[",), "phi4_mini_json"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("```json", "<｜tool▁calls▁begin｜>"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|python_tag|>",), "llama3"),
    (("[func_name1(",), "pythonic"),
    (('"name": function name, "parameters":',), "llama3"),
)
"""Texts that a chat template holds, and the form that such a template asks for; the first
counts. An empty form is one that the table does not have."""


def format_of_template(text: str) -> str:
    """The name of the form that a chat template asks for; empty if the template tells none."""
    if "tools" not in text:
        return ""
    for marks, name in _MARKS:
        if all(mark in text for mark in marks):
            return name
    return ""

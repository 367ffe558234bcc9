"""The tools of a request: which may be called, how calls are written, and what is enforced."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimaran.server.openai.errors import ApiError
from trimaran.server.openai.fields import Fields, length_left
from trimaran.server.openai.parsing.harmony import HarmonyToolParser
from trimaran.server.openai.parsing.output_parser import OutputParser
from trimaran.server.openai.parsing.reasoning_formats import REASONING_FORMATS, Reasoning
from trimaran.server.openai.parsing.structural_tags import (
    Pieces,
    Schema,
    Tag,
    const,
    json_schema,
    optional,
    sequence,
)
from trimaran.server.openai.parsing.tool_formats import FORMATS

_MAX_TOOLS = 512
MAX_GUIDE_LENGTH = 1 << 23
"""Characters and values of what guided decoding allows for a request."""

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_GUIDE_TYPE, _GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
_TOOL_MEMBERS = frozenset(("tools", "tool_choice", "parallel_tool_calls"))
_SPACE: Tag = {"type": "regex", "pattern": "[ \\n]{0,4}"}


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What a model's output consists of, as its chat template tells or the operator."""

    tool_format: str = ""
    """A name of `FORMATS`; empty: tools are refused."""

    reasoning: str = ""
    """A name of `REASONING_FORMATS`; empty: outputs have no reasoning."""

    special: frozenset[str] = frozenset()
    """Special tokens of the tokenizer that are literals of the form."""

    @property
    def whole(self) -> HarmonyToolParser | None:
        """The form if the form covers outputs as a whole."""
        found = FORMATS.get(self.tool_format)
        return found if isinstance(found, HarmonyToolParser) else None

    @property
    def divides_outputs(self) -> bool:
        """Whether outputs have parts without tools in the request."""
        return bool(self.reasoning or self.whole or self.frames)

    @property
    def frames(self) -> tuple[str, ...]:
        """Literals around texts, whether or not a request has tools."""
        found = FORMATS.get(self.tool_format)
        return found.frames if found is not None else ()


@dataclass(slots=True, kw_only=True)
class ParserOptions:
    """How one request's outputs are cut into segments."""

    tool_format: str = ""
    """Empty: tool calls are not looked for."""

    tools: Mapping[str, Schema] = field(default_factory=dict)
    reasoning: str = ""
    starts_in_reasoning: bool = False
    max_calls: int | None = None
    """Calls behind these are left out; None: no limit."""

    shows_special_tokens: bool = False
    """Whether special tokens are part of the form."""

    def parser(self) -> OutputParser:
        """For one sequence."""
        return OutputParser(
            FORMATS.get(self.tool_format),
            self.tools,
            REASONING_FORMATS.get(self.reasoning),
            starts_in_reasoning=self.starts_in_reasoning,
        )


@dataclass(slots=True, kw_only=True)
class ToolChoice:
    """The tools of a request, and which of them must be called."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    """As the client sent them."""

    schemas: dict[str, Schema] = field(default_factory=dict)
    mode: str = "none"
    """``none``, ``auto``, ``required``, or ``named``: then `schemas` holds that tool alone.
    With ``allowed_tools`` `tools` and `schemas` hold the allowed tools."""

    is_one: bool = False
    """Whether at most one call is allowed."""


def read_tools(fields: Fields) -> ToolChoice:
    """The members ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

    Raises:
        ApiError: a tool is no function, or the choice names none.
    """
    if not fields.has_any(_TOOL_MEMBERS):
        return ToolChoice()
    given = fields.items("tools") or []
    if len(given) > _MAX_TOOLS:
        raise ApiError(
            f"'tools' has {len(given)} tools, and at most {_MAX_TOOLS} are allowed",
            param="tools",
        )
    schemas: dict[str, Schema] = {}
    for number, tool in enumerate(given):
        name, schema = read_function(tool, f"tools[{number}]")
        schemas[name] = schema
    mode, names = _choice(fields.take("tool_choice"), has_tools=bool(given))
    is_parallel = fields.boolean("parallel_tool_calls")
    if mode in ("required", "named") and not given:
        raise ApiError("'tool_choice' needs 'tools'", param="tool_choice")
    if names is not None:
        for name in names:
            if name not in schemas:
                raise ApiError(
                    f"'tool_choice' names '{name[:50]}', which is no tool of the request",
                    param="tool_choice",
                )
        schemas = {name: schemas[name] for name in names}
        if mode != "named":
            # The model may call the tools that its prompt shows.
            given = [tool for tool in given if tool["function"]["name"] in schemas]
    is_one = mode == "named" or is_parallel is False
    return ToolChoice(tools=given, schemas=schemas, mode=mode, is_one=is_one)


def read_function(tool: Any, where: str) -> tuple[str, Schema]:
    """The name of a function, and the schema of its parameters.

    Raises:
        ApiError: another kind of tool.
    """
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise ApiError(f"'{where}' must be a tool of the type 'function'", param=where)
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ApiError(
            f"'{where}.function.name' must have 1 to 128 letters, digits and any of _.:/-",
            param=f"{where}.function.name",
        )
    if schema is None:
        schema = {}
    if not isinstance(schema, dict):
        raise ApiError(
            f"'{where}.function.parameters' must be a JSON schema",
            param=f"{where}.function.parameters",
        )
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties or {}, dict) or not isinstance(required or [], list):
        raise ApiError(
            f"'{where}.function.parameters' must have an object 'properties' and a list "
            "'required', or leave them out",
            param=f"{where}.function.parameters",
        )
    return name, schema or {"type": "object", "properties": {}}


def _choice(value: Any, *, has_tools: bool) -> tuple[str, list[str] | None]:
    """The mode of a choice, and the tools that the choice names; None: all tools."""
    if value is None:
        return ("auto" if has_tools else "none"), None
    if value in ("none", "auto", "required"):
        return (value if has_tools or value == "required" else "none"), None
    allowed = value.get("allowed_tools") if isinstance(value, dict) else None
    if isinstance(allowed, dict) and allowed.get("mode") in ("auto", "required"):
        tools = allowed.get("tools")
        names = [_name_of(tool) for tool in tools] if isinstance(tools, list) else []
        if names and len(names) <= _MAX_TOOLS:
            return allowed["mode"], names
    elif isinstance(value, dict) and "function" in value:
        return "named", [_name_of(value)]
    raise _wrong_choice()


def _name_of(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _wrong_choice()
    return name


def _wrong_choice() -> ApiError:
    return ApiError(
        "'tool_choice' must be none, auto, required, name a function, or list functions as "
        "allowed_tools",
        param="tool_choice",
    )


def read_response_format(fields: Fields) -> Schema | bool | None:
    """The schema of the answer's JSON; True for any JSON object, None for text.

    Raises:
        ApiError: an unknown type, or no schema.
    """
    form = fields.member("response_format")
    if form is None:
        return None
    kind = form.choice("type", "text", "json_object", "json_schema")
    if kind is None:
        raise ApiError("'response_format.type' is missing", param="response_format.type")
    if kind == "text":
        return None
    if kind == "json_object":
        return True
    inner = form.member("json_schema")
    schema = None if inner is None else inner.take("schema")
    if not isinstance(schema, dict):
        raise ApiError(
            "'response_format.json_schema.schema' must be a JSON schema",
            param="response_format.json_schema.schema",
        )
    return schema


def parser_options_of(
    form: OutputForm, choice: ToolChoice, model: str, prompt: str
) -> ParserOptions:
    """How the outputs of a request are cut.

    Raises:
        ApiError: tools are asked of a model whose form of calls is not known.
    """
    options = ParserOptions(reasoning=form.reasoning)
    if form.reasoning:
        opening = REASONING_FORMATS[form.reasoning].opening
        options.starts_in_reasoning = prompt.rstrip().endswith(opening.rstrip())
    if choice.mode != "none":
        if not form.tool_format:
            raise ApiError(
                f"the chat template of the model '{model}' does not tell how tool calls are "
                f"written. Start the server with --tool-call-parser ({', '.join(FORMATS)}).",
                param="tools",
            )
        options.tool_format = form.tool_format
        options.tools = choice.schemas
        options.max_calls = 1 if choice.is_one else None
    elif form.whole is not None or form.frames:
        options.tool_format = form.tool_format
    is_used = bool(options.tool_format or options.reasoning)
    options.shows_special_tokens = is_used and bool(form.special)
    return options


def guide_of(
    form: OutputForm,
    choice: ToolChoice,
    options: ParserOptions,
    answer: Schema | bool | None,
) -> dict[str, str]:
    """The guide's inputs of the token model: calls that must come, or the JSON of an answer.
    Empty where any text may come.

    Raises:
        ApiError: the schemas make more than `MAX_GUIDE_LENGTH`.
    """
    pieces, whole = Pieces(form.special), form.whole
    json_answer: Tag | None = None
    if answer is not None:
        json_answer = _json(answer) if whole is None else whole.answer(_json(answer), pieces)
        json_answer = _framed(form.frames, pieces, json_answer)
    calls: Tag | None = None
    if choice.mode in ("required", "named"):
        tool_format = FORMATS[form.tool_format]
        calls = tool_format.structure(choice.schemas, pieces, is_one=choice.is_one)
        calls = sequence(_framed(form.frames, pieces), calls) if form.frames else calls
    elif json_answer is None:
        return {}
    elif choice.mode == "auto":
        tool_format = FORMATS[form.tool_format]
        calls = tool_format.structure(choice.schemas, pieces, is_one=choice.is_one)
        calls = {"type": "or", "elements": [json_answer, calls]}
    content = json_answer if calls is None else calls
    assert content is not None
    if whole is not None:
        content = whole.behind_reasoning(content, pieces)
    elif form.reasoning:
        reasoning = REASONING_FORMATS[form.reasoning]
        content = _behind_reasoning(
            reasoning, content, pieces, is_open=options.starts_in_reasoning
        )
    tag = {"type": "structural_tag", "format": content}
    if length_left(MAX_GUIDE_LENGTH, tag) < 0:
        # Forms with a schema for each argument repeat the definitions in each.
        raise ApiError(
            "the schemas make a form of the answer with more than "
            f"{MAX_GUIDE_LENGTH} characters and values. Send fewer or shorter schemas, or "
            "definitions that fewer of them need.",
            param="response_format" if answer is not None else "tools",
        )
    return {_GUIDE_TYPE: "structural_tag", _GUIDE: json.dumps(tag)}


def _json(answer: Schema | bool) -> Tag:
    return json_schema(answer if isinstance(answer, Mapping) else {"type": "object"})


def _framed(frames: tuple[str, ...], pieces: Pieces, content: Tag | None = None) -> Tag:
    """An answer between its frames. The prompt may hold the opening already."""
    if not frames:
        assert content is not None
        return content
    begin, end = (optional(sequence(*pieces.text(frame))) for frame in frames[:2])
    return sequence(begin, end) if content is None else sequence(begin, content, end)


def _behind_reasoning(
    reasoning: Reasoning, content: Tag, pieces: Pieces, *, is_open: bool
) -> Tag:
    """The form with any reasoning before."""
    inside: list[Tag] = [
        {"type": "any_text", "excludes": [reasoning.closing]},
        *(pieces.text(reasoning.closing) or [const(reasoning.closing)]),
        _SPACE,
    ]
    if is_open:
        return sequence(*inside, content)
    whole = sequence(*pieces.text(reasoning.opening), *inside)
    return sequence({"type": "optional", "content": whole}, content)

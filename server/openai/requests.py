"""Bodies of generating requests, read where their length allows: at once or in a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.inference.tensor_bytes import Buffer
from trimaran.server.models.encoded_texts import Ids
from trimaran.server.openai.chat_templates import (
    Chat,
    ChatTemplate,
    knows_developer,
    render,
    takes_parts,
)
from trimaran.server.openai.errors import ApiError, ErrorFacts, no_text_model, unknown_model
from trimaran.server.openai.fields import Fields, list_of, parse_body
from trimaran.server.openai.messages import read_messages
from trimaran.server.openai.sampling import (
    IGNORED,
    MAX_TOP_LOGPROBS,
    GenerationParams,
    read_generation_params,
    read_log_probs,
)
from trimaran.server.openai.tools import (
    OutputForm,
    ParserOptions,
    ToolChoice,
    guide_of,
    parser_options_of,
    read_response_format,
    read_tools,
)

MAX_PROMPTS = 1 << 12
_MAX_PROMPT_IDS = 1 << 22
_MAX_LOGPROBS = 5
_MAX_OPTIONS = 64
_MAX_ID = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class ChatModel:
    """The facts of a model's name that the reading of a chat needs."""

    template: ChatTemplate | None
    max_prompt_bytes: int
    is_text: bool = True
    form: OutputForm = field(default_factory=OutputForm)
    fault: str = ""
    """Why the model's chat template cannot be used."""


def find_chat_model(chat_models: Mapping[str, ChatModel], name: str) -> ChatModel:
    """The facts of a model's name.

    Raises:
        ApiError: no such model, or a model that takes no texts.
    """
    chat_model = chat_models.get(name)
    if chat_model is None:
        raise unknown_model(name[:100])
    if not chat_model.is_text:
        raise no_text_model(name)
    return chat_model


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """A request for new text after one prompt or several."""

    model: str
    params: GenerationParams
    prompts: list[str] = field(default_factory=list)
    prompt_ids: list[Ids] | None = None
    num_top: int | None = None
    """Likeliest ids of each place that are told; None: no log-probabilities."""

    echo: bool = False
    """Whether the prompt is part of the answer."""

    add_special_tokens: bool | None = None
    parser_options: ParserOptions | None = None
    """How outputs are cut into segments; None: they are texts."""

    guide_members: tuple[str, ...] = ()
    """The members that say what guided decoding allows."""

    repeated: dict[str, Any] = field(default_factory=dict)
    """Members of the request that the answer repeats."""


@dataclass(slots=True)
class BodyTask:
    """One body, read by a module-level function, which pickle sends by name."""

    reader: Callable[..., Any]
    """Called with the body's `Fields` and `arguments`."""

    max_input_bytes: int
    arguments: tuple[Any, ...] = ()

    @property
    def subject(self) -> str:
        """See `OtherTask`."""
        return "the request's JSON"

    def read(self, data: Buffer) -> Any:
        """What the body asks for, or `ErrorFacts`."""
        try:
            return self.reader(parse_body(data, self.max_input_bytes), *self.arguments)
        except RequestError as error:
            return ErrorFacts.of(error)
        except RecursionError:
            # Templates and guides write nested values out again.
            return ErrorFacts.of(ApiError("the body's values are nested too deeply"))


def read_completion(fields: Fields) -> GenerationRequest:
    """The request of ``/v1/completions``.

    Raises:
        ApiError: a member is wrong, unknown, or not served.
    """
    model = fields.needed_text("model")
    params = read_generation_params(fields, "max_tokens")
    found = GenerationRequest(model=model, params=params)
    found.prompts, found.prompt_ids = _prompts(fields)
    found.add_special_tokens = fields.boolean("add_special_tokens")
    best_of = fields.integer("best_of", 1, 1 << 10)
    if best_of is not None and best_of != params.num_sequences:
        raise ApiError(
            f"'best_of' is {best_of} but must equal 'n' ({params.num_sequences}): every "
            "sequence is returned. Choose the best at the client.",
            param="best_of",
        )
    fields.refuse("suffix", "is not served: the text is continued at its end alone")
    found.echo = fields.boolean("echo") or False
    num_top = fields.integer("logprobs", 0, _MAX_LOGPROBS)
    if num_top is not None:
        read_log_probs(params, num_top=num_top)
        found.num_top = num_top
    if found.echo and (num_top is not None or found.prompt_ids is not None):
        raise ApiError(
            "'echo' is served for prompts that are texts, without 'logprobs'", param="echo"
        )
    fields.finish(*IGNORED)
    return found


def read_chat(fields: Fields, chat_models: Mapping[str, ChatModel]) -> GenerationRequest:
    """The request of ``/v1/chat/completions``, with its prompt rendered.

    Raises:
        ApiError: a member is wrong, unknown, or not served, or the template refuses the chat.
    """
    model = fields.needed_text("model")
    chat_model = find_chat_model(chat_models, model)
    params = read_generation_params(fields, "max_completion_tokens", "max_tokens")
    found = GenerationRequest(model=model, params=params, add_special_tokens=False)
    choice = read_tools(fields)
    answer = read_response_format(fields)
    prompt = render_chat(
        fields, model, chat_model, choice.tools if choice.mode != "none" else None
    )
    found.prompts = [prompt]
    form = chat_model.form
    if choice.mode != "none" or answer is not None or form.divides_outputs:
        options = parser_options_of(form, choice, model, prompt)
        params.values |= guide_of(form, choice, options, answer)
        found.guide_members = _guide_members(choice, answer)
        if options.tool_format or options.reasoning:
            found.parser_options = options
            if options.shows_special_tokens:
                params.skip_special_tokens = False
    if fields.has_any(_LOG_PROB_MEMBERS):
        _read_chat_log_probs(fields, found)
    if fields.has_any(_UNSERVED_MEMBERS):
        _refuse_unserved(fields)
    fields.finish(*IGNORED)
    return found


def _guide_members(choice: ToolChoice, answer: object) -> tuple[str, ...]:
    if answer is not None and choice.mode in ("none", "auto"):
        return ("response_format",) if choice.mode == "none" else ("response_format", "tools")
    return ("tools",) if choice.mode in ("required", "named") else ()


_LOG_PROB_MEMBERS = frozenset(("logprobs", "top_logprobs"))
_UNSERVED = ("audio", "prediction", "web_search_options", "moderation")
_OLDER = ("functions", "function_call")
_UNSERVED_MEMBERS = frozenset((*_UNSERVED, *_OLDER, "modalities", "verbosity"))


def _read_chat_log_probs(fields: Fields, request: GenerationRequest) -> None:
    has_log_probs = fields.boolean("logprobs") or False
    num_top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if num_top and not has_log_probs:
        raise ApiError("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    if has_log_probs:
        read_log_probs(request.params, num_top=num_top or 0)
        request.num_top = num_top or 0


def _refuse_unserved(fields: Fields) -> None:
    for name in _UNSERVED:
        fields.refuse(name, "is not served. Leave it out.")
    for name in _OLDER:
        fields.refuse(name, "is the older form of tools. Send 'tools' and 'tool_choice'.")
    fields.choice("verbosity", "medium")
    kinds = list_of(fields, "modalities", str, "strings", 4)
    if kinds not in (None, ["text"]):
        raise ApiError("'modalities' must be [\"text\"]", param="modalities")


def render_chat(
    fields: Fields, model: str, chat_model: ChatModel, tools: list[dict[str, Any]] | None = None
) -> str:
    """The prompt of a chat's messages.

    Raises:
        ApiError: a member is wrong, or the template refuses the chat.
    """
    template = chat_model.template
    if chat_model.fault:
        raise ApiError(chat_model.fault, param="messages", kind=ErrorKind.UNAVAILABLE)
    if template is None:
        raise ApiError(
            f"the model '{model}' has no chat template: its tokenizer's folder holds none. "
            "Start the server with --chat-template FILE, or use /v1/completions.",
            param="messages",
        )
    has_options = fields.has_any(_TEMPLATE_MEMBERS)
    text = template.text(has_tools=bool(tools))
    values = _template_values(fields, text) if has_options else {}
    messages = read_messages(
        fields, takes_parts=takes_parts(text), knows_developer=knows_developer(text)
    )
    chat = Chat(messages=messages, tools=tools or None)
    if has_options:
        _read_chat_options(fields, chat, values)
    return render(template, chat, chat_model.max_prompt_bytes)


_TEMPLATE_MEMBERS = frozenset((
    "chat_template", "chat_template_kwargs", "reasoning_effort", "continue_final_message",
    "add_generation_prompt", "documents",
))  # fmt: skip


_SWITCHES = ("enable_thinking", "thinking")
"""Values by which templates leave reasoning out."""


def _template_values(fields: Fields, text: str) -> dict[str, Any]:
    """Further values that the template of this text may read."""
    fields.refuse(
        "chat_template", "of a request is not used. Start the server with --chat-template FILE."
    )
    options = fields.member("chat_template_kwargs")
    values = {} if options is None else options.plain()
    if len(values) > _MAX_OPTIONS:
        raise ApiError(
            f"'chat_template_kwargs' has {len(values)} members, and at most {_MAX_OPTIONS} are "
            "allowed",
            param="chat_template_kwargs",
        )
    effort = fields.text("reasoning_effort")
    if effort is None:
        return values
    off = {name: False for name in _SWITCHES if effort == "none" and name in text}
    return {"reasoning_effort": effort, **off, **values}


def _read_chat_options(fields: Fields, chat: Chat, values: dict[str, Any]) -> None:
    """The members that change how a chat is rendered; ``values`` are for the template."""
    is_continued = fields.boolean("continue_final_message") or False
    begins_answer = fields.boolean("add_generation_prompt")
    if is_continued and begins_answer:
        raise ApiError(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true",
            param="continue_final_message",
        )
    chat.documents = list_of(fields, "documents", dict, "objects", MAX_PROMPTS)
    chat.add_generation_prompt = not is_continued if begins_answer is None else begins_answer
    chat.continue_final_message = is_continued
    chat.options = {name: value for name, value in values.items() if name not in _OWN}


_OWN = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
"""Values of a template that have members of their own."""


def _prompts(fields: Fields) -> tuple[list[str], list[Ids] | None]:
    """Texts, or empty texts and the ids in their place."""
    value = fields.take("prompt")
    if value is None:
        raise ApiError("'prompt' is missing", param="prompt")
    if isinstance(value, str):
        return [value], None
    if not isinstance(value, list) or not value:
        raise fields.wrong("prompt", value, "a string, a list of strings, or token ids")
    if isinstance(value[0], str):
        return list_of(fields, "prompt", str, "strings", MAX_PROMPTS) or [], None
    if isinstance(value[0], list):
        lists = list_of(fields, "prompt", list, "lists of token ids", MAX_PROMPTS) or []
    else:
        lists = [value]
    if sum(map(len, lists)) > _MAX_PROMPT_IDS:
        raise ApiError(
            f"'prompt' has {sum(map(len, lists))} token ids, and at most {_MAX_PROMPT_IDS} are "
            "allowed",
            param="prompt",
        )
    return [""] * len(lists), [read_ids(ids, "prompt") for ids in lists]


def read_ids(ids: list[Any], path: str) -> Ids:
    """Token ids of a list.

    Raises:
        ApiError: an item is no token id, or the list is empty.
    """
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= _MAX_ID:
            raise ApiError(
                f"'{path}' holds {str(token)[:50]}, which is no token id", param=path
            )
    if not ids:
        raise ApiError(f"'{path}' holds an empty list of token ids", param=path)
    return np.array(ids, np.int32)

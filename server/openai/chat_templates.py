"""Chat templates of tokenizers' folders, rendered in a sandbox as transformers does."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import (
    parse_json,
    read_text,
    require_file,
    special_tokens,
    unreadable,
)
from trimaran.server.openai.errors import ApiError

_SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_FILE, _OTHERS, _CONFIG = (
    "chat_template.jinja",
    "additional_chat_templates",
    "tokenizer_config.json",
)
_DEFAULT, _TOOL_USE = "default", "tool_use"
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; templates read the first, older ones the second."""

_REASONING_NAMES = frozenset(_REASONING)

_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
_LOOPS_OVER_CONTENT = re.compile(r"for\s+\w+\s+in\s+[\w.]*(\[['\"])?content")
_MAX_CACHED = 16


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The templates of one tokenizer, and the special tokens that templates may name."""

    texts: Mapping[str, str]
    tokens: Mapping[str, str] = field(default_factory=dict)

    def text(self, *, has_tools: bool) -> str:
        """The template for a chat.

        Raises:
            ApiError: there are several templates and no default.
        """
        if has_tools and _TOOL_USE in self.texts:
            return self.texts[_TOOL_USE]
        if _DEFAULT in self.texts:
            return self.texts[_DEFAULT]
        raise ApiError(
            f"the model has the chat templates {', '.join(sorted(self.texts))} and no default. "
            "Start the server with --chat-template FILE."
        )


def read_chat_template(folder: Path, override: str = "") -> ChatTemplate | None:
    """The templates of a tokenizer's folder, or ``override`` in their place; None if there are
    none.

    Raises:
        ConfigError: a file cannot be read.
    """
    tokens = special_tokens(folder, _SPECIAL_TOKENS)
    texts = {_DEFAULT: override} if override else _read_texts(folder)
    return ChatTemplate(texts, tokens) if texts else None


def _read_texts(folder: Path) -> dict[str, str]:
    config = folder / _CONFIG
    try:
        texts = {}
        if (folder / _FILE).exists():
            texts[_DEFAULT] = read_text(folder / _FILE)
        for path in sorted((folder / _OTHERS).glob("*.jinja")):
            texts[path.stem] = read_text(path)
        if texts or not config.exists():
            return texts
        require_file(config)
        found = parse_json(read_text(config)).get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(f"{folder}: the chat template", error) from error
    except ValueError as error:
        raise ConfigError(f"{config}: not JSON: {error}") from error
    if isinstance(found, str):
        return {_DEFAULT: found}
    if not isinstance(found, list):
        return {}
    try:
        return {str(each["name"]): str(each["template"]) for each in found}
    except (LookupError, TypeError):
        raise ConfigError(
            f"{config}: chat_template must be a text, or a list of objects with 'name' and "
            "'template'"
        ) from None


@dataclass(slots=True, kw_only=True)
class Chat:
    """What a template renders."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None = None
    documents: Sequence[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further values that the template may read: ``enable_thinking`` and the like."""


class SlowTemplateError(Exception):
    """A rendering takes longer than `RenderedWithin` allows."""


@dataclass(slots=True)
class _Clock:
    """When renderings of this process have to end. One rendering runs at a time."""

    due: float = math.inf
    num_steps: int = 0
    seconds: float = math.inf
    """What a rendering may take, and, on a host so busy that the time is over before, compute
    from then on."""

    computed_due: float | None = None
    """In processor time of the thread, which takes a system call to know."""

    def step(self) -> None:
        """Called for each part, attribute, item and call of a template, of which the rounds of
        a template's loops have some.

        Raises:
            SlowTemplateError: the time is over.
        """
        self.num_steps += 1
        if self.num_steps % _CLOCK_STEPS == 0 and time.monotonic() > self.due:
            self._check_computed()

    def _check_computed(self) -> None:
        computed = time.thread_time()
        if self.computed_due is None:
            self.computed_due = computed + self.seconds
        elif computed > self.computed_due:
            raise SlowTemplateError


_CLOCK_STEPS = 64
_clock = _Clock()


class RenderedWithin:
    """The context in which a rendering that takes longer ends with `SlowTemplateError`. For the
    event loop, which renders at once. A class: a generator takes twice as long for each
    request."""

    __slots__ = ("_seconds",)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        _clock.due, _clock.seconds = time.monotonic() + self._seconds, self._seconds

    def __exit__(self, *error: object) -> None:
        _clock.due, _clock.computed_due = math.inf, None


_DICT_ATTRIBUTES = frozenset(dir(dict))
_ABSENT = object()


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that looks at the time."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """See `Environment`."""
        _clock.step()
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            # What jinja2 does as well, once the error of an absent attribute is made.
            found = obj.get(attribute, _ABSENT)
            return self.undefined(obj=obj, name=attribute) if found is _ABSENT else found
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """See `Environment`."""
        _clock.step()
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **values: Any) -> Any:  # noqa: N805
        """See `SandboxedEnvironment`."""
        _clock.step()
        return super().call(__context, __obj, *args, **values)


def render(template: ChatTemplate, chat: Chat, max_bytes: int) -> str:
    """The prompt of a chat, as ``apply_chat_template`` of transformers makes it.

    Raises:
        ApiError: the template refuses the chat, or the prompt is longer than ``max_bytes``.
    """
    text = template.text(has_tools=chat.tools is not None)
    messages = [_with_reasoning(message) for message in chat.messages]
    final = _tag(messages) if chat.continue_final_message else ""
    values = {**template.tokens, **chat.options}
    parts, num_characters = [], 0
    try:
        for part in compiled(text).generate(
            messages=messages,
            tools=chat.tools,
            documents=chat.documents,
            add_generation_prompt=chat.add_generation_prompt,
            **values,
        ):
            _clock.step()
            # A character has a byte or more.
            num_characters += len(part)
            if num_characters > max_bytes:
                raise ApiError(
                    f"the chat's prompt is longer than {max_bytes} bytes. Shorten the messages."
                )
            parts.append(part)
    except ApiError:
        raise
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ApiError(f"the model's chat template refuses the chat: {error}") from None
    except AttributeError as error:
        raise ApiError(f"the model's chat template cannot render the chat: {error}") from None
    rendered = "".join(parts)
    return _cut(rendered, final) if chat.continue_final_message else rendered


@lru_cache(maxsize=_MAX_CACHED)
def takes_parts(text: str) -> bool:
    """Whether a template goes through the parts of a message's content."""
    return _LOOPS_OVER_CONTENT.search(text) is not None


@lru_cache(maxsize=_MAX_CACHED)
def knows_developer(text: str) -> bool:
    """Whether a template names the role ``developer``."""
    return "developer" in text


@lru_cache(maxsize=_MAX_CACHED)
def compiled(text: str) -> Template:
    """A template, ready to be rendered.

    Raises:
        TemplateError: a mistake in the template.
    """
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    template = environment.from_string(text)
    # A plain dictionary: each rendering goes through all names, and jinja2's chain of
    # dictionaries takes longer than a short template.
    template.globals = dict(template.globals)
    return template


class _Generation(Extension):
    """The tag ``generation``, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The node of a block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.CallBlock(self.call_method("_unchanged"), [], [], body)
        return call.set_lineno(line)

    def _unchanged(self, caller: Macro) -> str:
        return str(caller())


class _Dict:
    """``dict`` of a template, without the attributes of the class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As of ``dict``."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """``namespace`` of a template, without names that lead into the interpreter."""

    def __init__(*args: Any, **values: Any) -> None:
        # As jinja2's own, so that a template may name a value ``self``.
        self, rest = args[0], args[1:]
        found = dict(*rest, **values)
        for name in found:
            _check_name(name)
        Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with '_', such as {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As of transformers: jinja2's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message without nulls, with its reasoning under the names that templates read."""
    given = {name: value for name, value in message.items() if value is not None}
    if _REASONING_NAMES.isdisjoint(given):
        return given
    reasoning = next(given[name] for name in _REASONING if name in given)
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _tag(messages: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text, and return the text."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _CONTINUED
        return content
    for part in reversed(content or []):
        if isinstance(part, dict) and "text" in part:
            text = str(part["text"])
            part["text"] = text + _CONTINUED
            return text
    raise ApiError(
        "'continue_final_message' is true but the last message has no text to continue",
        param="continue_final_message",
    )


def _cut(rendered: str, final: str) -> str:
    """The prompt up to the end of the last message's text."""
    tag = _CONTINUED.strip()
    if final.strip() not in rendered or tag not in rendered:
        raise ApiError(
            "'continue_final_message' is true but the chat template leaves the last message "
            "out, or changes it",
            param="continue_final_message",
        )
    start = rendered.rindex(tag)
    if rendered[start : start + len(_CONTINUED)] == _CONTINUED:
        return rendered[:start]
    # The template trimmed the end of the message.
    return rendered[:start].rstrip()

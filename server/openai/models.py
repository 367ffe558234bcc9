"""The models that clients may name: text models, and their adapters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from trimaran.comm.errors import ConfigError, RequestError
from trimaran.server.config import OpenAiConfig
from trimaran.server.inference.request import Model
from trimaran.server.models.text_models import native_pipeline
from trimaran.server.models.text_pipeline import TextPipeline
from trimaran.server.models.tokenizer import Tokenizer
from trimaran.server.openai.chat_templates import ChatTemplate, compiled, read_chat_template
from trimaran.server.openai.errors import no_text_model, unknown_model
from trimaran.server.openai.parsing.reasoning_formats import (
    REASONING_FORMATS,
    reasoning_of_template,
)
from trimaran.server.openai.parsing.tool_formats import FORMATS, format_of_template, literals_of
from trimaran.server.openai.requests import ChatModel
from trimaran.server.openai.tools import OutputForm
from trimaran.server.service import Service

_SERVED, _CHATS = "openai: served", "openai: chats"
"""Keys of `ModelRegistry.made_of_models`."""

_ADAPTERS_AGE_S = 2.0
"""Names of adapters are read again after this time, where a request asks for them."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name that a client may send."""

    name: str
    model: Model
    pipeline: TextPipeline
    adapter: str = ""
    """The adapter of the name; empty for the model itself."""


@dataclass(frozen=True, slots=True)
class _NativeModels:
    """The text models of this time, without adapters."""

    models: list[ServedModel]
    by_name: Mapping[str, ServedModel]
    """The first model of each name: that of the lowest version."""

    has_adapters: bool
    """Whether one of the models may have adapters."""

    @classmethod
    def of(cls, models: list[ServedModel]) -> _NativeModels:
        by_name = {served.name: served for served in reversed(models)}
        return cls(models, by_name, any(s.pipeline.steps.adapter_folder for s in models))


class OpenAIModels:
    """All served names at this time. Used on the event loop."""

    def __init__(self, service: Service, config: OpenAiConfig) -> None:
        self._service = service
        self._config = config
        self._templates: WeakKeyDictionary[Tokenizer, ChatTemplate | None] = WeakKeyDictionary()
        self._forms: WeakKeyDictionary[Tokenizer, OutputForm] = WeakKeyDictionary()
        self._adapters: dict[str, tuple[float, list[str]]] = {}
        self.created_s = int(time.time())

    async def find(self, name: str) -> ServedModel:
        """The model of a name, able to run.

        Raises:
            ApiError: no such name.
            NotReadyError: known but not able to run now.
        """
        served = self._native().by_name.get(name)
        if served is not None:
            self._service.registry.get_ready(name)
            return served
        for served in await self._all_adapters():
            if served.name == name:
                self._service.registry.get_ready(served.model.name)
                return served
        if any(model.name == name for model in self._service.registry.models()):
            raise no_text_model(name)
        raise unknown_model(name[:100])

    async def all(self) -> list[ServedModel]:
        """Models, then adapters."""
        native = self._native()
        if not native.has_adapters:
            return native.models
        return [*native.models, *await self._all_adapters()]

    async def chat_models(self) -> Mapping[str, ChatModel]:
        """What reading a chat needs of each name. The same object until that changes."""
        # Adapters come with their folder, and the longest prompt with an engine.
        native = self._native()
        served, known = await self.all(), self._service.registry.made_of_models
        state = [(each.name, each.pipeline.steps.max_input_len()) for each in served]
        made_of, chat_models = known.get(_CHATS, (None, {}))
        if made_of != state:
            chat_models = await self._new_chat_models(served)
            # A template that could not be read is read again, as a share may be away.
            is_whole = not any(each.fault for each in chat_models.values())
            if is_whole and self._native() is native:
                known[_CHATS] = state, chat_models
        found: Mapping[str, ChatModel] = chat_models
        return found

    async def _new_chat_models(self, all_served: list[ServedModel]) -> Mapping[str, ChatModel]:
        chat_models: dict[str, ChatModel] = {}
        for served in all_served:
            steps = served.pipeline.steps
            most = steps.tokenizer.limits.most_bytes(steps.max_input_len())
            try:
                template = await self._template(steps.tokenizer)
            except ConfigError as error:
                # Chats with other models go on.
                chat_model = ChatModel(None, most, fault=str(error))
            else:
                chat_model = ChatModel(
                    template, most, form=self._form(steps.tokenizer, template)
                )
            # The first of two equal names counts, as in `find`.
            chat_models.setdefault(served.name, chat_model)
        for model in self._service.registry.models():
            chat_models.setdefault(model.name, ChatModel(None, 0, is_text=False))
        return chat_models

    async def _template(self, tokenizer: Tokenizer) -> ChatTemplate | None:
        if tokenizer not in self._templates:
            folder = Path(self._config.chat_tokenizer or tokenizer.folder)
            self._templates[tokenizer] = await asyncio.to_thread(
                _checked_template, folder, self._config.chat_template
            )
        return self._templates[tokenizer]

    def _form(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> OutputForm:
        """What the model's output consists of."""
        found = self._forms.get(tokenizer)
        if found is None:
            text = "".join(template.texts.values()) if template is not None else ""
            name, reasoning = self._config.tool_call_parser, self._config.reasoning_parser
            name = format_of_template(text) if name == "auto" else name
            if reasoning == "auto":
                is_whole = bool(name) and FORMATS[name].is_whole
                reasoning = "think" if is_whole else reasoning_of_template(text)
            reasoning = "" if reasoning == "none" else reasoning
            literals = literals_of(name) if name else ""
            if reasoning:
                literals += REASONING_FORMATS[reasoning].opening
                literals += REASONING_FORMATS[reasoning].closing
            special = [token for token in tokenizer.special_texts if token in literals]
            found = OutputForm(name, reasoning, frozenset(special))
            self._forms[tokenizer] = found
        return found

    def _native(self) -> _NativeModels:
        known = self._service.registry.made_of_models
        if _SERVED not in known:
            known[_SERVED] = _NativeModels.of(self._native_models())
        found: _NativeModels = known[_SERVED]
        return found

    def _native_models(self) -> list[ServedModel]:
        found = []
        for model in self._service.registry.models():
            pipeline = native_pipeline(model)
            if pipeline is not None:
                found.append(ServedModel(model.name, model, pipeline))
        return found

    async def _all_adapters(self) -> list[ServedModel]:
        """Adapters under names of their own: the first model's. With a separator each model's,
        behind its name."""
        native = self._native()
        if not native.has_adapters:
            return []
        found: dict[str, ServedModel] = {}
        separator = self._config.lora_separator
        for served in native.models:
            for adapter in await self._adapters_in(served.pipeline.steps.adapter_folder):
                name = f"{served.name}{separator}{adapter}" if separator else adapter
                found.setdefault(
                    name, ServedModel(name, served.model, served.pipeline, adapter)
                )
        return list(found.values())

    async def _adapters_in(self, folder: str) -> list[str]:
        if not folder:
            return []
        now = time.monotonic()
        read_at, names = self._adapters.get(folder, (-_ADAPTERS_AGE_S, []))
        if now - read_at >= _ADAPTERS_AGE_S:
            names = await asyncio.to_thread(_folders_of, folder)
            self._adapters[folder] = now, names
        return names


def facts_of(pipeline: TextPipeline) -> Mapping[str, Any]:
    """The engine's facts; empty before an engine was up."""
    try:
        return pipeline.steps.facts()
    except RequestError:
        return {}


def _checked_template(folder: Path, override: str) -> ChatTemplate | None:
    template = read_chat_template(folder, override)
    for text in template.texts.values() if template is not None else ():
        try:
            compiled(text)
        except Exception as error:
            raise ConfigError(f"{folder}: the chat template is wrong: {error}") from error
    return template


def _folders_of(folder: str) -> list[str]:
    try:
        return sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    except OSError:
        # The share that holds the folder is away; requests without adapters go on.
        return []

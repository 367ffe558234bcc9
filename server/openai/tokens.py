"""``/tokenize`` and ``/detokenize``: texts or chats to ids, and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from aiohttp import web

from trimaran.server.decoding.pending import PendingBodies
from trimaran.server.http.messages import send_document
from trimaran.server.models.encoded_texts import EncodedTexts, Ids
from trimaran.server.models.tokenizer import INLINE_IDS
from trimaran.server.openai.endpoint import GenerationEndpoint
from trimaran.server.openai.errors import ApiError
from trimaran.server.openai.fields import Fields, list_of
from trimaran.server.openai.models import OpenAIModels, facts_of
from trimaran.server.openai.requests import ChatModel, find_chat_model, read_ids, render_chat
from trimaran.server.openai.routes import OpenAiRoute
from trimaran.server.protocol import json_access

_MAX_IDS = 1 << 20
_PART = 1 << 16
"""Items of a long list that are written in one step."""


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A text to tokenize."""

    model: str
    text: str
    add_special_tokens: bool | None
    has_token_texts: bool


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """Ids to decode."""

    model: str
    ids: Ids


def read_tokenize(fields: Fields, chat_models: Mapping[str, ChatModel]) -> TokenizeRequest:
    """The request of ``/tokenize``: with ``prompt`` or ``messages``.

    Raises:
        ApiError: a member is wrong or unknown.
    """
    model = fields.needed_text("model")
    chat_model = find_chat_model(chat_models, model)
    add_special = fields.boolean("add_special_tokens")
    text = fields.text("prompt")
    if text is None:
        text = render_chat(fields, model, chat_model)
        add_special = add_special or False
    _check_text(text, chat_model.max_prompt_bytes)
    has_texts = fields.boolean("return_token_strs") or False
    fields.finish()
    return TokenizeRequest(model, text, add_special, has_texts)


def _check_text(text: str, max_bytes: int) -> None:
    """Refuse a text that is too long, or no UTF-8: parsing keeps wrong bytes as surrogates."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise ApiError("'prompt' is not UTF-8 text", param="prompt") from None
    if num_bytes > max_bytes:
        raise ApiError(
            f"'prompt' has {num_bytes} bytes but may have at most {max_bytes}. Shorten the "
            "text, or start the server with a larger --max-text-bytes.",
            param="prompt",
        )


def read_detokenize(fields: Fields) -> DetokenizeRequest:
    """The request of ``/detokenize``.

    Raises:
        ApiError: a member is wrong or unknown.
    """
    model = fields.needed_text("model")
    tokens = list_of(fields, "tokens", int, "token ids", _MAX_IDS)
    if tokens is None:
        raise ApiError("'tokens' is missing", param="tokens")
    fields.finish()
    return DetokenizeRequest(model, read_ids(tokens, "tokens") if tokens else _NO_IDS)


_NO_IDS: Ids = np.empty(0, np.int32)


class TokensEndpoint:
    """Both routes."""

    def __init__(
        self, endpoint: GenerationEndpoint, pending: PendingBodies, models: OpenAIModels
    ) -> None:
        self._endpoint = endpoint
        self._pending = pending
        self._models = models

    async def tokenize(
        self, request: web.BaseRequest, route: OpenAiRoute
    ) -> web.StreamResponse:
        """The ids of a text or a chat.

        Raises:
            RequestError: the request is wrong.
        """
        return await self._answer(request, read_tokenize, self._tokenized, is_chat=True)

    async def detokenize(
        self, request: web.BaseRequest, route: OpenAiRoute
    ) -> web.StreamResponse:
        """The text of some ids.

        Raises:
            RequestError: the request is wrong.
        """
        return await self._answer(request, read_detokenize, self._detokenized)

    async def _answer(
        self,
        request: web.BaseRequest,
        reader: Any,
        work: Callable[[Any], Awaitable[bytes]],
        *,
        is_chat: bool = False,
    ) -> web.StreamResponse:
        """Answer with the document that ``work`` makes of what ``reader`` reads. The request
        counts as running, so that a drain waits for its answer."""
        admission = self._endpoint.admission
        with self._pending.body() as memory:
            body = await self._endpoint.read_body(request, memory)
            with admission.admit():
                with admission.unless_aborted():
                    wanted = await self._endpoint.read(body, reader, is_chat=is_chat)
                    memory.release()
                    document = await work(wanted)
                return await send_document(request, document, is_last=admission.is_draining)

    async def _tokenized(self, wanted: TokenizeRequest) -> bytes:
        served = await self._models.find(wanted.model)
        tokenizer = served.pipeline.steps.tokenizer
        add_special = wanted.add_special_tokens
        found = await tokenizer.encode([wanted.text], add_special is None or add_special)
        longest = facts_of(served.pipeline).get("max_seq_len")

        def text_of(token_id: int) -> bytes:
            return json_access.dump(tokenizer.token_text(token_id))

        def answer() -> bytes:
            has_texts = wanted.has_token_texts
            return json_access.dump_in_parts(
                {
                    "count": len(found.ids),
                    "max_model_len": longest,
                    "tokens": _list_of(found.ids, b"%d".__mod__),
                    "token_strs": _list_of(found.ids, text_of) if has_texts else None,
                }
            )

        is_short = len(found.ids) <= INLINE_IDS
        return answer() if is_short else await tokenizer.in_thread(answer)

    async def _detokenized(self, wanted: DetokenizeRequest) -> bytes:
        served = await self._models.find(wanted.model)
        lengths = np.array([len(wanted.ids)], np.int64)
        tokenizer = served.pipeline.steps.tokenizer
        (text,) = await tokenizer.decode_each(
            EncodedTexts(wanted.ids, lengths), skip_special_tokens=False
        )
        answer = partial(json_access.dump, {"prompt": text})
        is_short = len(wanted.ids) <= INLINE_IDS
        return answer() if is_short else await tokenizer.in_thread(answer)


def _list_of(ids: Ids, write: Callable[[int], bytes]) -> json_access.Fragment:
    """A list with the JSON of each id. A million ids take little more memory than the list's
    text: each different id is written once."""
    different, numbers = np.unique(ids, return_inverse=True)
    written = [write(token_id) for token_id in different.tolist()]
    parts = [
        b",".join([written[number] for number in numbers[start : start + _PART].tolist()])
        for start in range(0, len(numbers), _PART)
    ]
    return json_access.Fragment(b"[%b]" % b",".join(parts))

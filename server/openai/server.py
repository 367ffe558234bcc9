"""The OpenAI port: its routes, and what errors look like there."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from aiohttp import web

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.access.control import PortGuard
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.decoding.pending import PendingBodies
from trimaran.server.http.messages import json_response, read_small_body
from trimaran.server.http.port import HttpPort, PortPlace
from trimaran.server.metrics.openmetrics import negotiated
from trimaran.server.openai.chats import ChatAnswer
from trimaran.server.openai.completions import CompletionAnswer
from trimaran.server.openai.endpoint import GenerationEndpoint
from trimaran.server.openai.errors import ApiError, error_response, plain_error
from trimaran.server.openai.models import OpenAIModels, ServedModel, facts_of
from trimaran.server.openai.requests import read_chat, read_completion
from trimaran.server.openai.response_requests import read_response
from trimaran.server.openai.responses import ResponseAnswer
from trimaran.server.openai.routes import OpenAiRoute, match
from trimaran.server.openai.tokens import TokensEndpoint
from trimaran.server.protocol.load_request import LoadRequest
from trimaran.server.service import Service

_COMPLETION_TOKENS = 16
"""OpenAI's limit on a completion that sets none."""

_PAGE = files("trimaran.server.openai").joinpath("chat_page.html").read_text(encoding="utf-8")


def _page_headers(page: str) -> dict[str, str]:
    """Headers by which a browser runs the page's own script alone, and asks no other host."""
    script = re.findall("<script>(.*)</script>", page, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {
        "Content-Security-Policy": (
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "Cache-Control": "no-cache",
    }


_PAGE_HEADERS = _page_headers(_PAGE)

Handler = Callable[[web.BaseRequest, OpenAiRoute], Awaitable[web.StreamResponse]]


class OpenAiServer(HttpPort):
    """Serves OpenAI's HTTP protocol on one address."""

    def __init__(self, service: Service, decoder: Decoder, guard: PortGuard) -> None:
        config = service.config.openai
        place = PortPlace("OpenAI service", config.address, config.port or 0, is_shared=True)
        super().__init__(service, place, guard)
        pending = PendingBodies(
            service.config.http_max_pending_bytes, "--http-max-pending-size"
        )
        self._served = models = OpenAIModels(service, config)
        self._endpoint = GenerationEndpoint(service, decoder, pending, models, config)
        tokens = TokensEndpoint(self._endpoint, pending, models)
        self._handlers: dict[str, Handler] = {
            "models": self._models,
            "model": self._model,
            "completions": self._completions,
            "chat": self._chat,
            "responses": self._responses,
            "embeddings": self._embeddings,
            "tokenize": tokens.tokenize,
            "detokenize": tokens.detokenize,
            "page": self._page,
            "live": self._live,
            "ready": self._ready,
            "version": self._version,
            "metrics": self._metrics,
            "load": self._load,
            "unload": self._unload,
        }

    def _match(self, path: str) -> OpenAiRoute | None:
        return match(path)

    async def _dispatch(
        self, request: web.BaseRequest, route: OpenAiRoute
    ) -> web.StreamResponse:
        return await self._handlers[route.action](request, route)

    def _error(self, error: RequestError) -> web.Response:
        return error_response(error)

    def _plain_error(self, status: int, text: str) -> web.Response:
        return plain_error(status, text)

    # ---- generation ---------------------------------------------------------------------

    async def _completions(
        self, request: web.BaseRequest, route: OpenAiRoute
    ) -> web.StreamResponse:
        return await self._endpoint.generate(
            request,
            "cmpl-",
            CompletionAnswer,
            read_completion,
            default_max_tokens=_COMPLETION_TOKENS,
        )

    async def _chat(self, request: web.BaseRequest, route: OpenAiRoute) -> web.StreamResponse:
        return await self._endpoint.generate(
            request, "chatcmpl-", ChatAnswer, read_chat, is_chat=True
        )

    async def _responses(
        self, request: web.BaseRequest, route: OpenAiRoute
    ) -> web.StreamResponse:
        return await self._endpoint.generate(
            request, "resp_", ResponseAnswer, read_response, is_chat=True
        )

    async def _embeddings(self, request: web.BaseRequest, route: OpenAiRoute) -> web.Response:
        raise ApiError(
            "embeddings are not served: the engines generate text. Ask another server for "
            "/v1/embeddings.",
            kind=ErrorKind.UNSUPPORTED,
        )

    # ---- models -------------------------------------------------------------------------

    async def _models(self, request: web.BaseRequest, route: OpenAiRoute) -> web.Response:
        data = [self._card(served) for served in await self._served.all()]
        return json_response({"object": "list", "data": data})

    async def _model(self, request: web.BaseRequest, route: OpenAiRoute) -> web.Response:
        return json_response(self._card(await self._served.find(route.name)))

    def _card(self, served: ServedModel) -> dict[str, Any]:
        card = {
            "id": served.name,
            "object": "model",
            "created": self._served.created_s,
            "owned_by": "trimaran",
        }
        longest = facts_of(served.pipeline).get("max_seq_len")
        if longest is not None:
            card["max_model_len"] = int(longest)
        if served.adapter:
            card["parent"] = served.model.name
        return card

    async def _load(self, request: web.BaseRequest, route: OpenAiRoute) -> web.Response:
        await read_small_body(request)
        await self._service.load(LoadRequest(route.name))
        return json_response({"status": "success"})

    async def _unload(self, request: web.BaseRequest, route: OpenAiRoute) -> web.Response:
        await read_small_body(request)
        await self._service.unload(route.name, unload_dependents=False)
        return json_response({"status": "success"})

    # ---- the server ---------------------------------------------------------------------

    async def _page(self, request: web.BaseRequest, route: OpenAiRoute) -> web.Response:
        return web.Response(text=_PAGE, content_type="text/html", headers=_PAGE_HEADERS)

    async def _live(self, request: web.BaseRequest, route: OpenAiRoute) -> web.Response:
        return web.Response(content_type="text/plain")

    async def _ready(self, request: web.BaseRequest, route: OpenAiRoute) -> web.Response:
        is_ready = self._service.is_ready
        return web.Response(status=200 if is_ready else 503, content_type="text/plain")

    async def _version(self, request: web.BaseRequest, route: OpenAiRoute) -> web.Response:
        return json_response({"version": version("trimaran")})

    async def _metrics(self, request: web.BaseRequest, route: OpenAiRoute) -> web.Response:
        await self._service.refresh()
        body, content_type = negotiated(
            self._service.metrics.render(), request.headers.get("Accept", "")
        )
        return web.Response(body=body, headers={"Content-Type": content_type})

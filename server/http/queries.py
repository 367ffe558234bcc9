"""The HTTP routes that ask about the server and its models, or change its settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.decoding.body import LongBody
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.decoding.pending import PendingBodies
from trimaran.server.http.messages import JSON, json_response, read_body, read_small_body
from trimaran.server.http.routes import Route
from trimaran.server.inference.metadata import metadata_message, server_metadata, to_json
from trimaran.server.protocol import json_access
from trimaran.server.protocol.load_request import (
    REPOSITORY_NAME_REFUSED,
    load_request_of_json,
    unload_dependents_of_json,
)
from trimaran.server.protocol.region_json import json_of_region, region_of_json
from trimaran.server.service import Service
from trimaran.server.settings import changes_of_json, json_of_values

_Handler = Callable[[Service, Route, bytes], web.Response]


async def load(
    service: Service,
    decoder: Decoder,
    pending: PendingBodies,
    request: web.BaseRequest,
    route: Route,
) -> web.Response:
    """Load a model, whose files may come with the request.

    Raises:
        RequestError: the request was wrong, or the model cannot be loaded.
    """
    with pending.body() as memory:
        body = await read_body(request, service.config.http_max_input_bytes, memory)
        if isinstance(body, LongBody):
            service.check_control()
            parsed = await decoder.read_load(route.name, body)
        else:
            parsed = load_request_of_json(route.name, body)
        await service.load(parsed)
    return web.Response(content_type=JSON)


async def answer(service: Service, request: web.BaseRequest, route: Route) -> web.Response:
    """Answer a route of this module.

    Raises:
        RequestError: the request was wrong or is not served.
    """
    body = b""
    if request.method == "POST":
        body = await read_small_body(request)
    elif route.action == "logging":
        return json_response(service.log_settings.values())
    elif route.action == "trace":
        return _trace(service, route)
    if route.action in _SHARED:
        return await _SHARED[route.action](service, route, body)
    return _HANDLERS[route.action](service, route, body)


def _health(is_good: bool) -> web.Response:
    return web.Response(status=200 if is_good else 400, content_type="text/plain")


def _live(service: Service, route: Route, body: bytes) -> web.Response:
    return _health(True)


def _ready(service: Service, route: Route, body: bytes) -> web.Response:
    return _health(service.is_ready)


def _server_metadata(service: Service, route: Route, body: bytes) -> web.Response:
    return json_response(server_metadata(service.config.server_id))


def _model_ready(service: Service, route: Route, body: bytes) -> web.Response:
    if not service.registry.is_model_ready(route.name, route.version):
        raise RequestError("Model version not ready")
    return _health(True)


def _model_metadata(service: Service, route: Route, body: bytes) -> web.Response:
    model = service.registry.get_ready(route.name, route.version)
    versions = [model.version] if route.version else service.registry.ready_versions(route.name)
    return json_response(to_json(metadata_message(model, versions)))


def _model_config(service: Service, route: Route, body: bytes) -> web.Response:
    model = service.registry.get(route.name, route.version)
    return json_response(to_json(service.model_config(model)))


async def _statistics(service: Service, route: Route, body: bytes) -> web.Response:
    document = to_json(await service.statistics(route.name, route.version))
    for entry in document["model_stats"]:
        for name in ("batch_stats", "memory_usage"):
            # Clients know these fields, which follow the response statistics.
            entry[name] = entry.pop(name)
    return json_response(document)


async def _index(service: Service, route: Route, body: bytes) -> web.Response:
    only_ready = False
    if body:
        document = json_access.as_object(json_access.parse(body), "the request")
        only_ready = document.get("ready", False)
        if not isinstance(only_ready, bool):
            raise RequestError("Invalid value for 'ready': expected a boolean")
    entries: list[dict[str, Any]] = []
    for entry in await service.index(only_ready):
        members = asdict(entry)
        entries.append({name: value for name, value in members.items() if value})
    return json_response(entries)


async def _unload(service: Service, route: Route, body: bytes) -> web.Response:
    unload_dependents = unload_dependents_of_json(body)
    await service.unload(route.name, unload_dependents=unload_dependents)
    return web.Response(content_type=JSON)


def _named_repository(service: Service, route: Route, body: bytes) -> web.Response:
    raise RequestError(REPOSITORY_NAME_REFUSED, ErrorKind.UNSUPPORTED)


async def _logging(service: Service, route: Route, body: bytes) -> web.Response:
    document = json_access.parse(body)
    await service.change_log_settings(json_access.as_object(document, "the log settings"))
    return json_response(service.log_settings.values())


def _trace(service: Service, route: Route) -> web.Response:
    service.check_traced(route.name)
    return json_response(json_of_values(service.trace_settings.values(route.name)))


async def _trace_change(service: Service, route: Route, body: bytes) -> web.Response:
    service.check_traced(route.name)
    changes = changes_of_json(json_access.parse(body))
    await service.change_trace_settings(route.name, changes)
    return _trace(service, route)


async def _register(service: Service, route: Route, body: bytes) -> web.Response:
    service.regions.check_allowed()
    await service.register_region(region_of_json(route.kind, route.name, body))
    return web.Response(content_type=JSON)


async def _unregister(service: Service, route: Route, body: bytes) -> web.Response:
    await service.unregister_region(route.kind, route.name)
    return web.Response(content_type=JSON)


def _regions(service: Service, route: Route, body: bytes) -> web.Response:
    return json_response(
        list(map(json_of_region, service.regions.status(route.kind, route.name)))
    )


_SHARED: dict[str, Callable[[Service, Route, bytes], Awaitable[web.Response]]] = {
    "statistics": _statistics,
    "index": _index,
    "unload": _unload,
    "logging": _logging,
    "trace": _trace_change,
    "region_register": _register,
    "region_unregister": _unregister,
}
"""Routes that the first of several front ends answers."""

_HANDLERS: dict[str, _Handler] = {
    "live": _live,
    "ready": _ready,
    "server_metadata": _server_metadata,
    "model_ready": _model_ready,
    "model_metadata": _model_metadata,
    "model_config": _model_config,
    "named_repository": _named_repository,
    "region_status": _regions,
}

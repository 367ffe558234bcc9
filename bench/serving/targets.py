"""The two protocols of token-level models: HTTP generate endpoints and gRPC."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import numpy as np
import tritonclient.grpc.aio as grpcclient
from tritonclient.utils import InferenceServerException

from trimaran.bench.serving.load import Prepared, Record
from trimaran.bench.serving.workload import Item
from trimaran.client.stream import ServerError
from trimaran.client.tensors import row, tensor
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import parse_json
from trimaran.comm.transport.channels import channel_options

# A read may wait as long as the longest generation; only the connection has a deadline.
_LONGEST_LINE_BYTES = 64 << 20
_NUM_CHANNELS = 16
_OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
_CONFIG_S = 30.0
"""Longest wait for a model's configuration, which needs no computation."""

_CONFIG_TIMEOUT = aiohttp.ClientTimeout(total=_CONFIG_S)
_SHOWN_CHARS = 80
_EXCLUDE_INPUT = "exclude_input_in_output"
_TRUE = ("True", "true", "TRUE", "1")
_JSON = {"Content-Type": "application/json"}
_HTTP_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The properties of a token-level model's answers, by its configuration."""

    is_decoupled: bool
    excludes_input: bool
    """Non-streaming answers exclude the prompt, whether or not a request sets that."""

    @classmethod
    def of(cls, is_decoupled: bool, exclude_input: str) -> ServedModel:
        """The value of the parameter ``exclude_input_in_output``."""
        return cls(is_decoupled, exclude_input in _TRUE)


class TokenModels:
    """The models, which alternate, and the parameters of every request."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        *,
        is_streaming: bool,
        excludes_input: bool,
        temperature: float | None = None,
    ) -> None:
        self._turns = itertools.cycle(models.items())
        self._is_streaming = is_streaming
        self.excludes_input = excludes_input
        # These parameters draw ids of the whole vocabulary; without them a server is greedy.
        self.sampling: dict[str, float] = {}
        if temperature is not None:
            self.sampling = {"temperature": temperature, "runtime_top_p": 1.0}

    def next(self) -> tuple[str, ServedModel]:
        """The next model."""
        return next(self._turns)

    def streams(self, model: ServedModel) -> bool:
        """Whether requests demand a response for each step."""
        return model.is_decoupled and self._is_streaming

    def hidden(self, model: ServedModel, item: Item) -> int:
        """Tokens of a model's answer that are the prompt's echo."""
        lacks_it = self.streams(model) or self.excludes_input or model.excludes_input
        return 0 if lacks_it else len(item.ids)


class HttpTarget:
    """``generate_stream`` of decoupled models, ``generate`` of other models."""

    def __init__(self, url: str, models: TokenModels) -> None:
        self._url = url
        self._models = models
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=_HTTP_TIMEOUT,
            # One event may hold a whole prompt and its answer on one line.
            read_bufsize=_LONGEST_LINE_BYTES,
        )

    async def connect(self, count: int) -> None:
        """Open ``count`` connections."""
        await asyncio.gather(*(self._look() for _ in range(count)), return_exceptions=True)

    async def _look(self) -> None:
        path = f"http://{self._url}/v2/health/live"
        async with self._session.get(path, timeout=_CONFIG_TIMEOUT) as reply:
            await reply.read()

    def prepare(self, item: Item) -> Prepared:
        """Create one request's body."""
        name, model = self._models.next()
        body: dict[str, Any] = {
            "input_ids": item.ids,
            "input_lengths": len(item.ids),
            "request_output_len": item.output_len,
            "streaming": self._models.streams(model),
            **self._models.sampling,
        }
        if self._models.excludes_input:
            body["exclude_input_in_output"] = True
        verb = "generate_stream" if model.is_decoupled else "generate"
        path = f"http://{self._url}/v2/models/{name}/{verb}"
        hidden = self._models.hidden(model, item)
        return partial(self._post, path, json.dumps(body).encode(), model, hidden)

    async def _post(
        self, path: str, body: bytes, model: ServedModel, hidden: int, record: Record
    ) -> None:
        record.is_stream = self._models.streams(model)
        async with self._session.post(path, data=body, headers=_JSON) as reply:
            if reply.status != 200:
                text = (await reply.text()).strip().removeprefix("data: ")
                raise ServerError(f"HTTP {reply.status}: {text}")
            if not model.is_decoupled:
                _note(record, await reply.json(), hidden)
                return
            async for line in reply.content:
                if line.startswith(b"data: "):
                    _note(record, json.loads(line[6:]), hidden)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


class GrpcTarget:
    """``ModelStreamInfer`` of decoupled models, ``ModelInfer`` of other models."""

    def __init__(self, url: str, models: TokenModels) -> None:
        # Several connections: all streams of one would go to one of several front ends.
        self._clients = [
            grpcclient.InferenceServerClient(
                url, channel_args=[_OWN_CONNECTION, *channel_options(url)]
            )
            for _ in range(_NUM_CHANNELS)
        ]
        self._next_client = itertools.cycle(self._clients)
        self._models = models
        self.stream_timeout_s: float | None = None

    async def connect(self, count: int) -> None:
        """Open its connections, maybe fewer than ``count`` streams."""
        looks = (client.is_server_live() for client in self._clients[:count])
        await asyncio.gather(*looks, return_exceptions=True)

    def prepare(self, item: Item) -> Prepared:
        """Create one request's tensors."""
        name, model = self._models.next()
        inputs = [
            tensor("input_ids", [item.ids], np.int32),
            row("input_lengths", len(item.ids), np.int32),
            row("request_output_len", item.output_len, np.int32),
            row("streaming", self._models.streams(model), bool),
            *(row(key, value, np.float32) for key, value in self._models.sampling.items()),
        ]
        if self._models.excludes_input:
            inputs.append(row("exclude_input_in_output", True, bool))
        return partial(self._infer, name, inputs, model, self._models.hidden(model, item))

    async def _infer(
        self, name: str, inputs: list[Any], model: ServedModel, hidden: int, record: Record
    ) -> None:
        record.is_stream = self._models.streams(model)
        client = next(self._next_client)
        try:
            if not model.is_decoupled:
                _note_result(record, await client.infer(name, inputs), hidden)
                return
            results = client.stream_infer(
                _once({"model_name": name, "inputs": inputs}),
                stream_timeout=self.stream_timeout_s,
            )
            async for result, error in results:
                if error is not None:
                    raise ServerError(error.message())
                _note_result(record, result, hidden)
        except InferenceServerException as error:
            raise ServerError(error.message()) from error

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            await client.close()


async def model_over_http(url: str, name: str) -> ServedModel:
    """The properties of a model.

    Raises:
        ConfigError: no server, no such model, or a server of another kind.
    """
    path = f"http://{url}/v2/models/{name}/config"
    try:
        async with (
            aiohttp.ClientSession(timeout=_CONFIG_TIMEOUT) as session,
            session.get(path) as reply,
        ):
            status, text = reply.status, await reply.text()
    except (aiohttp.ClientError, ValueError) as error:
        raise ConfigError(f"no server answers at http://{url}: {error}") from error
    except asyncio.TimeoutError:
        raise ConfigError(
            f"the server at http://{url} did not say within {_CONFIG_S:.0f} s what model "
            f"{name!r} is. Look after it, or name another --url."
        ) from None
    try:
        config = parse_json(text)
        if "error" in config:
            raise ConfigError(f"model {name!r} at http://{url}: {config['error']}")
        exclude_input = config.get("parameters", {}).get(_EXCLUDE_INPUT, {})
        return ServedModel.of(
            bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
            exclude_input.get("string_value", ""),
        )
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"what answers at http://{url} is no server of models: to GET {path} it says HTTP "
            f"{status}, {text.strip()[:_SHOWN_CHARS]!r}. Name another --url."
        ) from None


async def model_over_grpc(url: str, name: str) -> ServedModel:
    """The properties of a model.

    Raises:
        ConfigError: no server, or no such model.
    """
    options = channel_options(url)
    async with grpcclient.InferenceServerClient(url, channel_args=options) as client:
        try:
            reply = await client.get_model_config(name, client_timeout=_CONFIG_S)
        except InferenceServerException as error:
            raise ConfigError(f"model {name!r} at {url}: {error.message()}") from error
    parameters = reply.config.parameters
    exclude_input = (
        parameters[_EXCLUDE_INPUT].string_value if _EXCLUDE_INPUT in parameters else ""
    )
    return ServedModel.of(reply.config.model_transaction_policy.decoupled, exclude_input)


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _note(record: Record, reply: Mapping[str, Any], hidden: int) -> None:
    """Add a JSON response; ``hidden`` of its tokens are the prompt's echo."""
    if "error" in reply:
        raise ServerError(str(reply["error"]))
    length = reply.get("sequence_length", 0)
    total = sum(length) if isinstance(length, list) else int(length)
    if total > hidden:
        record.arrivals.append((time.monotonic(), total - hidden))


def _note_result(record: Record, result: Any, hidden: int) -> None:
    lengths = result.as_numpy("sequence_length")
    total = 0 if lengths is None else int(lengths.sum())
    if total > hidden:
        record.arrivals.append((time.monotonic(), total - hidden))

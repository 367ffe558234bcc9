"""Requests over HTTP or gRPC, each answered completely, from any thread."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from trimaran.client.stream import InferStream, ServerError, open_client
from trimaran.client.tensors import Array, tensor
from trimaran.client.token_request import has_input

Outputs = dict[str, Array]


class StepClient(Protocol):
    """Calls models by their names."""

    def ask(self, model: str, inputs: Mapping[str, Array]) -> list[Outputs]:
        """The outputs of every response to one request. Blocks; thread safe.

        Raises:
            ServerError: the server refused or failed the request, or is gone.
        """
        ...


class HttpSteps:
    """Unary ``infer`` over HTTP; each thread has a connection of its own."""

    def __init__(self, url: str, *, verbose: bool = False) -> None:
        self._url, self._verbose = url, verbose
        self._own = threading.local()

    def ask(self, model: str, inputs: Mapping[str, Array]) -> list[Outputs]:
        """See `StepClient.ask`."""
        try:
            result = self._client().infer(model, [_http(n, a) for n, a in inputs.items()])
        except (InferenceServerException, OSError) as error:
            raise ServerError(str(error)) from error
        names = [output["name"] for output in result.get_response()["outputs"]]
        return [{name: result.as_numpy(name) for name in names}]

    def _client(self) -> Any:
        if not hasattr(self._own, "client"):
            self._own.client = httpclient.InferenceServerClient(
                self._url, verbose=self._verbose, network_timeout=600
            )
        return self._own.client


class GrpcSteps:
    """A gRPC stream for each request; decoupled and other models answer it."""

    def __init__(self, url: str, *, verbose: bool = False) -> None:
        self._flags = argparse.Namespace(url=url, verbose=verbose)

    def ask(self, model: str, inputs: Mapping[str, Array]) -> list[Outputs]:
        """See `StepClient.ask`."""
        found: list[Outputs] = []
        with open_client(self._flags) as client, InferStream(client, None, None) as stream:
            stream.send(model, [_grpc(name, array) for name, array in inputs.items()])
            while (response := stream.receive()) is not None:
                if response.outputs:
                    found.append(response.outputs)
                if response.is_final:
                    break
        return found

    def has_input(self, model: str, name: str) -> bool:
        """Whether the served model declares an input; raises ServerError."""
        with open_client(self._flags) as client:
            return has_input(client, model, name)


def _http(name: str, array: Array) -> Any:
    holder = httpclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    holder.set_data_from_numpy(array)
    return holder


def _grpc(name: str, array: Array) -> Any:
    return tensor(name, array, array.dtype)


def text_of(value: str) -> Array:
    """A text as an input of shape [1, 1]."""
    return np.array([[value.encode()]], dtype=np.object_)


def one_of(value: Any, dtype: Any) -> Array:
    """A value as an input of shape [1, 1]."""
    return np.array([[value]], dtype=dtype)

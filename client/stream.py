"""One open gRPC stream: requests go out, responses are received in the order of the wire."""

from __future__ import annotations

import argparse
import queue
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from trimaran.client.tensors import Array, outputs_of
from trimaran.comm.errors import ConfigError, TrimaranError
from trimaran.comm.transport.channels import channel_options

_MAX_PORT = 65535
_KEY_FILES = ("root_certificates", "private_key", "certificate_chain")


class ServerError(TrimaranError):
    """The server refused or failed a request."""


class CancelledByClient(TrimaranError):
    """The call ended because this client cancelled it."""


@dataclass(frozen=True, slots=True)
class Response:
    """One response of a stream."""

    outputs: dict[str, Array]
    is_final: bool


class InferStream:
    """A stream to one server. Use as a context manager; closing cancels running requests."""

    def __init__(self, client: Any, timeout_s: float | None, compression: str | None) -> None:
        self._client = client
        self._responses: queue.Queue[Response | TrimaranError] = queue.Queue()
        client.start_stream(
            self._take, stream_timeout=timeout_s, compression_algorithm=compression
        )

    def __enter__(self) -> InferStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.stop_stream(cancel_requests=True)

    def send(
        self,
        model: str,
        inputs: list[Any],
        request_id: str = "",
        outputs: list[str] | None = None,
    ) -> None:
        """Send one request; ``outputs`` limits the returned outputs.

        Raises:
            ServerError: the server cannot be reached, or the stream broke.
        """
        wanted = [grpcclient.InferRequestedOutput(name) for name in outputs or ()]
        try:
            self._client.async_stream_infer(
                model,
                inputs,
                outputs=wanted or None,
                request_id=request_id,
                # Without this option a final flag after the last data would not be sent.
                enable_empty_final_response=True,
            )
        except InferenceServerException as error:
            raise self._what_broke(error) from error

    def receive(self, timeout_s: float | None = None) -> Response | None:
        """The next response, or None if none arrives in time. Blocks.

        Raises:
            ServerError: the server refused or failed a request, or is gone.
            CancelledByClient: `cancel` ended the stream.
        """
        try:
            item = self._responses.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, TrimaranError):
            raise item
        return item

    def _what_broke(self, error: InferenceServerException) -> TrimaranError:
        """The reason why the stream takes no more requests; the raised error does not have
        it.
        """
        while not self._responses.empty():
            item = self._responses.get()
            if isinstance(item, TrimaranError):
                return item
        return ServerError(error.message())

    def cancel(self) -> None:
        """Cancel the call with all its running requests."""
        self._client.stop_stream(cancel_requests=True)

    def _take(self, result: Any, error: InferenceServerException | None) -> None:
        if error is None:
            parameters = result.get_response().parameters
            # A server without final flags answers every request once.
            is_final = (
                "triton_final_response" not in parameters
                or parameters["triton_final_response"].bool_param
            )
            self._responses.put(Response(outputs_of(result), is_final))
        elif error.status() == "StatusCode.CANCELLED":
            self._responses.put(CancelledByClient(error.message()))
        else:
            self._responses.put(ServerError(error.message()))


def add_url_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that every gRPC client has."""
    parser.add_argument("-v", "--verbose", action="store_true", help="print every message")
    parser.add_argument(
        "-u", "--url", default="localhost:8001", metavar="HOST:PORT",
        help="the server's gRPC endpoint (localhost:8001)",
    )  # fmt: skip


def add_channel_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of an encrypted, compressed or time-limited channel."""
    parser.add_argument("-s", "--ssl", action="store_true", help="encrypt the channel")
    parser.add_argument("-r", "--root-certificates", metavar="FILE", help="PEM file")
    parser.add_argument("-p", "--private-key", metavar="FILE", help="PEM file")
    parser.add_argument("-x", "--certificate-chain", metavar="FILE", help="PEM file")
    parser.add_argument(
        "-C", "--grpc-compression-algorithm", choices=("deflate", "gzip"), metavar="NAME",
        help="deflate or gzip",
    )  # fmt: skip
    parser.add_argument(
        "-t", "--stream-timeout", type=float, metavar="S", help="longest life of the stream"
    )


def open_client(args: argparse.Namespace) -> Any:
    """The client that the channel flags describe. A context manager.

    Raises:
        ConfigError: the URL, a name or a key file is not usable.
    """
    check_names(args)
    options = {}
    if getattr(args, "ssl", False):
        options = {
            "ssl": True,
            **{name: _existing(name, getattr(args, name)) for name in _KEY_FILES},
        }
    check_url(args.url)
    return grpcclient.InferenceServerClient(
        args.url, verbose=args.verbose, channel_args=channel_options(args.url), **options
    )


def check_names(args: argparse.Namespace) -> None:
    """Refuse names that cannot be sent; raises ConfigError."""
    for name in ("url", "model_name", "token_model_name", "request_id"):
        _check_text(name, getattr(args, name, None) or "")
    for output in getattr(args, "requested_outputs", ()):
        _check_text("requested_outputs", output)


def check_url(url: str, flag: str = "--url") -> None:
    """Refuse a URL that is not ``HOST:PORT``; raises ConfigError."""
    host, _, port = url.rpartition(":")
    # gRPC reads an IPv6 address without brackets to its end, and connects to port 443 of it.
    is_host = ":" not in host or (host.startswith("[") and host.endswith("]"))
    if not host or not is_host or not port.isdecimal():
        raise ConfigError(
            f"{flag} is {url!r} but must be HOST:PORT, as in localhost:8001 or [::1]:8001"
        )
    # gRPC would use the port modulo 65536: another port, and server.
    if int(port) not in range(1, _MAX_PORT + 1):
        raise ConfigError(f"{flag} is {url!r} but ports go from 1 to {_MAX_PORT}")


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} {text!r} is not a text in UTF-8. Correct it.") from None


def _existing(name: str, path: str | None) -> str | None:
    if path is not None and not Path(path).is_file():
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} {path}: there is no such file. Name one in PEM format.")
    return path

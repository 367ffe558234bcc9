"""Making a gRPC call to a server, and what of its answer clients look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from exchange import VARYING, steady
from google.protobuf.json_format import MessageToDict
from grpc_cases import GrpcCase
from tritonclient.grpc import service_pb2_grpc


class GrpcServer:
    """A channel to one server."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def ask(self, case: GrpcCase) -> dict[str, Any]:
        """Status, text and messages."""
        method = getattr(self._stub, case.method)
        got: list[Any] = []
        answer: dict[str, Any] = {"code": "OK", "messages": got}
        try:
            if case.method == "ModelStreamInfer":
                for message in method(_requests(case), metadata=case.metadata, timeout=10):
                    got.append(_plain(message))
            else:
                got.append(_plain(method(case.messages[0], metadata=case.metadata, timeout=10)))
        except grpc.RpcError as error:
            answer |= {"code": error.code().name, "details": steady(error.details() or "")}
        return answer


def _requests(case: GrpcCase) -> Iterator[Any]:
    yield from case.messages


def _plain(message: Any) -> Any:
    return steady(_without_counts(MessageToDict(message, preserving_proto_field_name=True)))


def _without_counts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_counts(member) for key, member in value.items()
                if key not in VARYING or isinstance(member, dict)}  # fmt: skip
    return [_without_counts(member) for member in value] if isinstance(value, list) else value

"""Access control of gRPC calls: a refused call ends before its message is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from trimaran.server.access.policy import AccessPolicy, Refusal
from trimaran.server.grpc.status import CallStatus, Context

_SERVICE = "/inference.GRPCInferenceService/"
CATEGORIES = {
    **{
        _SERVICE + method: category
        for category, methods in {
            "health": "ServerLive ServerReady ModelReady",
            "metadata": "ServerMetadata ModelMetadata",
            "inference": "ModelInfer ModelStreamInfer",
            "model-config": "ModelConfig",
            "model-repository": "RepositoryIndex RepositoryModelLoad RepositoryModelUnload",
            "statistics": "ModelStatistics",
            "trace": "TraceSetting",
            "logging": "LogSettings",
            "shared-memory": "SystemSharedMemoryStatus SystemSharedMemoryRegister "
            "SystemSharedMemoryUnregister CudaSharedMemoryStatus CudaSharedMemoryRegister "
            "CudaSharedMemoryUnregister",
        }.items()
        for method in methods.split()
    },
    "/grpc.health.v1.Health/Check": "health",
}
"""The category of each method."""


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Refuses calls by the category of their method and their metadata."""

    def __init__(self, policy: AccessPolicy) -> None:
        self._policy = policy

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: Any,
    ) -> grpc.RpcMethodHandler:
        """The method's handler, or one that ends the call."""
        category = CATEGORIES.get(handler_call_details.method)
        if category is None:
            # No method of this server; a table without one of its own fails a test.
            return await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        shown: dict[str, Any] = dict(reversed(metadata))
        refused = self._policy.refusal(category, lambda name: _text(shown.get(name)))
        if refused is None:
            return await continuation(handler_call_details)
        # As a stream, also for a unary call: its message is not waited for.
        return grpc.stream_stream_rpc_method_handler(_refuse(refused))


def _text(value: str | bytes | None) -> str | None:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def _refuse(refused: Refusal) -> Callable[[Any, Context], Awaitable[None]]:
    async def call(requests: Any, context: Context) -> None:
        CallStatus(getattr(grpc.StatusCode, refused.grpc_status), refused.text).set(context)

    return call

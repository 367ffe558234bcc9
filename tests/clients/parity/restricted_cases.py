"""Generated requests to restricted endpoints, with right, wrong and no values."""

from __future__ import annotations

import json
from collections.abc import Iterator

from grpc_cases import GrpcCase, numbers
from http_case import TEXT, HttpCase
from tritonclient.grpc import service_pb2 as pb

# fmt: off

FIRST = "model-repository,logging,shared-memory:admin-key=secret"
SECOND = "statistics,inference:infer-key=other"
FLAGS = (
    "--http-restricted-api", FIRST, "--http-restricted-api", SECOND,
    "--grpc-restricted-protocol", FIRST, "--grpc-restricted-protocol", SECOND,
)
HEADERS: tuple[dict[str, str], ...] = (
    {}, {"admin-key": "secret"}, {"admin-key": "wrong"}, {"admin-key": ""},
    {"infer-key": "other"}, {"infer-key": "secret"}, {"ADMIN-KEY": "secret"},
    {"admin-key": "secret", "infer-key": "other"},
)
_GETS = ("/v2", "/v2/health/ready", "/v2/models/text", "/v2/models/text/config",
         "/v2/models/text/stats", "/v2/models/absent/stats", "/v2/logging", "/v2/trace/setting",
         "/v2/systemsharedmemory/status")
_POSTS = {
    "/v2/logging": {}, "/v2/repository/index": {}, "/v2/repository/models/x/unload": {},
    "/v2/cudasharedmemory/unregister": {}, "/v2/models/text/infer": TEXT,
    "/v2/models/text/generate": {"TEXT": "x"}, "/v2/models/absent/infer": TEXT,
}


def over_http() -> Iterator[HttpCase]:
    """Every category, with each set of headers."""
    for headers in HEADERS:
        for path in _GETS:
            yield HttpCase("restricted", "GET", path, b"", headers)
        for path, document in _POSTS.items():
            body = json.dumps(document).encode()
            yield HttpCase("restricted", "POST", path, body, headers)
        yield HttpCase("restricted", "PUT", "/v2/logging", b"", headers)


def over_grpc() -> Iterator[GrpcCase]:
    """Every category, with each set of headers as metadata, with and without the prefix."""
    calls = (
        ("ServerLive", pb.ServerLiveRequest()), ("LogSettings", pb.LogSettingsRequest()),
        ("ModelStatistics", pb.ModelStatisticsRequest(name="text")),
        ("RepositoryIndex", pb.RepositoryIndexRequest()),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="x")),
        ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
        ("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest()),
        ("ModelInfer", numbers()), ("ModelStreamInfer", numbers()),
        ("TraceSetting", pb.TraceSettingRequest()),
        ("ModelMetadata", pb.ModelMetadataRequest(name="text")),
    )
    for headers in HEADERS:
        for prefix in ("triton-grpc-protocol-", ""):
            metadata = tuple((prefix + k.lower(), v) for k, v in headers.items())
            for method, message in calls:
                yield GrpcCase("restricted", method, (message,), metadata)

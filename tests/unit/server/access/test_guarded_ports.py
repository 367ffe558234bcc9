"""Restricted APIs and API keys, as curl and tritonclient see them."""

from __future__ import annotations

import inspect
import subprocess
import time

import grpc
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.http.auth import BasicAuth
from tritonclient.utils import InferenceServerException

from tests.unit.server.conftest import RunningServer
from trimaran.server.access.config import AccessConfig
from trimaran.server.access.restrictions import CATEGORIES, GRPC_PREFIX, parse_restrictions
from trimaran.server.grpc.access import CATEGORIES as GRPC_CATEGORIES
from trimaran.server.http.routes import _CATEGORIES, match

USER, OPERATOR = "u" * 32, "o" * 32
SAMPLES = (
    "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats", "/v2/logging",
    "/v2/trace/setting", "/v2/repository/index", "/v2/models/m", "/v2/models/m/ready",
    "/v2/models/m/config", "/v2/models/m/stats", "/v2/models/m/infer", "/v2/models/m/generate",
    "/v2/models/m/generate_stream", "/v2/models/m/trace/setting", "/v2/repository/r/index",
    "/v2/repository/models/m/load", "/v2/repository/models/m/unload",
    "/v2/repository/r/models/m/load", "/v2/systemsharedmemory/status",
    "/v2/cudasharedmemory/region/r/status", "/v2/systemsharedmemory/region/r/register",
    "/v2/cudasharedmemory/unregister",
)  # fmt: skip


@pytest.fixture
def start():
    """Start a server of an access configuration."""
    servers = []

    def run(**access):
        servers.append(RunningServer(access=AccessConfig(**access)))
        return servers[-1]

    yield run
    for server in servers:
        server.close()


def restricted(*settings, prefix=""):
    return parse_restrictions(settings, "--http-restricted-api", prefix=prefix, environ={})


def test_every_route_and_every_method_has_a_category():
    assert {match(path).category for path in SAMPLES} == set(CATEGORIES)
    assert {match(path).action for path in SAMPLES} == set(_CATEGORIES)
    servicer = service_pb2_grpc.GRPCInferenceServiceServicer
    methods = [name for name, _ in inspect.getmembers(servicer, inspect.isfunction)]
    names = {method.rpartition("/")[2] for method in GRPC_CATEGORIES}
    assert names == {*methods, "Check"}
    assert set(GRPC_CATEGORIES.values()) == set(CATEGORIES)


def test_a_restricted_api_needs_its_header_as_in_triton(start):
    groups = restricted("model-repository:admin-key=admin-value", "inference,metadata:Infer=v")
    server = start(http_restrictions=groups)
    client = httpclient.InferenceServerClient(server.http_url)
    assert client.is_server_live()
    with pytest.raises(InferenceServerException, match=(
        "This API is restricted, expecting header 'Infer'"
    )) as caught:  # fmt: skip
        client.get_server_metadata()
    assert caught.value.status() == "403"
    assert client.get_server_metadata({"Infer": "v"})["name"]
    for headers in ({}, {"admin-key": "admin-valu"}, {"infer": "v"}):
        with pytest.raises(InferenceServerException, match="expecting header 'admin-key'"):
            client.get_model_repository_index(headers)
    assert client.get_model_repository_index({"admin-key": "admin-value"})
    client.close()
    for action in ("infer", "generate", "generate_stream"):
        answer = server.post(f"/v2/models/repeat/{action}", {"text_input": "a"})
        assert (answer.status, answer.error) == (
            403, "This API is restricted, expecting header 'Infer'",
        )  # fmt: skip
    body = {"text_input": "a", "max_tokens": 1}
    answer = server.post("/v2/models/repeat/generate", body, {"INFER": "v"})
    assert answer.status == 200


def test_a_restricted_protocol_needs_its_metadata_as_in_triton(start):
    groups = restricted("model-repository:Admin=a", "inference,health:k=v", prefix=GRPC_PREFIX)
    server = start(grpc_restrictions=groups)
    said = "This protocol is restricted, expecting header 'triton-grpc-protocol-k'"
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        assert client.get_server_metadata().name
        with pytest.raises(InferenceServerException, match=said) as caught:
            client.is_server_live()
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        assert client.is_server_live({"triton-grpc-protocol-k": "v"})
        with pytest.raises(InferenceServerException, match="triton-grpc-protocol-admin"):
            client.load_model("m")
        assert client.get_model_repository_index({"triton-grpc-protocol-admin": "a"})
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        # No message is needed for the refusal, and no end of the stream.
        endless = iter(lambda: time.sleep(0.01) or pb.ModelInferRequest(), None)
        with pytest.raises(grpc.RpcError, match="restricted") as caught:
            list(stub.ModelStreamInfer(endless))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.RpcError, match="restricted"):
            check(b"")
        assert check(b"", metadata=(("triton-grpc-protocol-k", "v"),)) == b"\x08\x01"


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"user inference,metadata {USER}\noperator all {OPERATOR}\n")
    return path


def test_requests_need_a_key_of_their_category_over_http(start, keys):
    server = start(api_keys=str(keys))
    assert server.get("/v2/health/live").status == 200
    answer = server.get("/v2")
    assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert "is missing" in answer.error
    for path, shown, status in (
        ("/v2", f"Bearer {USER}", 200), ("/v2", f"Bearer {OPERATOR}", 200),
        ("/v2", f"Bearer {USER}x", 401), ("/v2/logging", f"Bearer {USER}", 403),
        ("/v2/logging", f"Bearer {OPERATOR}", 200),
    ):  # fmt: skip
        got = server.request("GET", path, None, {"Authorization": shown})
        assert got.status == status, (path, got.body)
    curl = ["curl", "-s", "-H", f"Authorization: Bearer {USER}", f"http://{server.http_url}/v2"]
    assert b"extensions" in subprocess.run(curl, capture_output=True, check=True).stdout
    with httpclient.InferenceServerClient(server.http_url) as client:
        client.register_plugin(BasicAuth("user", USER))
        assert client.get_server_metadata()
        with pytest.raises(InferenceServerException, match="'user' does not open logging"):
            client.get_log_settings()


def test_requests_need_a_key_of_their_category_over_grpc(start, keys):
    server = start(api_keys=str(keys))
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        assert client.is_server_live()
        with pytest.raises(InferenceServerException, match="is missing") as caught:
            client.get_server_metadata()
        assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
        assert client.get_server_metadata({"authorization": f"Bearer {USER}"})
        with pytest.raises(InferenceServerException, match="does not open") as caught:
            client.get_log_settings({"authorization": f"Bearer {USER}"})
        assert caught.value.status() == "StatusCode.PERMISSION_DENIED"
        assert client.get_log_settings(headers={"authorization": f"Bearer {OPERATOR}"})


def test_a_changed_key_file_takes_effect_without_a_restart(start, keys):
    server = start(api_keys=str(keys))
    new = "n" * 32
    keys.write_text(f"user all {new}\n")
    server.wait_until(
        lambda: (
            server.request("GET", "/v2", None, {"Authorization": f"Bearer {new}"}).status == 200
        )
    )
    old = server.request("GET", "/v2", None, {"Authorization": f"Bearer {OPERATOR}"})
    assert old.status == 401


def test_a_server_without_access_control_serves_everything(start):
    server = start()
    assert server.get("/v2/logging").status == 200
    assert server.post("/v2/repository/index", {}).status == 200

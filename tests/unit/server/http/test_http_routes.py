"""Paths, methods, and the metadata of the server and its models."""

import pytest
import tritonclient.http as triton


@pytest.mark.parametrize(
    "path",
    ["/", "/v2/", "/v2/models", "/v2/models/", "/v2//models/echo", "/v2/models/echo/",
     "/v2/models/echo/versions/abc", "/v2/models/echo/versions/1/", "/v2/models/echo/nothing",
     "/v2/models/echo/versions/1/trace/setting", "/v3", "/v2/health", "/metrics",
     "/v2/models//config", "/v2/models/echo//config", "/v2/systemsharedmemory/region//status",
     "/v2/cudasharedmemory/region//unregister", "/v2/repository//index",
     "/v2/repository/models//load", "/v2/repository//models/echo/unload"],
)  # fmt: skip
def test_paths_are_compared_exactly(server, path):
    answer = server.get(path)
    assert (answer.status, answer.error) == (404, "Not Found")


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v2"), ("POST", "/v2/health/ready"), ("OPTIONS", "/v2/health/live"),
     ("GET", "/v2/models/echo/infer"), ("GET", "/v2/models/repeat/generate"),
     ("PUT", "/v2/models/repeat/generate_stream"), ("GET", "/v2/repository/index"),
     ("POST", "/v2/models/echo/config")],
)  # fmt: skip
def test_a_wrong_method_is_405(server, method, path):
    answer = server.request(method, path)
    assert (answer.status, answer.error) == (405, "Method Not Allowed")


def test_head_is_405_without_a_body(server):
    answer = server.request("HEAD", "/v2/health/ready")
    assert (answer.status, answer.body) == (405, b"")


def test_a_query_string_is_ignored(server):
    assert server.get("/v2?x=1").json["name"] == "triton"


@pytest.mark.parametrize(
    ("target", "status"),
    [("http://h:1/v2/health/live", 200), ("HTTPS://h/v2?x=http://y/", 404),
     ("https://h/v2?x=/v2/z", 200), ("http://h", 404), ("http://h/", 404)],
)  # fmt: skip
def test_a_request_line_may_name_a_whole_url(server, target, status):
    assert server.get(target).status == status


def test_server_metadata_lists_the_extensions_in_order(server):
    document = server.get("/v2").json
    assert list(document) == ["name", "version", "extensions"]
    assert document["version"].startswith("2.")
    assert document["extensions"][0] == "classification"
    assert "statistics" in document["extensions"]


def test_health_bodies_are_empty(server):
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/echo/ready"):
        answer = server.get(path)
        assert (answer.status, answer.body) == (200, b"")


def test_an_unready_model_makes_the_server_unready(server):
    server.asleep.is_ready = False
    try:
        assert server.get("/v2/health/ready").status == 400
        assert server.get("/v2/health/live").status == 200
        answer = server.get("/v2/models/asleep/ready")
        assert (answer.status, answer.error) == (400, "Model version not ready")
        answer = server.post("/v2/models/asleep/infer", {"inputs": []})
        assert (answer.status, answer.error) == (
            503, "Request for unknown model: 'asleep' version 1 is not at ready state",
        )  # fmt: skip
        assert int(answer.headers["Retry-After"]) > 0
        assert server.post("/v2/models/asleep/generate", {}).headers["Retry-After"]
        index = {
            entry["name"]: entry for entry in server.post("/v2/repository/index", b"").json
        }
        assert index["asleep"]["state"] == "UNAVAILABLE"
        assert index["echo"] == {"name": "echo", "version": "1", "state": "READY"}
        ready = server.post("/v2/repository/index", {"ready": True}).json
        assert "asleep" not in [entry["name"] for entry in ready]
    finally:
        server.asleep.is_ready = True
    assert server.get("/v2/health/ready").status == 200


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/v2/models/x", "Request for unknown model: 'x' is not found"),
        ("/v2/models/x/config", "Request for unknown model: 'x' is not found"),
        ("/v2/models/x/ready", "Request for unknown model: 'x' is not found"),
        (
            "/v2/models/echo/versions/7",
            "Request for unknown model: 'echo' version 7 is not found",
        ),
        ("/v2/models/a%20b", "Request for unknown model: 'a b' is not found"),
    ],
)
def test_an_unknown_model_is_404(server, path, text):
    answer = server.get(path)
    assert (answer.status, answer.error) == (404, text)


@pytest.mark.parametrize("action", ["infer", "generate", "generate_stream"])
def test_inference_on_an_unknown_model_is_404(server, action):
    answer = server.post(f"/v2/models/x/versions/2/{action}", {})
    assert (answer.status, answer.error) == (404, "Request for unknown model: 'x' is not found")


def test_statistics_of_an_unknown_model_are_400(server):
    answer = server.get("/v2/models/x/stats")
    assert (answer.status, answer.error) == (400, "requested model 'x' is not available")
    answer = server.get("/v2/models/echo/versions/3/stats")
    assert answer.error == "requested model version is not available for model 'echo'"


def test_model_metadata_shows_the_batch_dimension(server):
    assert server.get("/v2/models/double/versions/1").json == {
        "name": "double",
        "versions": ["1"],
        "platform": "python",
        "inputs": [{"name": "X", "datatype": "INT32", "shape": [-1, 2]}],
        "outputs": [{"name": "Y", "datatype": "INT32", "shape": [-1, 2]}],
    }


def test_the_configuration_lists_its_defaults_in_order(server):
    config = server.get("/v2/models/repeat/config").json
    assert list(config) == [
        "name", "platform", "backend", "runtime", "version_policy", "max_batch_size", "input",
        "output", "batch_input", "batch_output", "optimization", "instance_group",
        "default_model_filename", "cc_model_filenames", "metric_tags", "parameters",
        "model_warmup", "model_transaction_policy",
    ]  # fmt: skip
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert config["input"][0] == {
        "name": "text_input", "data_type": "TYPE_STRING", "format": "FORMAT_NONE", "dims": [1],
        "is_shape_tensor": False, "allow_ragged_batch": False, "optional": False,
        "is_non_linear_format_io": False,
    }  # fmt: skip
    (group,) = config["instance_group"]
    assert (group["name"], group["kind"], group["count"]) == ("repeat", "KIND_CPU", 1)


def test_statistics_count_what_was_served(fresh_server):
    server = fresh_server
    tensor = {"name": "X", "shape": [3, 2], "datatype": "INT32", "data": [0] * 6}
    server.post("/v2/models/double/infer", {"inputs": [tensor]})
    tensor = {"name": "KIND", "shape": [1], "datatype": "BYTES", "data": ["INTERNAL"]}
    server.post("/v2/models/fail/infer", {"inputs": [tensor]})
    server.post("/v2/models/fail/infer", {"inputs": []})
    server.post("/v2/models/fail/infer", {"inputs": [{**tensor, "data": ["full"]}]})
    document = server.get("/v2/models/stats").json["model_stats"]
    assert [entry["name"] for entry in document] == sorted(entry["name"] for entry in document)
    found = {entry["name"]: entry for entry in document}
    double = found["double"]
    assert (double["inference_count"], double["execution_count"]) == (3, 1)
    assert double["batch_stats"][0]["batch_size"] == 3
    totals = double["inference_stats"]
    computed = ("compute_input", "compute_infer", "compute_output")
    assert {totals[key]["count"] for key in ("success", "queue", *computed)} == {1}
    assert totals["success"]["ns"] > 0
    # A request that did not fit the model, or the queue, counts nowhere.
    assert found["fail"]["inference_stats"]["fail"]["count"] == 1


def test_repository_control_is_refused_outside_explicit_mode(server):
    for verb in ("load", "unload"):
        answer = server.post(f"/v2/repository/models/echo/{verb}", b"")
        assert (answer.status, answer.error) == (
            503, "explicit model load / unload is not allowed if polling is enabled",
        )  # fmt: skip
        assert server.post(f"/v2/repository/r/models/echo/{verb}", b"").status == 501
    assert server.post("/v2/repository/index", {"ready": "x"}).error == (
        "Invalid value for 'ready': expected a boolean"
    )


def test_shared_memory_is_refused_as_a_disabled_feature(server):
    for kind in ("systemsharedmemory", "cudasharedmemory"):
        for action in ("region/r/register", "region/r/unregister", "unregister"):
            answer = server.post(f"/v2/{kind}/{action}", b"{}")
            assert answer.status == 501
            assert answer.error.startswith("Client shared memory is disabled.")
        assert server.get(f"/v2/{kind}/status").json == []
    assert server.get("/v2/systemsharedmemory/region/r/status").error == (
        "Unable to find system shared memory region: 'r'"
    )


def test_log_settings_are_read_and_changed(server):
    before = server.get("/v2/logging").json
    assert list(before) == [
        "log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format",
    ]  # fmt: skip
    changed = server.post("/v2/logging", {"log_verbose_level": 1, "log_info": None, "x": 2})
    assert changed.json == {**before, "log_verbose_level": 1}
    assert server.post("/v2/logging", {"log_verbose_level": 0}).json == before
    assert server.post("/v2/logging", {"log_file": "/tmp/x"}).status == 501
    unknown = server.post("/v2/logging", {"log_format": "x"})
    assert unknown.error == "invalid argument for --log_format, got: x"
    assert unknown.status == 503
    assert server.post("/v2/logging", {"log_info": "yes"}).status == 500


def test_trace_settings_change_for_the_server_or_a_model(fresh_server):
    of_server, of_model = "/v2/trace/setting", "/v2/models/echo/trace/setting"
    before = fresh_server.get(of_server).json
    assert before == {
        "trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1",
        "log_frequency": "0", "trace_file": "", "trace_mode": "triton",
    }  # fmt: skip
    changed = fresh_server.post(of_server, {"trace_rate": "7", "trace_level": ["OFF"], "x": 1})
    assert changed.json == {**before, "trace_rate": "7"}
    of_echo = fresh_server.post(of_model, {"trace_rate": "9", "trace_count": "5"}).json
    assert of_echo == {**before, "trace_rate": "9", "trace_count": "5"}
    assert fresh_server.get(of_server).json == changed.json
    # null takes a model's own value back: that of the server is left.
    assert fresh_server.post(of_model, {"trace_rate": None}).json["trace_rate"] == "7"
    assert fresh_server.post(of_server, {"trace_rate": None}).json == before


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({"trace_level": ["TIMESTAMPS"]}, 400, "trace file name is not given"),
        ({"trace_level": ["OFF", "TIMESTAMPS"]}, 400, "Expect only one trace level 'OFF'"),
        ({"trace_level": ["LOUD"]}, 400, "Unable to parse 'trace_level', got: LOUD"),
        ({"trace_level": "OFF"}, 500, "attempt to access JSON non-array as array"),
        ({"trace_rate": "x"}, 400, "Unable to parse 'trace_rate', got: x"),
        ({"trace_rate": 5}, 500, "attempt to access JSON non-string as string"),
        ({"trace_count": "-2"}, 400, "Expecting value >= -1, got:-2"),
        ({"log_frequency": "9" * 5000}, 400, "Unable to parse 'log_frequency'"),
        ({"trace_file": "/tmp/x"}, 501, "can not be updated through network protocol"),
        ([], 500, "non-object"),
        (b"", 500, "failed to parse"),
    ],
)
def test_an_invalid_trace_setting_is_refused_and_changes_nothing(server, changes, status, text):
    before = server.get("/v2/trace/setting").json
    if isinstance(changes, dict):
        changes = {"trace_rate": "3", **changes}
    answer = server.post("/v2/trace/setting", changes)
    assert answer.status == status
    assert text in answer.error
    assert server.get("/v2/trace/setting").json == before


def test_trace_settings_report_that_tracing_is_off(server):
    assert server.get("/v2/trace/setting").json["trace_level"] == ["OFF"]
    assert server.get("/v2/models/echo/trace/setting").json["trace_rate"] == "1000"
    answer = server.get("/v2/models/x/trace/setting")
    assert (answer.status, answer.error) == (400, "Request for unknown model : x")


def test_tritonclient_reads_metadata_and_statistics(server):
    client = triton.InferenceServerClient(server.http_url)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("echo", "1")
    assert not client.is_model_ready("nothing")
    assert client.get_server_metadata()["name"] == "triton"
    assert client.get_model_metadata("double")["versions"] == ["1"]
    assert client.get_model_config("repeat")["max_batch_size"] == 8
    names = [entry["name"] for entry in client.get_model_repository_index()]
    assert names == sorted(names)
    assert client.get_inference_statistics("echo")["model_stats"][0]["name"] == "echo"
    client.close()

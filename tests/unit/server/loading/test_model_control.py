"""Loading and unloading models that need no engine."""

import base64
import http.client
import json
import os
import shutil
from contextlib import ExitStack

import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from controlled_frontend import ControlledFrontend, with_nothing_loaded
from google.protobuf import json_format, text_format
from started_frontend import write_repository
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.server.loading.reader import LoadError, ModelReader, fingerprint
from trimaran.server.protocol.load_request import LoadRequest, OverrideFolders

REFUSED = "explicit model load / unload is not allowed if polling is enabled"
NOT_POLLED = "failed to load '{}', failed to poll from model repository"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A server in explicit mode; every test unloads its models."""
    folder = tmp_path_factory.mktemp("control")
    with with_nothing_loaded(folder) as frontend:
        yield frontend


@pytest.fixture
def frontend(shared):
    """The server with nothing loaded."""
    yield shared
    for name in shared.index():
        shared.unload(name)
    shared.wait_until(lambda: {r for s, r in shared.index().values() if s} <= {"unloaded"})


def config_of(frontend, model):
    """The configuration in the repository."""
    text = (frontend.repository / model / "config.pbtxt").read_text()
    return text_format.Parse(text, ModelConfig())


def as_json(config):
    return json_format.MessageToJson(config, preserving_proto_field_name=True)


def test_a_server_without_models_is_ready_and_lists_loadable_models(frontend):
    assert frontend.is_ready()
    assert set(frontend.index()) == {
        "ensemble", "postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls",
    }  # fmt: skip
    assert frontend.call("POST", "/v2/repository/index", {"ready": True}) == (200, [])
    assert frontend.tokenize()[0] == 404


def test_the_index_reports_a_lost_repository_and_loaded_models_stay_ready(frontend):
    frontend.load("preprocessing")
    moved = frontend.repository.rename(frontend.repository.with_name("moved"))
    try:
        status, body = frontend.call("POST", "/v2/repository/index")
        ready = frontend.call("POST", "/v2/repository/index", {"ready": True})
    finally:
        moved.rename(frontend.repository)

    assert status == 500
    assert "is not a folder" in body["error"]
    assert [entry["name"] for entry in ready[1]] == ["preprocessing"]
    assert frontend.index()["preprocessing"] == ("READY", None)


def test_a_load_from_a_lost_repository_is_refused_with_the_reason(frontend):
    moved = frontend.repository.rename(frontend.repository.with_name("moved"))
    try:
        status, body = frontend.load("preprocessing")
    finally:
        moved.rename(frontend.repository)

    assert (status, body["error"]) == (
        500,
        f"{NOT_POLLED.format('preprocessing')}: model repository {frontend.repository} is not "
        f"a folder. Write one: trimaran init-repo {frontend.repository}",
    )


def test_uploaded_files_without_disk_space_leave_nothing(tmp_path, monkeypatch):
    (tmp_path / "repository").mkdir()
    reader = ModelReader(tmp_path / "repository", OverrideFolders(tmp_path / "scratch"))
    request = LoadRequest("m", "{}", {"1/model.py": b"pass"})

    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(LoadError, match=r"failed to load 'm', .*No space left on device"):
        reader.read([request], lambda _: False)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_uploaded_files_with_too_long_names_leave_nothing(tmp_path):
    (tmp_path / "repository").mkdir()
    reader = ModelReader(tmp_path / "repository", OverrideFolders(tmp_path / "scratch"))
    request = LoadRequest("m" * 300, "{}", {"1/model.py": b"pass"})
    with pytest.raises(LoadError, match=r"File name too long"):
        reader.read([request], lambda _: False)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_uploaded_files_of_a_previous_front_end_are_kept(tmp_path):
    before = OverrideFolders(tmp_path).write(LoadRequest("a", "{}", {"1/x": b""}))
    overrides = OverrideFolders(tmp_path)
    overrides.remove(overrides.write(LoadRequest("b", "{}", {"1/x": b""})))
    assert (before / "1" / "x").exists()


def test_a_broken_link_hides_no_change_of_other_files(tmp_path):
    (tmp_path / "config.pbtxt").write_text("one")
    (tmp_path / ".#config.pbtxt").symlink_to("user@host.1")  # an editor's lock
    before = fingerprint(tmp_path, None)
    (tmp_path / "config.pbtxt").write_text("another")
    assert fingerprint(tmp_path, None) != before


def test_a_loaded_model_serves_until_it_is_unloaded(frontend):
    assert frontend.load("preprocessing") == (200, None)
    assert frontend.index()["preprocessing"] == ("READY", None)
    assert frontend.tokenize()[0] == 200
    assert frontend.unload("preprocessing") == (200, None)
    frontend.wait_until(
        lambda: frontend.index()["preprocessing"] == ("UNAVAILABLE", "unloaded")
    )
    assert frontend.tokenize() == (
        404,
        {"error": "Request for unknown model: 'preprocessing' has no available versions"},
    )
    assert frontend.call("GET", "/v2/models/preprocessing/ready")[0] == 404
    assert frontend.is_ready()
    assert frontend.load("preprocessing")[0] == 200
    assert frontend.tokenize()[0] == 200


def test_the_clients_of_both_protocols_load_and_unload(frontend):
    grpc_url = f"127.0.0.1:{frontend.grpc_port()}"
    for module, url in ((triton_http, frontend.url[7:]), (triton_grpc, grpc_url)):
        with module.InferenceServerClient(url) as client:
            client.load_model("preprocessing")
            assert client.is_model_ready("preprocessing")
            client.unload_model("preprocessing")
            frontend.wait_until(lambda: frontend.index()["preprocessing"][1] == "unloaded")
            changed = config_of(frontend, "preprocessing")
            changed.max_batch_size = 3
            client.load_model("preprocessing", config=as_json(changed))
            found = frontend.call("GET", "/v2/models/preprocessing/config")[1]
            assert found["max_batch_size"] == 3
            content = b"# not run\n"
            changed.name = ""
            client.load_model(
                "carried", config=as_json(changed), files={"file:7/model.py": content}
            )
            assert frontend.call("GET", "/v2/models/carried")[1]["versions"] == ["7"]
            (found,) = frontend.files("model.py")
            assert found.read_bytes() == content
            with pytest.raises(triton_http.InferenceServerException, match="failed to poll"):
                client.load_model("nothing")
            client.unload_model("carried")
            frontend.wait_until(lambda: not frontend.files("model.py"))
            client.unload_model("nothing")


def test_a_load_without_a_change_does_nothing(frontend):
    frontend.load("preprocessing")
    frontend.tokenize()
    assert frontend.load("preprocessing")[0] == 200
    assert frontend.num_succeeded("preprocessing") == 1


@pytest.mark.parametrize("touched", ["config.pbtxt", "1/new_file"])
def test_a_load_after_a_change_starts_the_counters_again(frontend, touched):
    frontend.load("preprocessing")
    frontend.tokenize()
    path = frontend.repository / "preprocessing" / touched
    path.touch()
    assert frontend.load("preprocessing")[0] == 200
    assert frontend.num_succeeded("preprocessing") == 0
    assert frontend.tokenize()[0] == 200


def test_a_changed_tokenizer_counts_as_a_change(frontend, tmp_path):
    shutil.copytree(_tokenizer_dir(frontend), tmp_path / "tokenizer")
    config = config_of(frontend, "preprocessing")
    config.parameters["tokenizer_dir"].string_value = str(tmp_path / "tokenizer")
    path = frontend.repository / "preprocessing" / "config.pbtxt"
    before = path.read_text()
    path.write_text(text_format.MessageToString(config))
    try:
        frontend.load("preprocessing")
        frontend.tokenize()
        os.utime(tmp_path / "tokenizer" / "tokenizer.json")
        frontend.load("preprocessing")
        assert frontend.num_succeeded("preprocessing") == 0
    finally:
        path.write_text(before)


def _tokenizer_dir(frontend):
    return config_of(frontend, "preprocessing").parameters["tokenizer_dir"].string_value


def test_a_failed_load_leaves_the_model_unchanged(frontend):
    frontend.load("preprocessing")
    frontend.tokenize()
    path = frontend.repository / "preprocessing" / "config.pbtxt"
    before = path.read_text()
    path.write_text("max_batch_size: many")
    try:
        status, body = frontend.load("preprocessing")
    finally:
        path.write_text(before)
    assert status == 500
    assert body["error"].startswith(NOT_POLLED.format("preprocessing") + ": ")
    assert f"{path}:1" in body["error"]
    assert frontend.index()["preprocessing"] == ("READY", None)
    assert frontend.num_succeeded("preprocessing") == 1
    assert frontend.is_ready()


def test_a_failed_load_as_an_ensemble_leaves_the_model_unchanged(frontend):
    frontend.load("preprocessing")
    frontend.tokenize()
    steps = config_of(frontend, "preprocessing")
    steps.backend, steps.platform = "", "ensemble"
    status, body = frontend.load("preprocessing", config=as_json(steps))
    assert status == 500
    assert "the ensemble has no step" in body["error"]
    assert frontend.index()["preprocessing"] == ("READY", None)
    assert frontend.num_succeeded("preprocessing") == 1
    assert frontend.is_ready()


def test_an_absent_model_is_not_loaded(frontend):
    for name in ("nothing", "..%2Frepository", "a%2Fb"):
        status, body = frontend.load(name)
        assert (status, body["error"].split(", ")[1]) == (
            500, "failed to poll from model repository",
        )  # fmt: skip
    assert frontend.unload("nothing") == (200, None)
    assert frontend.is_ready()


def test_a_model_without_a_version_is_not_loaded(frontend):
    folder = frontend.repository / "preprocessing" / "1"
    folder.rename(folder.with_name("moved"))
    try:
        status, body = frontend.load("preprocessing")
    finally:
        folder.with_name("moved").rename(folder)
    assert status == 500
    assert body["error"].startswith("failed to load 'preprocessing', no version is available")


def test_a_new_version_replaces_the_old_version(frontend):
    frontend.load("preprocessing")
    newer = frontend.repository / "preprocessing" / "2"
    newer.mkdir()
    try:
        assert frontend.load("preprocessing")[0] == 200
        assert frontend.call("GET", "/v2/models/preprocessing")[1]["versions"] == ["2"]
        _, entries = frontend.call("POST", "/v2/repository/index")
        found = {e.get("version"): e["state"] for e in entries if e["name"] == "preprocessing"}
        assert found == {"1": "UNAVAILABLE", "2": "READY"}
        assert frontend.call("GET", "/v2/models/preprocessing/versions/1/ready")[0] == 400
        assert frontend.is_ready()
    finally:
        newer.rmdir()


def test_a_configuration_in_a_load_request_lasts_until_the_next_load(frontend):
    frontend.load("preprocessing")
    changed = config_of(frontend, "preprocessing")
    changed.max_batch_size = 5
    assert frontend.load("preprocessing", config=as_json(changed))[0] == 200
    path = "/v2/models/preprocessing/config"
    assert frontend.call("GET", path)[1]["max_batch_size"] == 5
    assert frontend.load("preprocessing")[0] == 200
    assert frontend.call("GET", path)[1]["max_batch_size"] == 8


def test_a_model_may_consist_of_uploaded_files_alone(frontend):
    config = config_of(frontend, "postprocessing")
    config.name = ""
    config.output[0].label_filename = "labels.txt"
    files = {"file:1/model.py": b"# not run", "file:1/../labels.txt": b""}
    text = as_json(config)
    status, body = frontend.load(
        "brought", config=text, **{k: base64.b64encode(v).decode() for k, v in files.items()}
    )
    assert status == 500
    assert "names no file of a version" in body["error"]
    config.output[0].label_filename = "1/labels.txt"
    encoded = base64.b64encode(b"# not run").decode()
    files = {"file:1/model.py": encoded, "file:1/labels.txt": encoded}
    assert frontend.load("brought", config=as_json(config), **files)[0] == 200
    assert frontend.index()["brought"] == ("READY", None)
    found = frontend.files("model.py")
    assert [path.read_text() for path in found] == ["# not run"]
    frontend.unload("brought")
    frontend.wait_until(lambda: not found[0].exists())


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"config": {"backend": "x"}}, "attempt to access JSON non-string as string"),
        ({"config": "{nothing"}, "the parameter 'config' is not a model configuration"),
        ({"file:1/a": ""}, "override files were given without the load parameter 'config'"),
        ({"file:1/a": "?", "config": "{}"}, "must be base64 text"),
        ({"file:/etc/passwd": "", "config": "{}"}, "names no file of a version"),
        ({"config": '{"input":[{"name":"QUERY","dims":[1],"data_type":77}]}'},
         "input[0].data_type is 77 but must be one of TYPE_INVALID, TYPE_BOOL, "),
        ({"config": '{"modelWarmup":[{"inputs":{"QUERY":{"dataType":-1}}}]}'},
         "model_warmup[0].inputs['QUERY'].data_type is -1 but must be one of TYPE_INVALID"),
        ({"config": '{"optimization":{"priority":9}}'},
         "optimization.priority is 9 but must be one of PRIORITY_DEFAULT, PRIORITY_MAX"),
        ({"foo": "x"}, "unexpected error on creating Triton parameter"),
    ],
)  # fmt: skip
def test_invalid_load_parameters_are_refused(frontend, parameters, error):
    status, body = frontend.load("preprocessing", **parameters)
    assert status == 500
    assert error in body["error"]


def test_an_invalid_tokenizer_folder_is_refused(frontend):
    config = config_of(frontend, "preprocessing")
    config.parameters["tokenizer_dir"].string_value = "/x\0"
    status, body = frontend.load("preprocessing", config=as_json(config))
    assert status == 500
    assert "embedded null byte. Name in tokenizer_dir a folder" in body["error"]


def test_grpc_refuses_parameters_by_name_and_type(frontend):
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{frontend.grpc_port()}") as client:
        stub, pb = client._client_stub, triton_grpc.service_pb2
        cases = [
            ("foo", {"string_param": "x"}, "unrecognized load parameter 'foo'."),
            ("config", {"bool_param": True}, "parameter 'config', expected string_param."),
            ("file:1/a", {"string_param": ""}, "'file:1/a', expected bytes_param."),
        ]
        for name, value, error in cases:
            request = pb.RepositoryModelLoadRequest(model_name="preprocessing")
            request.parameters[name].MergeFrom(pb.ModelRepositoryParameter(**value))
            with pytest.raises(Exception, match=error) as caught:
                stub.RepositoryModelLoad(request)
            assert caught.value.code().name == "INVALID_ARGUMENT"


def test_an_unloaded_model_leaves_no_metric_series(frontend):
    frontend.load("preprocessing")
    frontend.tokenize()
    assert 'nv_inference_count{model="preprocessing",version="1"} 1' in frontend.metrics()
    frontend.unload("preprocessing")
    frontend.wait_until(lambda: 'model="preprocessing"' not in frontend.metrics())


def test_a_request_with_a_body_in_transfer_uses_the_new_model(frontend):
    frontend.load("preprocessing")
    body = json.dumps({"inputs": [
        {"name": "QUERY", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]},
        {"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": [1, 1], "data": [1]},
    ]}).encode()  # fmt: skip
    connection = http.client.HTTPConnection(frontend.url[7:], timeout=60)
    connection.putrequest("POST", "/v2/models/preprocessing/infer")
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body[:5])
    (frontend.repository / "preprocessing" / "config.pbtxt").touch()
    assert frontend.load("preprocessing")[0] == 200
    connection.send(body[5:])
    answer = connection.getresponse()
    assert answer.status == 200
    answer.read()
    connection.close()
    assert frontend.num_succeeded("preprocessing") == 1


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_other_modes_refuse_load_requests(tmp_path, mode):
    write_repository(tmp_path / "repository")
    for name in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls"):
        shutil.rmtree(tmp_path / "repository" / name)
    with ExitStack() as stack:
        frontend = ControlledFrontend(stack, tmp_path, model_control_mode=mode)
        frontend.wait_ready()
        assert frontend.tokenize()[0] == 200
        assert frontend.load("preprocessing") == (503, {"error": REFUSED})
        assert frontend.unload("preprocessing") == (503, {"error": REFUSED})
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{frontend.grpc_port()}") as client:
            with pytest.raises(triton_http.InferenceServerException, match=REFUSED) as caught:
                client.load_model("preprocessing")
            assert caught.value.status() == "StatusCode.UNAVAILABLE"


def test_polling_follows_the_repository(tmp_path):
    write_repository(tmp_path / "repository")
    for name in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls"):
        shutil.rmtree(tmp_path / "repository" / name)
    with ExitStack() as stack:
        frontend = ControlledFrontend(
            stack, tmp_path, model_control_mode="poll", repository_poll_s=0.1
        )
        frontend.wait_ready()
        frontend.tokenize()
        model = tmp_path / "repository" / "preprocessing"
        (model / "config.pbtxt").touch()
        frontend.wait_until(lambda: frontend.num_succeeded("preprocessing") == 0)
        shutil.copytree(model, tmp_path / "another")
        (tmp_path / "another").rename(tmp_path / "repository" / "another")
        config = tmp_path / "repository" / "another" / "config.pbtxt"
        config.write_text(config.read_text().replace('"preprocessing"', '"another"'))
        frontend.wait_until(lambda: frontend.index().get("another") == ("READY", None))
        broken = config.read_text()
        config.write_text("nonsense")
        frontend.wait_until(lambda: "failed to load 'another'" in frontend.text())
        assert frontend.index()["another"] == ("READY", None)
        config.write_text(broken)
        shutil.rmtree(model)
        frontend.wait_until(
            lambda: frontend.index()["preprocessing"] == ("UNAVAILABLE", "unloaded")
        )
        assert frontend.is_ready()

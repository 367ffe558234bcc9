"""Each route, and each kind of client request, with the repository of each version."""

from __future__ import annotations

import http.client
import json
import queue
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http_client
from served import DEMO_MODEL, Served
from tritonclient.grpc import service_pb2 as pb
from versions import VERSIONS, datatype_of, minor_of, write_repository

from tests.clients.conftest import Bench

TEXT = "It was a dark and"
IDS = [0, 547, 1319]
NUMPY = {
    "INT32": np.int32, "UINT32": np.uint32, "UINT64": np.uint64, "FP32": np.float32,
    "BOOL": np.bool_, "BYTES": np.object_,
}  # fmt: skip
USUAL = {
    "text_input": "BYTES", "QUERY": "BYTES", "bad_words": "BYTES", "stop_words": "BYTES",
    "BAD_WORDS_DICT": "BYTES", "STOP_WORDS_DICT": "BYTES", "temperature": "FP32",
    "stream": "BOOL",
    "streaming": "BOOL", "stop": "BOOL", "return_log_probs": "BOOL",
    "return_context_logits": "BOOL", "return_generation_logits": "BOOL",
    "return_kv_cache_reuse_stats": "BOOL", "random_seed": "UINT64",
}  # fmt: skip


@dataclass
class Versioned(Served):
    """A server with the repository of a version."""

    version: str = ""
    is_decoupled: bool = False

    def tensors(self, module: Any, inputs: dict[str, Any]) -> list[Any]:
        """Inputs in the types of the version, a row for each sample."""
        made = []
        for name, value in inputs.items():
            datatype = datatype_of(self.version, name, USUAL.get(name, "INT32"))
            rows = value if isinstance(value, np.ndarray) else np.array([_row(value)], object)
            array = rows.astype(NUMPY[datatype])
            made.append(module.InferInput(name, array.shape, datatype))
            made[-1].set_data_from_numpy(array)
        return made

    def infer(self, model: str, **inputs: Any) -> Any:
        """The answer to a unary gRPC call."""
        with grpc.InferenceServerClient(f"localhost:{self.grpc_port}") as client:
            return client.infer(model, self.tensors(grpc, inputs))

    def infer_http(self, model: str, **inputs: Any) -> Any:
        """The answer to an HTTP call with binary tensors."""
        with http_client.InferenceServerClient(f"localhost:{self.http_port}") as client:
            return client.infer(model, self.tensors(http_client, inputs))

    def stream(self, model: str, request_id: str = "", **inputs: Any) -> list[Any]:
        """The answers of a gRPC stream up to the last."""
        came: queue.Queue[Any] = queue.Queue()
        with grpc.InferenceServerClient(f"localhost:{self.grpc_port}") as client:
            client.start_stream(lambda result, error: came.put(error or result))
            client.async_stream_infer(
                model, self.tensors(grpc, inputs), request_id=request_id,
                enable_empty_final_response=True,
            )  # fmt: skip
            answers = []
            while True:
                answer = came.get(timeout=100)
                if isinstance(answer, Exception):
                    raise answer
                if answer.get_response().outputs:
                    answers.append(answer)
                if answer.get_response().parameters["triton_final_response"].bool_param:
                    return answers

    def status(self, method: str, path: str, body: Any = None) -> int:
        """The status of a route."""
        connection = http.client.HTTPConnection("localhost", self.http_port, timeout=100)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            return connection.getresponse().status
        finally:
            connection.close()

    def ids(self, **besides: Any) -> dict[str, Any]:
        """The inputs of a token-level request."""
        return {"input_ids": IDS, "input_lengths": 3, "request_output_len": 6, **besides}

    def text(self, **besides: Any) -> dict[str, Any]:
        """The inputs of a text-level request; version 0.5 requires lists of words."""
        words = {"bad_words": "", "stop_words": ""} if self.version == "0.5" else {}
        return {"text_input": TEXT, "max_tokens": 6, **words, **besides}


def _row(value: Any) -> list[Any]:
    row = value if isinstance(value, list) else [value]
    return [item.encode() if isinstance(item, str) else item for item in row]


Check = Callable[[Versioned], Any]


@dataclass(frozen=True)
class Row:
    """One row of the page: its check, and the versions and the kind of server it is for."""

    table: str
    name: str
    check: Check
    since: int = 5
    is_decoupled: bool = False
    until: int = 99

    def is_for(self, version: str) -> bool:
        """Whether the version has what the row checks."""
        return self.since <= minor_of(version) <= self.until


def _get(path: str, status: int = 200) -> Check:
    def check(server: Versioned) -> None:
        assert server.status("GET", path) == status

    return check


def _post(path: str, body: Any, status: int = 200) -> Check:
    def check(server: Versioned) -> None:
        assert server.status("POST", path, body) == status

    return check


def _call(method: str, **options: Any) -> Check:
    def check(server: Versioned) -> None:
        with grpc.InferenceServerClient(f"localhost:{server.grpc_port}") as client:
            request = getattr(pb, f"{method}Request")(**options)
            getattr(client._client_stub, method)(request)

    return check


def _generate(server: Versioned) -> None:
    for model in _text_models(server):
        status, answer = server.post(f"/v2/models/{model}/generate", server.text())
        assert status == 200 and answer["text_output"].startswith(TEXT)


def _generate_stream(server: Versioned) -> None:
    for model in _text_models(server):
        path, body = f"/v2/models/{model}/generate_stream", server.text(stream=True)
        texts = [event["text_output"] for event in server.events(path, body)]
        # A reader that is slower than the engine has fewer and longer events.
        assert texts and "".join(texts)


def _text_models(server: Versioned) -> list[str]:
    return ["ensemble", *(["tensorrt_llm_bls"] if minor_of(server.version) >= 7 else [])]


def _refused_unary(server: Versioned) -> None:
    with pytest.raises(http_client.InferenceServerException) as refused:
        server.infer_http("ensemble", **server.text())
    assert refused.value.status() == "501"


def _first_error(server: Versioned) -> None:
    path = "/v2/models/tensorrt_llm/generate_stream"
    body = {"input_ids": [1 << 20], "input_lengths": 1, "request_output_len": 2}
    connection = http.client.HTTPConnection("localhost", server.http_port, timeout=100)
    connection.request("POST", path, json.dumps(body))
    answer = connection.getresponse()
    assert (answer.status, answer.headers.get_content_type()) == (400, "text/event-stream")
    assert answer.read().startswith(b'data: {"error":')
    connection.close()


def _infer(server: Versioned) -> None:
    for ask in (server.infer, server.infer_http):
        text = ask("ensemble", **server.text()).as_numpy("text_output").reshape(-1)[0]
        assert text.decode().startswith(TEXT)


def _engine_samples(server: Versioned) -> None:
    """As many samples of ``nv_trt_llm_*`` as the version's own test of its metrics expects."""
    counts = {
        6: 16,
        7: 16,
        8: 17,
        9: 17,
        10: 17,
        11: 17,
        12: 17,
        13: 18,
        14: 18,
        15: 20,
        16: 20,
    }
    url = f"http://{server.address}:{server.metrics_port}/metrics"
    with urllib.request.urlopen(url) as response:
        lines = response.read().decode().splitlines()
    count = sum(line.startswith("nv_trt_llm_") for line in lines)
    assert count == counts.get(minor_of(server.version), 22)


ROUTES = (
    Row("HTTP", "`GET /v2/health/live`", _get("/v2/health/live")),
    Row("HTTP", "`GET /v2/health/ready`", _get("/v2/health/ready")),
    Row("HTTP", "`GET /v2`", _get("/v2")),
    Row("HTTP", "`GET /v2/models/M`", _get("/v2/models/ensemble")),
    Row("HTTP", "`GET /v2/models/M/versions/1/ready`",
        _get("/v2/models/tensorrt_llm/versions/1/ready")),
    Row("HTTP", "`GET /v2/models/M/config`", _get("/v2/models/tensorrt_llm/config")),
    Row("HTTP", "`GET /v2/models/M/stats`", _get("/v2/models/preprocessing/stats")),
    Row("HTTP", "`GET /v2/models/stats`", _get("/v2/models/stats")),
    Row("HTTP", "`POST /v2/models/M/infer`", _infer),
    Row("HTTP", "`POST /v2/models/M/infer`, decoupled: 501", _refused_unary,
        is_decoupled=True),
    Row("HTTP", "`POST /v2/models/M/generate`", _generate),
    Row("HTTP", "`POST /v2/models/M/generate`, decoupled", _generate, is_decoupled=True),
    Row("HTTP", "`POST /v2/models/M/generate_stream`", _generate_stream, is_decoupled=True),
    Row("HTTP", "`POST /v2/models/M/generate_stream`, an error first", _first_error,
        is_decoupled=True),
    Row("HTTP", "`POST /v2/repository/index`", _post("/v2/repository/index", {})),
    Row("HTTP", "`POST /v2/repository/models/M/load`, mode none: 503",
        _post("/v2/repository/models/ensemble/load", {}, 503)),
    Row("HTTP", "`GET /v2/logging`", _get("/v2/logging")),
    Row("HTTP", "`POST /v2/logging`", _post("/v2/logging", {"log_verbose_level": 0})),
    Row("HTTP", "`GET /v2/trace/setting`", _get("/v2/trace/setting")),
    Row("HTTP", "`GET /v2/systemsharedmemory/status`", _get("/v2/systemsharedmemory/status")),
    Row("HTTP", "`GET /v2/cudasharedmemory/status`", _get("/v2/cudasharedmemory/status")),
    Row("HTTP", "`GET /metrics`: the version's samples of `nv_trt_llm_*`", _engine_samples),
    Row("gRPC", "`ServerLive`", _call("ServerLive")),
    Row("gRPC", "`ServerReady`", _call("ServerReady")),
    Row("gRPC", "`ModelReady`", _call("ModelReady", name="ensemble")),
    Row("gRPC", "`ServerMetadata`", _call("ServerMetadata")),
    Row("gRPC", "`ModelMetadata`", _call("ModelMetadata", name="ensemble")),
    Row("gRPC", "`ModelConfig`", _call("ModelConfig", name="tensorrt_llm")),
    Row("gRPC", "`ModelStatistics`", _call("ModelStatistics", name="tensorrt_llm")),
    Row("gRPC", "`RepositoryIndex`", _call("RepositoryIndex")),
    Row("gRPC", "`LogSettings`", _call("LogSettings")),
    Row("gRPC", "`TraceSetting`", _call("TraceSetting")),
    Row("gRPC", "`SystemSharedMemoryStatus`", _call("SystemSharedMemoryStatus")),
    Row("gRPC", "`CudaSharedMemoryStatus`", _call("CudaSharedMemoryStatus")),
    Row("gRPC", "`ModelInfer`",
        lambda server: server.infer("tensorrt_llm", **server.ids())),
    Row("gRPC", "`ModelStreamInfer`",
        lambda server: server.stream("tensorrt_llm", **server.ids(streaming=True)),
        is_decoupled=True),
)  # fmt: skip


def _token_client(server: Versioned) -> None:
    answer = server.infer("tensorrt_llm", **server.ids(end_id=1, pad_id=1, beam_width=1))
    ids = answer.as_numpy("output_ids")
    assert ids.dtype == np.int32 and ids[0, 0, :3].tolist() == IDS
    if minor_of(server.version) >= 6:
        assert answer.as_numpy("sequence_length")[0, 0] == ids.shape[2]


def _token_stream(server: Versioned) -> None:
    answers = server.stream("tensorrt_llm", **server.ids(streaming=True))
    sizes = [answer.as_numpy("output_ids").size for answer in answers]
    if minor_of(server.version) <= 13:
        # Clients of these versions read one id a response.
        assert set(sizes) == {1}
    assert sum(sizes) == 6


def _token_stop(server: Versioned) -> None:
    came: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(f"localhost:{server.grpc_port}") as client:
        client.start_stream(lambda result, error: came.put(error or result))
        asked = server.ids(request_output_len=900, streaming=True)
        client.async_stream_infer("tensorrt_llm", server.tensors(grpc, asked), request_id="7",
                                  enable_empty_final_response=True)  # fmt: skip
        came.get(timeout=100)
        stop = server.tensors(grpc, server.ids(stop=True))
        client.async_stream_infer("tensorrt_llm", stop, request_id="7")
        num_ids, num_finals = 1, 0
        # One is the answer to the stop request, which has no outputs.
        while num_finals < 2:
            answer = came.get(timeout=100)
            response = answer.get_response()
            num_ids += sum(output.name == "output_ids" for output in response.outputs)
            num_finals += response.parameters["triton_final_response"].bool_param
    assert num_ids < 900


def _text_client(server: Versioned) -> None:
    for model in _text_models(server):
        (answer,) = server.stream(model, **server.text())
        text = answer.as_numpy("text_output")
        # Clients decode the first element.
        assert text.ndim == 1 and text[0].decode().startswith(TEXT)
        _look_at_unasked(server, answer)


def _look_at_unasked(server: Versioned, answer: Any) -> None:
    """Clients of versions up to 0.13 read outputs that they have not asked for."""
    for name, since in (
        ("cum_log_probs", 6), ("output_log_probs", 6), ("context_logits", 8),
        ("generation_logits", 8), ("batch_index", 12),
    ):  # fmt: skip
        value = answer.as_numpy(name)
        if since <= minor_of(server.version) <= 13:
            assert value is not None and not value.any()
        else:
            assert value is None


def _text_stream(server: Versioned) -> None:
    for model in _text_models(server):
        answers = server.stream(model, **server.text(stream=True))
        assert "".join(a.as_numpy("text_output")[0].decode() for a in answers)


def _batch(server: Versioned) -> None:
    prompts = np.array([["It was"], ["The sea"]], object)
    rows = np.full((2, 1), 5)
    answers = server.stream(
        "ensemble", **{k: np.full((2, 1), v, object) for k, v in server.text().items()}
        | {"text_input": prompts, "max_tokens": rows}
    )  # fmt: skip
    texts = {answer.as_numpy("text_output")[0].decode()[:6] for answer in answers}
    assert texts == {"It was", "The se"}
    if minor_of(server.version) >= 12:
        assert sorted(a.as_numpy("batch_index").item() for a in answers) == [0, 1]


def _steps(server: Versioned) -> None:
    """As `end_to_end_test.py`: the three steps, and the ensemble."""
    asked = {"QUERY": TEXT, "REQUEST_OUTPUT_LEN": 6}
    if server.version == "0.5":
        asked |= {"BAD_WORDS_DICT": "", "STOP_WORDS_DICT": ""}
    before = server.infer_http("preprocessing", **asked)
    ids = before.as_numpy("INPUT_ID")
    token = server.infer_http(
        "tensorrt_llm", input_ids=ids, input_lengths=before.as_numpy("REQUEST_INPUT_LEN"),
        request_output_len=before.as_numpy("REQUEST_OUTPUT_LEN"),
    )  # fmt: skip
    after = {"TOKENS_BATCH": token.as_numpy("output_ids")}
    if minor_of(server.version) >= 6:
        after["SEQUENCE_LENGTH"] = token.as_numpy("sequence_length")
    text = server.infer_http("postprocessing", **after).as_numpy("OUTPUT").reshape(-1)[0]
    whole = server.infer_http("ensemble", **server.text()).as_numpy("text_output").reshape(-1)
    assert text == whole[0]


def _log_probs(server: Versioned) -> None:
    answer = server.infer("tensorrt_llm", **server.ids(return_log_probs=True))
    each = answer.as_numpy("output_log_probs")
    assert each.shape == (1, 1, 6) and (each < 0).all()
    np.testing.assert_allclose(answer.as_numpy("cum_log_probs"), each.sum(-1), rtol=1e-5)


def _drafts(server: Versioned) -> None:
    """The answer has the accepted drafts and one further id."""
    plain = server.infer("tensorrt_llm", **server.ids()).as_numpy("output_ids").reshape(-1)
    drafts = plain[len(IDS) :][:3].tolist()
    answer = server.infer("tensorrt_llm", **server.ids(draft_input_ids=drafts))
    assert answer.as_numpy("output_ids").reshape(-1).tolist() == plain[: len(IDS) + 4].tolist()


def _logits(server: Versioned) -> None:
    asked = server.ids(return_context_logits=True, return_generation_logits=True)
    answer = server.infer("tensorrt_llm", **asked)
    assert answer.as_numpy("context_logits").shape == (1, 3, 4096)
    assert answer.as_numpy("generation_logits").shape == (1, 1, 6, 4096)


def _beams(server: Versioned) -> None:
    answer = server.infer("tensorrt_llm", **server.ids(beam_width=2))
    assert answer.as_numpy("output_ids").shape[1] == 2
    texts = server.infer("ensemble", **server.text(beam_width=2)).as_numpy("text_output")
    assert texts.shape == (2,)


def _sequences(server: Versioned) -> None:
    asked = server.ids(streaming=True, num_return_sequences=2, runtime_top_k=20)
    answers = server.stream("tensorrt_llm", **asked)
    assert {a.as_numpy("sequence_index").item() for a in answers} == {0, 1}


def _reuse(server: Versioned) -> None:
    answer = server.infer("tensorrt_llm", **server.ids(return_kv_cache_reuse_stats=True))
    assert answer.as_numpy("kv_cache_alloc_total_blocks").item() > 0


def _any_ids(server: Versioned) -> None:
    drawn = np.random.default_rng(3).integers(0, 2**31 - 1, (1, 32))
    asked = server.ids(input_ids=drawn, input_lengths=32)
    assert server.infer("tensorrt_llm", **asked).as_numpy("output_ids").shape[2] == 38


def _foreign_lengths(server: Versioned) -> None:
    """The warm-up of `identity_test.py` sends the first prompt with each prompt's length."""
    for length in (3, 4, 40):
        asked = server.ids(input_ids=np.array([[5, 6, 7, 8]]), input_lengths=length)
        used = min(length, 4)
        assert server.infer("tensorrt_llm", **asked).as_numpy("output_ids").shape[2] == used + 6


CLIENTS = (
    Row("Clients", "`inflight_batcher_llm_client.py`", _token_client),
    Row("Clients", "... `--streaming`", _token_stream, is_decoupled=True),
    Row("Clients", "... `--stop-after-ms`", _token_stop, is_decoupled=True),
    Row("Clients", "... `--beam-width 2`", _beams),
    Row("Clients", "... `--return-log-probs`", _log_probs, since=6),
    Row("Clients", "... `--return-context-logits --return-generation-logits`", _logits, 8),
    Row("Clients", "... `--num-return-sequences 2`", _sequences, 14, is_decoupled=True),
    Row("Clients", "... `--return-kv-cache-reuse-stats`", _reuse, 16),
    Row("Clients", "... `--draft-tokens-csv`", _drafts, 7),
    Row("Clients", "`end_to_end_grpc_client.py`", _text_client, 6, is_decoupled=True),
    Row("Clients", "... `--streaming`", _text_stream, 6, is_decoupled=True),
    Row("Clients", "... `--batch-inputs`", _batch, 6, is_decoupled=True),
    Row("Clients", "`end_to_end_test.py`", _steps),
    Row("Clients", "`identity_test.py`", _foreign_lengths, until=6),
    Row("Clients", "`benchmark_core_model.py token-norm-dist`", _any_ids),
)
ROWS = (*ROUTES, *CLIENTS)
SERVERS = [(version, is_decoupled) for version in VERSIONS for is_decoupled in (False, True)]
CASES = [
    pytest.param(
        server, row, id=f"{server[0]}-{'decoupled' if server[1] else 'plain'}-{number}",
        marks=pytest.mark.compatibility(server[0], row.table, number),
    )
    for server in SERVERS
    for number, row in enumerate(ROWS)
    if row.is_decoupled is server[1] and row.is_for(server[0])
]  # fmt: skip


@pytest.fixture(scope="module")
def engine(bench: Bench) -> Path:
    """An engine of one rank."""
    bench.succeed(
        "trimaran build --checkpoint model --output one --max-batch-size 64 "
        "--max-input-len 896 --max-num-tokens 1024 --max-beam-width 4 --max-draft-len 5"
    )
    return bench.folder / "one"


class Servers:
    """One server at a time: the cases of a server follow each other."""

    def __init__(self, engine: Path, folders: pytest.TempPathFactory) -> None:
        self._engine = engine
        self._folders = folders
        self._running: Versioned | None = None

    def get(self, version: str, is_decoupled: bool) -> Versioned:
        """The server with the repository of a version, decoupled or not."""
        running = self._running
        if running and (running.version, running.is_decoupled) == (version, is_decoupled):
            return running
        self.stop()
        root = self._folders.mktemp("version")
        write_repository(
            root / "models", version, tokenizer=DEMO_MODEL, engine=self._engine,
            is_decoupled=is_decoupled,
        )  # fmt: skip
        self._running = Versioned(
            root / "models",
            flags=() if is_decoupled else ("--out-of-vocabulary", "clamp"),
            log_path=root / "serve.log",
            version=version,
            is_decoupled=is_decoupled,
        )
        self._running.__enter__()
        return self._running

    def stop(self) -> None:
        """End the server."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()


@pytest.fixture(scope="module")
def servers(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Starts servers; the last one ends with the tests."""
    held = Servers(engine, tmp_path_factory)
    yield held
    held.stop()


@pytest.mark.parametrize(("server", "row"), CASES)
def test_a_route_or_client_works_with_the_repository_of_a_version(servers, server, row):
    row.check(servers.get(*server))

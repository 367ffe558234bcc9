"""Every input of every model with the most values that a message holds, over gRPC and HTTP:
other clients are not disturbed.

The inputs are those of the templates, so that a new input is tested too.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from bystanders import Watched
from served import DEMO_MODEL, Served, init_repo, run_trimaran
from tritonclient.grpc import service_pb2 as pb

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))

from model_fields import INPUTS, MODELS, Input

from trimaran.server.inference.tensor_bytes import NUMPY_TYPES

pytestmark = pytest.mark.timeout(500)

MAX_GAP_S = 1.0
MAX_GROWTH_MB = 200.0
GUIDE_PROCESSES_MB = 4096.0
"""Processes that compile guides have a limit of their own (docs/guided-decoding.md)."""

NUM_BYTES = 44 << 20
"""A long tensor has contents of so many bytes. The longest message has 48 MiB."""
SERVICE = "/inference.GRPCInferenceService/"
GENERATE = "/v2/models/ensemble/generate"
GUIDE, GUIDE_TYPE = "guided_decoding_guide", "guided_decoding_guide_type"

TOGETHER = 12
"""Inputs that are sent one after the other beside one stream."""

BATCHES = [(m, n) for m in MODELS for n in range(0, len(INPUTS[m]), TOGETHER)]
HONEST: dict[str, dict[str, Any]] = {
    "ensemble": {"text_input": "a", "max_tokens": 2},
    "tensorrt_llm_bls": {"text_input": "a", "max_tokens": 2},
    "tensorrt_llm": {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 2},
    "preprocessing": {"QUERY": "a", "REQUEST_OUTPUT_LEN": 2},
    "postprocessing": {"TOKENS_BATCH": [[5, 6]], "SEQUENCE_LENGTH": [2]},
}
"""The inputs of a short request, without the batch dimension."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo model with guided decoding and drafts."""
    folder = tmp_path_factory.mktemp("inputs")
    engine = folder / "engine"
    done = run_trimaran(
        "build", "--checkpoint", str(DEMO_MODEL), "--output", str(engine), "--max-input-len",
        "896", "--max-batch-size", "64",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    fill = f"tokenizer_dir:{DEMO_MODEL},engine_dir:{engine},decoupled_mode:True"
    fill += ",guided_decoding_backend:xgrammar,tensorrt_llm_draft_model_name:tensorrt_llm"
    init_repo(str(folder / "models"), "--defaults", "--fill", fill)
    flags = ("--speculative-decoding", "lookahead", "--max-draft-tokens", "6")
    with Served(folder / "models", 1, flags, folder / "serve.log") as served:
        # Helper processes of the first long body, text and guide are there before memory is
        # looked at.
        guided = {GUIDE_TYPE: "regex", GUIDE: "[0-9]"}
        with ThreadPoolExecutor(4) as clients:
            bodies = [{"text_input": "a " * 200_000}, guided] * 4
            posted = [{"text_input": "a", "max_tokens": 2, **body} for body in bodies]
            list(clients.map(lambda body: _post(served, GENERATE, body), posted))
        _stream(served, _message("tensorrt_llm", _long(INPUTS["tensorrt_llm"]["input_ids"])))
        yield served


def _post(server: Served, path: str, body: Any) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=200)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body))
        reply = connection.getresponse()
        text = reply.read(4000).decode(errors="replace")
        while reply.read(1 << 20):
            continue
        return reply.status, text


def _stream(server: Served, raw: bytes) -> str:
    """What a stream answers to one message: its first error, or nothing."""
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options) as channel:
        call = channel.stream_stream(SERVICE + "ModelStreamInfer")
        try:
            answers = list(call(iter([raw]), timeout=200))
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "".join(pb.ModelStreamInferResponse.FromString(a).error_message for a in answers)


def _tensor(one: Input, value: Any) -> tuple[list[int], bytes]:
    """Shape and bytes of a short value."""
    array = np.array(value, object if one.datatype == "BYTES" else NUMPY_TYPES[one.datatype])
    array = array.reshape(1, *(array.shape or (1,)))
    if one.datatype != "BYTES":
        return list(array.shape), array.tobytes()
    return list(array.shape), b"".join(map(_string, array.flat))


def _string(text: str) -> bytes:
    return len(text).to_bytes(4, "little") + text.encode()


def _long(one: Input) -> tuple[list[int], bytes]:
    """Shape and bytes of a tensor with the most values; all of them in the first dimension
    of an input without free dimensions."""
    item = b"\1\0\0\0a" if one.datatype == "BYTES" else bytes(
        np.ones(1, NUMPY_TYPES[one.datatype]).tobytes()
    )  # fmt: skip
    count = NUM_BYTES // len(item)
    shape, fixed = [1, *one.dims], 1
    for size in one.dims:
        fixed *= max(size, 1)
    free = [place for place, size in enumerate(shape) if size == -1]
    for place in free[:-1]:
        shape[place] = 1
    shape[free[-1] if free else 0] = count // fixed
    return shape, item * (count // fixed * fixed)


def _message(model: str, *others: tuple[list[int], bytes], name: str = "") -> bytes:
    """A request with a tensor in place of, or beside, the inputs of a short request."""
    known = INPUTS[model]
    tensors = {each: _tensor(known[each], value) for each, value in HONEST[model].items()}
    if others:
        tensors[name or "input_ids"] = others[0]
    message = pb.ModelInferRequest(model_name=model, id="x")
    for each, (shape, raw) in tensors.items():
        message.inputs.add(name=each, datatype=known[each].datatype, shape=shape)
        message.raw_input_contents.append(raw)
    return bytes(message.SerializeToString())


def _check(
    watched: Watched,
    what: str,
    capsys: pytest.CaptureFixture[str],
    max_growth_mb: float = MAX_GROWTH_MB,
) -> None:
    seen = watched.seen
    with capsys.disabled():
        print(f"\n  {what}\n    {seen}")
    assert seen.failure == ""
    assert seen.num_events > 5
    assert seen.stream_gap_s < MAX_GAP_S, what
    assert seen.health_s < MAX_GAP_S, what
    assert seen.grown_mb < max_growth_mb, what


@pytest.mark.parametrize(("model", "number"), BATCHES)
def test_no_long_tensor_disturbs_other_clients(server, model, number, capsys):
    names = list(INPUTS[model])[number : number + TOGETHER]
    answers = []
    with Watched(server.http_port, server.process.pid) as watched:
        for name in names:
            begun = time.monotonic()
            raw = _message(model, _long(INPUTS[model][name]), name=name)
            answer = _stream(server, raw)[:100]
            answers.append(f"{name}, {time.monotonic() - begun:.1f} s: {answer}")
    _check(watched, f"{model}: " + "\n    ".join(answers), capsys)


def _choices(count: int) -> str:
    return json.dumps([f"word {number}" for number in range(count)])


def _tags(count: int) -> str:
    tag = {"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}
    return json.dumps(
        {"type": "structural_tag", "structures": [tag] * count, "triggers": ["<a"]}
    )


ITSELF = {"$ref": "#/$defs/d"}
GUIDES: dict[str, Callable[[], tuple[str, str]]] = {
    "a grammar of 20 MB": lambda: ("ebnf_grammar", 'root ::= "a" | "b" ' * (1 << 20)),
    "a grammar of 200,000 rules": lambda: (
        "ebnf_grammar",
        "root ::= r0\n" + "".join(f'r{n} ::= "a" r{n + 1}\n' for n in range(200_000)),
    ),
    "a choice of a million texts": lambda: ("choice", _choices(1_000_000)),
    "100,000 structural tags": lambda: ("structural_tag", _tags(100_000)),
    "a regular expression of a megabyte": lambda: ("regex", "(a|b)" * 200_000),
    "a regular expression of nested groups": lambda: ("regex", "(" * 100_000 + ")" * 100_000),
    "a schema of 20 MB": lambda: (
        "json_schema", json.dumps({"type": "string", "description": "x" * (20 << 20)}),
    ),
    "a schema that is deep": lambda: ("json_schema", '{"items":' * 50_000 + "1" + "}" * 50_000),
    "a schema of an endless type": lambda: (
        "json_schema",
        json.dumps({**ITSELF, "$defs": {"d": {"anyOf": [ITSELF] * 99}}}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GUIDES)
def test_no_long_guide_disturbs_other_clients(server, name, capsys):
    kind, guide = GUIDES[name]()
    body = {"text_input": "a", "max_tokens": 8, GUIDE_TYPE: kind, GUIDE: guide}
    with (
        Watched(server.http_port, server.process.pid) as watched,
        ThreadPoolExecutor(2) as clients,
    ):
        answers = list(clients.map(lambda _: _post(server, GENERATE, body), range(2)))
    what = f"{name}: {[status for status, _ in answers]} {answers[0][1][:200]}"
    assert all(status < 500 or status == 503 for status, _ in answers), what
    _check(watched, what, capsys, MAX_GROWTH_MB + GUIDE_PROCESSES_MB)

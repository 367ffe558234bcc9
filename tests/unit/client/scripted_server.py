"""Small servers that speak the real gRPC and HTTP protocols and answer from a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

DTYPES = {
    "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_,
    "INT64": np.int64, "FP16": np.float16, "BF16": np.uint16,
}  # fmt: skip


@dataclass
class Reply:
    """One scripted response: outputs as (datatype, array), or an error."""

    outputs: dict[str, tuple[str, Any]] = field(default_factory=dict)
    is_final: bool = False
    error: str = ""


@dataclass
class Received:
    """One request as received over the wire."""

    model: str
    id: str
    inputs: dict[str, np.ndarray]
    outputs: list[str]


def ids_reply(ids: list[int], *, is_final: bool = False, **more: tuple[str, Any]) -> Reply:
    """A token-level response of one beam."""
    outputs = {"output_ids": ("INT32", [[ids]]), "sequence_length": ("INT32", [[len(ids)]])}
    return Reply({**outputs, **more}, is_final)


def text_reply(*texts: str, is_final: bool = False, **more: tuple[str, Any]) -> Reply:
    """A text-level response, one text a beam."""
    return Reply({"text_output": ("BYTES", list(texts)), **more}, is_final)


Script = Callable[[Received], list[Reply]]


class ScriptedServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers each request with the result of ``script``. Keeps all received requests."""

    def __init__(self) -> None:
        self.script: Script = lambda request: [Reply(is_final=True)]
        self.received: list[Received] = []
        self.is_decoupled = True
        self.parameters: dict[str, str] = {}
        self.input_names = ("seed", "random_seed")
        self.output_names = ("text_output", "batch_index", "sequence_index")
        self.stays_open = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(8))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.stays_open.set()
        self._server.stop(0).wait()

    def ModelStreamInfer(self, request_iterator, context):
        for request in request_iterator:
            received = self._receive(request)
            for reply in self.script(received):
                if reply.error:
                    yield service_pb2.ModelStreamInferResponse(error_message=reply.error)
                else:
                    response = self._response(received, reply)
                    yield service_pb2.ModelStreamInferResponse(infer_response=response)

    def ModelInfer(self, request, context):
        received = self._receive(request)
        (reply,) = self.script(received)
        if reply.error:
            context.abort(grpc.StatusCode.INTERNAL, reply.error)
        return self._response(received, reply)

    def ModelMetadata(self, request, context):
        metadata = service_pb2.ModelMetadataResponse(name=request.name)
        for name in self.input_names:
            metadata.inputs.add(name=name, datatype="UINT64", shape=[-1, 1])
        for name in self.output_names:
            metadata.outputs.add(name=name, datatype="INT32", shape=[-1, 1])
        return metadata

    def ModelConfig(self, request, context):
        reply = service_pb2.ModelConfigResponse()
        reply.config.model_transaction_policy.decoupled = self.is_decoupled
        for name, value in self.parameters.items():
            reply.config.parameters[name].string_value = value
        return reply

    def _receive(self, request) -> Received:
        inputs = {}
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
            if tensor.datatype == "BYTES":
                array = deserialize_bytes_tensor(raw)
            else:
                array = np.frombuffer(raw, DTYPES[tensor.datatype])
            inputs[tensor.name] = array.reshape(tuple(tensor.shape))
        wanted = [output.name for output in request.outputs]
        self.received.append(Received(request.model_name, request.id, inputs, wanted))
        return self.received[-1]

    def _response(self, request: Received, reply: Reply):
        response = service_pb2.ModelInferResponse(
            model_name=request.model, model_version="1", id=request.id
        )
        for name, (datatype, values) in reply.outputs.items():
            if datatype == "BYTES":
                array = np.array([str(v).encode() for v in values], dtype=object)
                raw = serialize_byte_tensor(array).item()
            else:
                array = np.array(values, dtype=DTYPES[datatype])
                raw = array.tobytes()
            response.outputs.add(name=name, datatype=datatype, shape=list(array.shape))
            response.raw_output_contents.append(raw)
        response.parameters["triton_final_response"].bool_param = reply.is_final
        return response


class ScriptedHttpServer:
    """JSON bodies in; events of a stream, or one object, out."""

    def __init__(self) -> None:
        self.is_decoupled = True
        self.parameters: dict[str, str] = {}
        self.config: Any = None
        """What to say of a model in place of its configuration."""
        self.events: Callable[[dict[str, Any]], list[dict[str, Any]]] = lambda body: []
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.seen: list[tuple[str, int]] = []
        """Verb and the client's port of each request."""
        self._httpd = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"127.0.0.1:{self._httpd.server_address[1]}"
        self._thread = threading.Thread(target=self._httpd.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                scripted.seen.append(("GET", self.client_address[1]))
                each = scripted.parameters.items()
                described = {
                    "model_transaction_policy": {"decoupled": scripted.is_decoupled},
                    "parameters": {name: {"string_value": value} for name, value in each},
                }
                self._send(200, scripted.config or described)

            def do_POST(self) -> None:
                scripted.seen.append(("POST", self.client_address[1]))
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                scripted.bodies.append((self.path, body))
                events = scripted.events(body)
                if self.path.endswith("generate_stream"):
                    self._send(200, "".join(f"data: {json.dumps(e)}\n\n" for e in events))
                else:
                    self._send(500 if "error" in events[0] else 200, events[0])

            def _send(self, status: int, body: Any) -> None:
                data = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

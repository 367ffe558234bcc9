"""The front end as a process: its peers here speak the real messages over real sockets."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from trimaran.comm.address import Address
from trimaran.comm.env import ChildEnv
from trimaran.comm.messages import (
    ChildConfig,
    ChildHello,
    ChildState,
    Command,
    EngineHello,
    FinishReason,
    FrameBuffer,
    FrontendHello,
    StepOutput,
    Submit,
    encode,
)
from trimaran.launcher.cli import main as trimaran
from trimaran.server.config import FrontendConfig

ROOT = Path(__file__).resolve().parents[3]
FILL = {
    "tokenizer_dir": ROOT / "examples" / "demo_models" / "base",
    "engine_dir": "/engine", "decoupled_mode": "True", "triton_max_batch_size": "8",
    "triton_backend": "tensorrtllm", "batching_strategy": "inflight_fused_batching",
    "logits_datatype": "TYPE_FP32", "encoder_input_features_data_type": "TYPE_FP16",
    "preprocessing_instance_count": "1", "postprocessing_instance_count": "1",
    "bls_instance_count": "1", "max_queue_delay_microseconds": "0", "max_queue_size": "0",
}  # fmt: skip
FACTS = {
    "max_batch_size": 8, "max_num_tokens": 1024, "max_seq_len": 1024, "max_input_len": 896,
    "vocab_size": 4096, "vocab_size_padded": 4096, "logits_dtype": "float32", "world_size": 1,
    "tp_size": 1, "pp_size": 1, "tokens_per_block": 32, "max_blocks": 64, "device": "cpu",
    "backends": {"attention": "torch"}, "transports": {"all_reduce": "none"},
    "start_method": "mpirun", "mpi": "Open MPI", "dtype": "float32",
}  # fmt: skip


class Peer:
    """One connection on which messages go both ways."""

    def __init__(self, sock):
        self.sock = sock
        self.sock.settimeout(60)
        self._frames = FrameBuffer()
        self._messages = []

    def send(self, message):
        self.sock.sendall(encode(message))

    def receive(self, *kinds):
        """The next message; the end of the connection is None."""
        while not self._messages:
            data = self.sock.recv(1 << 16)
            if not data:
                return None
            self._messages += self._frames.feed(data)
        message = self._messages.pop(0)
        assert isinstance(message, kinds), message
        return message

    def wait_for_state(self, state):
        while (message := self.receive(ChildState)).state != state:
            assert message.state == "loading", message
        return message


class StartedFrontend:
    """A front-end process and the supervisor's end of its connection."""

    def __init__(self, stack, tmp_path, **config):
        self.is_listening = False
        self.engine_address = Address.parse(f"unix:{tmp_path}/engine.sock")
        address = Address.parse(f"unix:{tmp_path}/supervisor.sock")
        listener = stack.enter_context(address.listen())
        listener.settimeout(60)
        env = ChildEnv(supervisor=str(address), token="secret").to_environ()
        self.log = stack.enter_context((tmp_path / "log").open("w+"))
        self.process = stack.enter_context(
            subprocess.Popen(
                [Path(sys.executable).with_name("trimaran-frontend")],
                env={**os.environ, **env, "PYTHONSAFEPATH": "1"},
                stderr=self.log,
            )
        )
        stack.callback(self.process.kill)
        self.supervisor = Peer(stack.enter_context(listener.accept()[0]))
        hello = self.supervisor.receive(ChildHello)
        assert (hello.role, hello.token, hello.pid) == ("frontend", "secret", self.process.pid)
        ports = dict.fromkeys(("http_port", "grpc_port", "metrics_port"), 0)
        defaults = {
            "model_repository": str(tmp_path / "repository"),
            "engine_listen": (str(self.engine_address),),
            "token": "secret",
            "groups": {"tensorrt_llm": ("g0",)},
            "http_address": "127.0.0.1",
            **ports,
        }
        wire = FrontendConfig(**{**defaults, **config}).to_wire()
        self.supervisor.send(ChildConfig(config=wire))

    def wait_until_listening(self):
        """Return once engines may dial in."""
        while not self.is_listening:
            text = self.supervisor.receive(ChildState).text
            self.is_listening = text == "waiting for the engines"

    def dial_in(self, stack):
        """Be an engine: introduce it and wait to be accepted."""
        self.wait_until_listening()
        engine = Peer(stack.enter_context(self.engine_address.connect(60)))
        engine.send(EngineHello(token="secret", model="tensorrt_llm", group="g0", facts=FACTS))
        assert engine.receive(FrontendHello).accepted
        return engine

    def http_port(self):
        """The port that the log says."""
        lines = Path(self.log.name).read_text().splitlines()
        (line,) = [line for line in lines if "Started HTTPService at" in line]
        return int(line.rpartition(":")[2])


@pytest.fixture
def repository(tmp_path):
    values = ",".join(f"{key}:{value}" for key, value in FILL.items())
    assert trimaran(["init-repo", str(tmp_path / "repository"), "--fill", values]) == 0


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def post(port, path, **body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data=json.dumps(body).encode()
    )
    return urllib.request.urlopen(request, timeout=60)


def one_token(submit, token, reason):
    return StepOutput(
        step=1,
        request_ids=np.array([submit.request_id], "<u8").tobytes(),
        sequence_indices=np.array([0], "<u2").tobytes(),
        num_tokens=np.array([1], "<u2").tobytes(),
        finish_reasons=np.array([reason], "u1").tobytes(),
        token_ids=np.array([token], "<i4").tobytes(),
    )


def test_the_front_end_never_imports_torch():
    code = "import sys, trimaran.server.main; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_it_serves_from_the_first_engine_on_and_ends_when_told(repository, stack, tmp_path):
    frontend = StartedFrontend(stack, tmp_path)
    frontend.wait_until_listening()
    assert "Started" not in Path(frontend.log.name).read_text()
    engine = frontend.dial_in(stack)
    frontend.supervisor.wait_for_state("ready")
    port = frontend.http_port()

    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"text_input": "a", "max_tokens": 2, "stream": True})
    client.request("POST", "/v2/models/ensemble/generate_stream", body)
    submit = engine.receive(Submit)
    engine.send(one_token(submit, 300, FinishReason.NOT_FINISHED))
    answer = client.getresponse()
    assert answer.status == 200
    frontend.supervisor.send(Command(verb="drain", arguments={"timeout_s": 30}))
    engine.send(one_token(submit, 301, FinishReason.LENGTH))
    assert answer.read().count(b"data: ") == 2
    client.close()
    assert frontend.supervisor.wait_for_state("drained").facts == {"num_unfinished": 0}
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(port, "/v2/models/ensemble/generate", text_input="a", max_tokens=2)
    assert caught.value.code == 503
    caught.value.close()
    frontend.supervisor.send(Command(verb="shutdown"))
    assert frontend.process.wait(60) == 0


def test_a_drain_ends_in_time_and_counts_what_is_unfinished(repository, stack, tmp_path):
    frontend = StartedFrontend(stack, tmp_path)
    engine = frontend.dial_in(stack)
    frontend.supervisor.wait_for_state("ready")
    with socket.create_connection(("127.0.0.1", frontend.http_port())) as client:
        body = b'{"text_input": "a", "max_tokens": 2}'
        client.sendall(
            b"POST /v2/models/ensemble/generate HTTP/1.1\r\nHost: x\r\nContent-Length: "
            b"%d\r\n\r\n%b" % (len(body), body)
        )
        engine.receive(Submit)
        frontend.supervisor.send(Command(verb="drain", arguments={"timeout_s": 0.1}))
        assert frontend.supervisor.wait_for_state("drained").facts == {"num_unfinished": 1}
        frontend.supervisor.send(Command(verb="shutdown"))
        assert frontend.process.wait(60) == 0


def test_without_its_engine_it_stays_up_and_says_when_to_retry(repository, stack, tmp_path):
    frontend = StartedFrontend(stack, tmp_path)
    engine = frontend.dial_in(stack)
    frontend.supervisor.wait_for_state("ready")
    engine.sock.close()
    port = frontend.http_port()
    while "is gone" not in Path(frontend.log.name).read_text():
        time.sleep(0.01)
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(port, "/v2/models/ensemble/generate", text_input="a", max_tokens=2)
    assert caught.value.code == 503
    assert int(caught.value.headers["Retry-After"]) > 0
    caught.value.close()
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready")
    assert caught.value.code == 400
    caught.value.close()
    frontend.dial_in(stack)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready") as answer:
        assert answer.status == 200


def test_signals_do_not_end_it_but_the_supervisors_death_does(repository, stack, tmp_path):
    frontend = StartedFrontend(stack, tmp_path)
    frontend.supervisor.receive(ChildState)
    frontend.process.send_signal(signal.SIGTERM)
    frontend.process.send_signal(signal.SIGINT)
    frontend.dial_in(stack)
    frontend.supervisor.wait_for_state("ready")
    frontend.supervisor.sock.close()
    assert frontend.process.wait(60) == 1


def test_a_shutdown_before_it_is_ready_ends_it_in_order(repository, stack, tmp_path):
    frontend = StartedFrontend(stack, tmp_path)
    frontend.supervisor.receive(ChildState)
    frontend.supervisor.send(Command(verb="drain", arguments={"timeout_s": 30}))
    frontend.supervisor.wait_for_state("drained")
    frontend.supervisor.send(Command(verb="shutdown"))
    assert frontend.process.wait(60) == 0


def test_what_it_cannot_serve_is_a_configuration_error(stack, tmp_path):
    frontend = StartedFrontend(stack, tmp_path)
    failed = frontend.supervisor.wait_for_state("failed")
    assert failed.is_config_error
    assert str(tmp_path / "repository") in failed.text
    assert frontend.process.wait(60) == 2


def test_a_busy_port_is_a_configuration_error(repository, stack, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        frontend = StartedFrontend(stack, tmp_path, http_port=port)
        frontend.dial_in(stack)
        failed = frontend.supervisor.wait_for_state("failed")
    assert failed.is_config_error
    assert f"127.0.0.1:{port}" in failed.text
    assert "--http-port" in failed.text
    assert frontend.process.wait(60) == 2

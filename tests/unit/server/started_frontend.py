"""A front-end process whose supervisor and engines are played by the test."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
from forked_process import ForkedProcess

from trimaran.comm.env import ChildEnv
from trimaran.comm.messages.messages import (
    ChildConfig,
    ChildHello,
    ChildRequest,
    ChildState,
    EngineHello,
    FrameBuffer,
    FrontendHello,
    StepOutput,
    encode,
)
from trimaran.comm.transport.sockets import Address
from trimaran.launcher.cli.main import main as trimaran
from trimaran.server.config import FrontendConfig
from trimaran.server.main import main as frontend

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
        self._sending = threading.Lock()

    def send(self, message):
        with self._sending:
            self.sock.sendall(encode(message))

    def close(self):
        """End the connection, also for a thread that waits for a message."""
        self.sock.shutdown(socket.SHUT_RDWR)

    def receive(self, *kinds):
        """The next message; the end of the connection is None."""
        while not self._messages:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                # The error of a process that was killed with unread data.
                return None
            if not data:
                return None
            self._messages += self._frames.feed(data)
        message = self._messages.pop(0)
        assert isinstance(message, kinds), message
        return message

    def wait_for_state(self, state):
        """Wait for this state; skips reports of loading and requests."""
        while True:
            message = self.receive(ChildState, ChildRequest)
            if isinstance(message, ChildRequest) or message.state == "loading":
                continue
            assert message.state == state, message
            return message


class StartedFrontend:
    """A front-end process and the supervisor's end of its connection."""

    def __init__(self, stack, tmp_path, is_forked=True, **config):
        """``is_forked`` is False for the installed program, with imports of its own."""
        self.is_listening = False
        self.engine_address = Address.parse(f"unix:{tmp_path}/engine.sock")
        address = Address.parse(f"unix:{tmp_path}/supervisor.sock")
        listener = stack.enter_context(address.listen())
        listener.settimeout(60)
        env = ChildEnv(supervisor=str(address), token="secret").to_environ()
        self.log = stack.enter_context((tmp_path / "log").open("w+"))
        env = {**os.environ, **env, "PYTHONSAFEPATH": "1"}
        if is_forked:
            process = ForkedProcess(frontend, (), env, self.log.name)
        else:
            program = Path(sys.executable).with_name("trimaran-frontend")
            process = subprocess.Popen([program], env=env, stderr=self.log)
        self.process = stack.enter_context(process)
        stack.callback(self.process.kill)
        self.supervisor = Peer(stack.enter_context(listener.accept()[0]))
        # The state for the next front end.
        os.unlink(address.path)
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
        """Act as an engine: send its hello and wait for the acceptance."""
        self.wait_until_listening()
        engine = Peer(stack.enter_context(self.engine_address.connect(60)))
        engine.send(EngineHello(token="secret", model="tensorrt_llm", group="g0", facts=FACTS))
        assert engine.receive(FrontendHello).accepted
        return engine

    def http_port(self):
        """The port that the log says."""
        return self._port("HTTPService")

    def grpc_port(self):
        """The same for gRPC."""
        return self._port("GRPCInferenceService")

    def metrics_port(self):
        """The same for the metrics."""
        return self._port("Metrics Service")

    def _port(self, service):
        lines = Path(self.log.name).read_text().splitlines()
        (line,) = [line for line in lines if f"Started {service} at" in line]
        return int(line.rpartition(":")[2])


def write_repository(folder):
    """The five models, filled."""
    values = ",".join(f"{key}:{value}" for key, value in FILL.items())
    assert trimaran(["init-repo", str(folder), "--fill", values]) == 0


def one_token(submit, token, reason):
    return StepOutput(
        step=1,
        request_ids=np.array([submit.request_id], "<u8").tobytes(),
        sequence_indices=np.array([0], "<u2").tobytes(),
        num_tokens=np.array([1], "<u2").tobytes(),
        finish_reasons=np.array([reason], "u1").tobytes(),
        token_ids=np.array([token], "<i4").tobytes(),
    )

"""The front end as a process: its peers here speak the real messages over real sockets."""

import http.client
import json
import resource
import signal
import socket
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
import tritonclient.grpc as triton_grpc
from started_frontend import FILL, StartedFrontend, one_token, write_repository

from trimaran.comm.messages.messages import ChildState, Command, FinishReason, Submit


@pytest.fixture
def repository(tmp_path):
    write_repository(tmp_path / "repository")


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def post(port, path, **body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data=json.dumps(body).encode()
    )
    return urllib.request.urlopen(request, timeout=60)


def test_the_front_end_serves_after_the_first_engine_connects_and_ends_at_a_shutdown(
    repository, stack, tmp_path
):
    frontend = StartedFrontend(stack, tmp_path, is_forked=False)
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
    assert frontend.supervisor.wait_for_state("drained").facts == {
        "num_unfinished": 0, "num_lost": 0,
    }  # fmt: skip
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
        facts = frontend.supervisor.wait_for_state("drained").facts
        assert facts == {"num_unfinished": 1, "num_lost": 0}
        answer = client.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"had not ended within the 0.1 s that --exit-timeout leaves" in answer
        frontend.supervisor.send(Command(verb="shutdown"))
        assert frontend.process.wait(60) == 0


def test_a_drain_counts_requests_failed_by_a_dead_group(repository, stack, tmp_path):
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
        engine.sock.close()
        while "is gone" not in Path(frontend.log.name).read_text():
            time.sleep(0.01)
        frontend.supervisor.send(Command(verb="drain", arguments={"timeout_s": 30}))
        failed = {"group": "g0", "state": "failed", "num_restarts": 0, "text": "it died"}
        frontend.supervisor.send(Command(verb="group_state", arguments=failed))
        facts = frontend.supervisor.wait_for_state("drained").facts
        assert facts == {"num_unfinished": 0, "num_lost": 1}
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 503 ")


def test_without_an_engine_the_front_end_stays_up_and_answers_with_a_retry_time(
    repository, stack, tmp_path
):
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


def test_signals_do_not_end_the_front_end_but_the_death_of_the_supervisor_does(
    repository, stack, tmp_path
):
    frontend = StartedFrontend(stack, tmp_path, is_forked=False)
    frontend.supervisor.receive(ChildState)
    frontend.process.send_signal(signal.SIGTERM)
    frontend.process.send_signal(signal.SIGINT)
    frontend.dial_in(stack)
    frontend.supervisor.wait_for_state("ready")
    frontend.supervisor.sock.close()
    assert frontend.process.wait(60) == 1


def test_a_shutdown_before_readiness_ends_the_front_end_in_order(repository, stack, tmp_path):
    frontend = StartedFrontend(stack, tmp_path)
    frontend.supervisor.receive(ChildState)
    frontend.supervisor.send(Command(verb="drain", arguments={"timeout_s": 30}))
    frontend.supervisor.wait_for_state("drained")
    frontend.supervisor.send(Command(verb="shutdown"))
    assert frontend.process.wait(60) == 0


def test_an_unservable_repository_is_a_configuration_error(stack, tmp_path):
    frontend = StartedFrontend(stack, tmp_path, is_forked=False)
    failed = frontend.supervisor.wait_for_state("failed")
    assert failed.is_config_error
    assert str(tmp_path / "repository") in failed.text
    assert frontend.process.wait(60) == 2


def test_a_missing_tokenizer_is_reported_before_engines_have_loaded(
    repository, stack, tmp_path
):
    path = tmp_path / "repository" / "preprocessing" / "config.pbtxt"
    text = path.read_text()
    path.write_text(text.replace(str(FILL["tokenizer_dir"]), "/no/tokenizer"))
    frontend = StartedFrontend(stack, tmp_path)  # into which no engine dials
    failed = frontend.supervisor.wait_for_state("failed")
    assert failed.is_config_error
    assert failed.text == (
        f"{path}: tokenizer_dir /no/tokenizer is no folder and no file. Name in tokenizer_dir "
        "a folder with a tokenizer that can be read."
    )
    assert frontend.process.wait(60) == 2


@pytest.mark.parametrize(
    ("address", "reached"), [("::1", ["[::1]"]), ("::", ["[::1]", "127.0.0.1"])]
)
def test_both_protocols_are_served_on_addresses_of_ipv6(
    address, reached, repository, stack, tmp_path
):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    addresses = dict.fromkeys(("http_address", "grpc_address"), address)
    frontend = StartedFrontend(stack, tmp_path, **addresses)
    frontend.dial_in(stack)
    frontend.supervisor.wait_for_state("ready")
    for host in reached:
        with urllib.request.urlopen(f"http://{host}:{frontend.http_port()}/v2/health/ready"):
            pass
        with triton_grpc.InferenceServerClient(f"{host}:{frontend.grpc_port()}") as client:
            assert client.is_server_ready()


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


def test_more_connections_than_descriptors_are_refused_and_leave_room_for_engines_and_metrics(
    repository, stack, tmp_path
):
    frontend = StartedFrontend(stack, tmp_path)
    limit = 64
    resource.prlimit(frontend.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
    engine = frontend.dial_in(stack)
    frontend.supervisor.wait_for_state("ready")
    port = frontend.http_port()
    address = ("127.0.0.1", port)

    idle = [stack.enter_context(socket.create_connection(address, 60)) for _ in range(limit)]
    answer = b"".join(iter(lambda: idle[-1].recv(1 << 16), b""))

    assert answer.startswith(b"HTTP/1.1 503 ")
    assert answer.endswith(b'{"error":"the server has too many open connections"}')
    metrics = f"http://127.0.0.1:{frontend.metrics_port()}/metrics"
    with urllib.request.urlopen(metrics, timeout=60) as response:
        assert b"nv_inference_request_success" in response.read()
    # A lost connection is restored beside the other connections.
    engine.close()
    frontend.dial_in(stack)
    lines = Path(frontend.log.name).read_text().splitlines()
    (line,) = [line for line in lines if "new HTTP connections were refused" in line]
    assert f"of the {limit} that a process may have" in line

    for connection in idle:
        connection.close()
    wait_until(lambda: is_live(port))


def is_live(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/live", timeout=60):
            return True
    except OSError:
        return False


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)

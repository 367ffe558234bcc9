"""Flags of tritonserver that change what a front end does."""

from __future__ import annotations

import http.client
import json
import threading
from contextlib import ExitStack

import grpc
import pytest
from controlled_frontend import DEADLINE_S, ControlledFrontend
from started_frontend import write_repository


@pytest.fixture
def start(tmp_path):
    """Start a front end without models under some fields of its configuration."""
    write_repository(tmp_path / "repository")
    with ExitStack() as stack:

        def run(**config):
            frontend = ControlledFrontend(stack, tmp_path, **config)
            frontend.wait_ready()
            return frontend

        yield run


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    connection.request("GET", path)
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def test_host_metrics_can_be_disabled(start):
    frontend = start(allow_cpu_metrics=False)
    text = get(frontend._port("Metrics Service"), "/metrics")
    assert "nv_pinned_memory_pool_total_bytes 0" in text
    assert "nv_cpu_" not in text


def test_a_connection_ends_at_the_configured_age(start):
    options = {"grpc.max_connection_age_ms": 300, "grpc.max_connection_age_grace_ms": 100}
    frontend = start(grpc_options=options)
    has_begun, has_ended = threading.Event(), threading.Event()

    def note(state):
        if state is grpc.ChannelConnectivity.READY:
            has_begun.set()
        elif has_begun.is_set():
            has_ended.set()

    with grpc.insecure_channel(f"127.0.0.1:{frontend.grpc_port()}") as channel:
        channel.subscribe(note, try_to_connect=True)
        assert has_begun.wait(DEADLINE_S)
        assert has_ended.wait(DEADLINE_S)


def test_log_settings_report_the_flags(start):
    frontend = start(log_kinds={"log_warning": False})
    settings = json.loads(get(frontend.http_port(), "/v2/logging"))
    assert (settings["log_info"], settings["log_warning"]) == (True, False)

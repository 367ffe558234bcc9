"""Ctrl-C during `trimaran bench`: the report covers the finished requests and says that it
is partial."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scripted_server import Reply, ids_reply

_LOAD = ("--input-len", "4", "--output-len", "1", "-c", "2", "--num-requests", "50")


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command in a group of its own, as a terminal does."""
    running: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        # Shells let what runs in the background ignore Ctrl-C, these tests too.
        heeding = ("env", "--default-signal=INT")
        command = [*heeding, str(Path(sys.executable).with_name("trimaran")), *words]
        pipe = subprocess.PIPE
        running.append(
            subprocess.Popen(
                command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
            )
        )
        return running[-1]

    yield start
    for each in running:
        each.kill()
        each.communicate()


class Answers:
    """Answers a number of requests, and keeps later requests waiting."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self.waiting = threading.Semaphore(0)
        self.over = threading.Event()

    def next(self) -> None:
        """Return at once, or when all is over."""
        with self._lock:
            self._left -= 1
            has_one = self._left >= 0
        if not has_one:
            self.waiting.release()
            self.over.wait(150)


@pytest.fixture
def answers(http_server, server) -> Iterator[Answers]:
    """The requests of both servers."""
    some = Answers(7)

    def over_http(body):
        some.next()
        return [{"output_ids": [1], "sequence_length": 1}]

    def over_grpc(request):
        some.next()
        return [ids_reply([1]), Reply(is_final=True)]

    http_server.events, server.script = over_http, over_grpc
    yield some
    some.over.set()


def interrupt(
    command: subprocess.Popen[str], answers: Answers, *, whole_group: bool = True
) -> tuple[str, str]:
    """Ctrl-C once both connections wait; what the command printed."""
    for _ in range(2):
        assert answers.waiting.acquire(timeout=60), command.communicate(timeout=1)
    # The last answers are taken in by then.
    time.sleep(0.3)
    (os.killpg if whole_group else os.kill)(command.pid, signal.SIGINT)
    return command.communicate(timeout=60)


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize(
    ("protocol", "flags", "whole_group"),
    [
        ("http", [], True),
        ("grpc", [], True),
        ("http", ["--load-processes", "2"], True),
        ("grpc", ["--load-processes", "2"], False),
    ],
)
def test_figures_of_an_interrupted_run_cover_finished_requests(
    http_server, server, started, answers, tmp_path, protocol, flags, whole_group
):
    url = http_server.url if protocol == "http" else server.url
    where = ["-i", protocol, "-u", url, "--warmup", "1", "--json", str(tmp_path / "r.json")]
    command = started("bench", *where, *flags, *_LOAD)

    out, err = interrupt(command, answers, whole_group=whole_group)

    assert command.returncode == 130
    assert "[INFO] Interrupted: figures of the 6 of 50 requests that ended.\n" in out
    assert re.search(r"^\| Total requests +\| +6\.00 \|$", out, re.M)
    assert re.search(r"^\| Failed requests +\| +0\.00 \|$", out, re.M)
    assert err == f"--json {tmp_path / 'r.json'} was not written\n"
    assert not (tmp_path / "r.json").exists()


def test_an_interrupted_sweep_keeps_finished_points_and_names_the_unfinished_point(
    http_server, started, answers, tmp_path
):
    output = tmp_path / "served.jsonl"
    command = started(
        "bench", "serve", "-u", http_server.url, "--warmup", "0", "-c", "2", "--load", "4/1x4",
        "--load", "4/1x50", "--output", str(output),
    )  # fmt: skip

    out, err = interrupt(command, answers)

    assert (command.returncode, err) == (130, "")
    assert "interrupted: the line above is that of 3 of 50 requests, and not in --ou" in out
    (line,) = output.read_text().splitlines()
    assert json.loads(line)["requests"] == 4


def test_load_processes_of_a_killed_parent_end_silently(http_server, started, answers):
    command = started(
        "bench", "-u", http_server.url, "--warmup", "1", "--load-processes", "2", *_LOAD
    )
    for _ in range(2):
        assert answers.waiting.acquire(timeout=60), command.communicate(timeout=1)

    command.kill()

    # The streams stay open until the last process has closed them.
    assert command.communicate(timeout=60)[1] == ""

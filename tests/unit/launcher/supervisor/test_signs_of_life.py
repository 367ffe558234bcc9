"""A computing front end has more time to answer than an idle front end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from trimaran.launcher.supervisor.signs_of_life import SignsOfLife

COMPUTES = "while True: pass"
SLEEPS = "import time; time.sleep(600)"


class Connection:
    """A control connection whose process never answers."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.num_unanswered = 0

    def ping(self) -> None:
        self.num_unanswered += 1


@pytest.fixture
def silent():
    """A function that starts a process and returns its connection."""
    processes = []

    def start(code: str) -> Connection:
        processes.append(subprocess.Popen([sys.executable, "-c", code]))
        return Connection(processes[-1].pid)

    yield start
    for process in processes:
        process.kill()
        process.wait()


def looks_until_judged(signs: SignsOfLife, connection: Connection) -> tuple[int, str]:
    """The number of checks until the process was declared hung, and the reason."""
    for count in range(1, 1000):
        silence = signs.look([connection], is_loading=False)
        if silence is not None:
            return count, silence.text
        time.sleep(signs.period_s)
    raise AssertionError("never given up")


def test_an_idle_front_end_without_answers_is_killed_after_the_hang_timeout(silent):
    count, text = looks_until_judged(SignsOfLife(0.8, 4.0), silent(SLEEPS))

    assert count == 5
    assert "has hung: no sign of life for 0.8 s and no work done (--hang-timeout)" in text


def test_a_computing_front_end_is_killed_only_after_the_stall_timeout(silent, caplog):
    count, text = looks_until_judged(SignsOfLife(0.8, 4.0), silent(COMPUTES))

    assert count == 21
    assert "has stalled: it computes" in text
    assert "4 s (--stall-timeout)" in text
    assert caplog.text.count("answered nothing for 0.8 s, but computes") == 1


def test_a_front_end_that_stops_computing_without_answers_has_hung(silent):
    signs, connection = SignsOfLife(0.8, 40.0), silent(COMPUTES)
    for _ in range(10):
        assert signs.look([connection], is_loading=False) is None
        time.sleep(signs.period_s)

    os.kill(connection.pid, signal.SIGSTOP)

    assert "has hung" in looks_until_judged(signs, connection)[1]


def test_a_spinning_rank_without_answers_has_hung(silent):
    count, text = looks_until_judged(SignsOfLife(0.8, 0.0), silent(COMPUTES))

    assert count == 5
    assert text == "has hung: no sign of life for 0.8 s (--hang-timeout)"


def test_a_loading_process_has_six_times_the_hang_timeout(silent):
    signs, connection = SignsOfLife(0.8, 4.0), silent(SLEEPS)
    for _ in range(24):
        assert signs.look([connection], is_loading=True) is None

    assert "(6 times --hang-timeout" in signs.look([connection], is_loading=True).text

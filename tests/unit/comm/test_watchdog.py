"""The watchdog ends only hung processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time

from trimaran.comm.deadlines import Watchdog


def test_a_hang_is_reported_with_its_activity_and_stack(caplog, capfd):
    barked = threading.Event()
    watchdog = Watchdog(0.1, barked.set)
    watchdog.watch(lambda: "step 7")

    with caplog.at_level(logging.ERROR):
        assert barked.wait(60.0)
    watchdog.stop()

    assert "step 7 did not end" in caplog.text
    assert "test_watchdog.py" in capfd.readouterr().err


def test_the_stack_of_the_hanging_thread_is_shown_among_many_threads(capfd):
    barked, is_over = threading.Event(), threading.Event()
    others = [threading.Thread(target=is_over.wait) for _ in range(120)]
    for other in others:
        other.start()
    watchdog = Watchdog(0.1, barked.set)
    watchdog.watch(lambda: "step 7")

    assert barked.wait(60.0)
    watchdog.stop()
    is_over.set()
    for other in others:
        other.join()

    assert "test_watchdog.py" in capfd.readouterr().err


def test_a_paused_watchdog_reports_nothing():
    barked = threading.Event()
    watchdog = Watchdog(1.0, barked.set)
    watchdog.watch(lambda: "a step")
    watchdog.pause()

    assert not barked.wait(1.5)
    watchdog.stop()


def test_steps_that_end_in_time_are_not_hangs():
    barked = threading.Event()
    watchdog = Watchdog(60.0, barked.set)
    for _ in range(40):
        watchdog.watch(lambda: "a short step")
        time.sleep(0.005)

    assert not barked.is_set()
    watchdog.stop()


def test_an_activity_may_have_a_limit_of_its_own():
    barked = threading.Event()
    watchdog = Watchdog(0.1, barked.set)
    watchdog.watch(lambda: "loading", timeout_s=60.0)

    assert not barked.wait(0.3)
    watchdog.stop()


def test_an_activity_that_waits_for_another_one_has_the_time_limit_of_that_one(caplog):
    barked = threading.Event()
    watchdog = Watchdog(0.1, barked.set)
    watchdog.watch(lambda: "a step")
    watchdog.interrupt(lambda: "a compilation", 0.4)

    with caplog.at_level(logging.ERROR):
        assert barked.wait(60.0)
    watchdog.stop()

    assert "a compilation did not end" in caplog.text


def test_an_interruption_does_not_count_to_an_activitys_time_limit(caplog):
    barked = threading.Event()
    watchdog = Watchdog(0.4, barked.set)
    watchdog.watch(lambda: "a step")
    watchdog.interrupt(lambda: "a compilation", 60.0)
    assert not barked.wait(1.0)
    watchdog.resume()

    with caplog.at_level(logging.ERROR):
        assert barked.wait(60.0)
    watchdog.stop()

    assert "a step did not end" in caplog.text


_STALLED = """
import os, time
from trimaran.comm.deadlines import Watchdog
watchdog = Watchdog(4.0, lambda: os._exit(9))
watchdog.watch(lambda: "a step")
print("begun", flush=True)
input()
time.sleep(0.2)
watchdog.pause()
print("ended", flush=True)
"""


def test_a_stall_of_the_whole_process_is_no_hang():
    with subprocess.Popen(
        [sys.executable, "-c", _STALLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(5.0)
        # The activity ends soon after the stall, wherever the stall met it.
        process.stdin.write(b"\n")
        process.stdin.flush()
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.readline() == b"ended\n"
    assert process.returncode == 0

"""Guides that take long, or much memory, to compile: others go on, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.unit.worker.guided_engine import MODEL, ROOT, follows, make_engine, submit, text_of
from trimaran.comm.errors import ConfigError, RequestError
from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.config.engine_config import GuidedConfig
from trimaran.worker.guided.compiler import GuideCompiler
from trimaran.worker.guided.library import Library
from trimaran.worker.guided.process_pool import GuideProcesses

NUM_IDS = 4096
LEFT_TO_SLOW_S = 2.0
"""Seconds of work after which a guide is compiled by the threads for slow guides."""

PATIENT_S = 250.0
"""Seconds, for a machine with other work."""


def minutes(number: int) -> str:
    """A schema that takes half a minute or more; each number gives another schema."""
    lengths = range(10 + number, 310 + number)
    properties = {f"of {most}": {"type": "string", "maxLength": most} for most in lengths}
    return json.dumps({"type": "object", "properties": properties})


def texts(count: int) -> str:
    """A choice of ``count`` texts: some 3 s for 9000."""
    return json.dumps([f"value number {place * 7919 % 1000003}" for place in range(count)])


@pytest.fixture
def serve():
    """A function that makes a driver with this guide timeout."""
    drivers = []

    def make(timeout_s=30.0):
        guided = GuidedConfig(backend="xgrammar", timeout_s=timeout_s)
        drivers.append(make_engine(guided=guided))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.engine.shutdown()


@pytest.fixture
def processes():
    return Processes()


@pytest.fixture
def compiler(processes):
    config = GuidedConfig(backend="xgrammar", timeout_s=PATIENT_S)
    made = GuideCompiler(config, str(MODEL), NUM_IDS)
    made.submit("regex", "ready").result(PATIENT_S)
    yield made
    made.close()


class Processes:
    """Child processes since the start of the test: the forking one and its children."""

    def __init__(self) -> None:
        self._others = self._all()

    def _all(self) -> list[psutil.Process]:
        return psutil.Process().children(recursive=True)

    def copies(self) -> list[psutil.Process]:
        direct = psutil.Process().children()
        return [p for p in self._all() if p not in self._others and p not in direct]

    def at_work(self) -> list[psutil.Process]:
        """Children that have compiled for long, by CPU time rather than wall time."""
        return [p for p in self.copies() if seconds_of_work(p) > LEFT_TO_SLOW_S]

    def kill_all(self) -> None:
        (copied,) = [p for p in psutil.Process().children() if p not in self._others]
        copied.kill()
        wait_until(lambda: not self.copies())


def seconds_of_work(process: psutil.Process) -> float:
    try:
        return process.cpu_times().user
    except psutil.NoSuchProcess:
        return 0.0


def wait_until(is_so):
    end = time.monotonic() + PATIENT_S
    while not is_so():
        assert time.monotonic() < end, "it does not come to be"
        time.sleep(0.02)


def test_a_guide_does_not_wait_for_slow_ones_whether_or_not_they_are_still_wanted(serve):
    driver = serve(PATIENT_S)
    quick = [submit(driver, "regex")]
    driver.run()
    slow = [submit(driver, "json_schema", minutes(number)) for number in range(3)]
    gone = submit(driver, "json_schema", minutes(3))
    driver.engine.cancel("client", [gone])
    quick += [submit(driver, "choice"), submit(driver, "regex", "[a-f]{3}")]
    while not all((request, 0) in driver.reasons for request in quick):
        driver.step()
    compiled = [request for request in slow if (request, 0) in driver.reasons]

    driver.engine.cancel("client", slow)
    driver.run()
    after = submit(driver, "ebnf_grammar")
    driver.run()

    assert not compiled
    assert follows("choice", text_of(driver, quick[1]))
    assert follows("ebnf_grammar", text_of(driver, after))
    assert all(driver.reasons[request, 0] is FinishReason.CANCELLED for request in slow)
    driver.check_idle()


@pytest.mark.parametrize("seconds", [0.5, 1.5])
def test_a_guide_that_takes_longer_than_it_may_is_refused_with_the_limit(serve, seconds):
    driver = serve(seconds)
    good = submit(driver, "regex")
    bad = submit(driver, "json_schema", minutes(0))

    driver.run(max_steps=100_000)

    assert f"takes more than {seconds} s to be compiled" in driver.failed[bad]
    assert "--guide-timeout" in driver.failed[bad]
    assert follows("regex", text_of(driver, good))
    driver.check_idle()


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("timeout_s", "--guide-timeout"),
        ("step_timeout_s", "--guide-step-timeout"),
        ("max_processes", "--guide-processes"),
    ],
)
def test_no_time_or_process_at_all_is_refused_at_the_start(field, flag):
    with pytest.raises(ConfigError, match=f"{flag} is 0"):
        GuidedConfig(backend="xgrammar", **{field: 0})


def test_a_slow_guide_within_the_limit_is_followed_and_remembered(serve):
    driver = serve(PATIENT_S)
    guide = texts(9000)
    started = time.monotonic()
    first = submit(driver, "choice", guide)
    driver.run(max_steps=1_000_000)
    ended = time.monotonic()
    again = submit(driver, "choice", guide)
    driver.run(max_steps=1_000_000)

    assert {text_of(driver, first), text_of(driver, again)} <= set(json.loads(guide))
    assert time.monotonic() - ended < (ended - started) / 2


def test_a_guide_of_several_requests_is_compiled_once_for_those_not_cancelled(compiler):
    futures = [compiler.submit("choice", texts(9000)) for _ in range(8)]
    for future in futures[::2]:
        assert future.cancel()

    grammars = [future.result(PATIENT_S) for future in futures[1::2]]

    assert len({grammar.process for grammar in grammars}) == 1


def test_a_guide_of_cancelled_requests_ends_at_once(compiler, processes):
    futures = [compiler.submit("json_schema", minutes(number)) for number in range(2)]
    wait_until(lambda: len(processes.copies()) == 2)

    for future in futures:
        future.cancel()

    wait_until(lambda: processes.copies() == [])
    assert compiler.submit("regex", "a+").result(PATIENT_S)


def test_a_guide_that_is_given_up_as_it_begins_leaves_no_traceback(processes, capfd):
    library = Library.load(GuidedConfig(backend="xgrammar"), str(MODEL), NUM_IDS, 1 << 20)
    pool = GuideProcesses(library.to_text(), NUM_IDS)
    pool.close_one(pool.compile("regex", "ready", PATIENT_S, lambda: True))
    process, _ = pool._take(lambda: True)
    connection = process._connection
    # The copy has its task, and has not noticed yet that the other end is closed.
    with socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_RD)

    connection.send(("compile", "regex", "[ab]+", PATIENT_S))
    wait_until(lambda: processes.copies() == [])

    connection.close()
    pool.close()
    assert "Traceback" not in capfd.readouterr().err


def test_processes_that_end_are_replaced(compiler, processes):
    # All of them, then the one that compiles a guide, whose guide may be the reason.
    processes.kill_all()
    slow = compiler.submit("json_schema", minutes(0))
    wait_until(processes.at_work)
    processes.kill_all()
    wait_until(processes.at_work)
    assert not slow.done()
    for copy in processes.at_work():
        copy.kill()

    with pytest.raises(RequestError, match="ends its compiler, or takes more than 2048 MiB"):
        slow.result(PATIENT_S)
    assert compiler.submit("regex", "b+").result(PATIENT_S)


def test_a_guide_that_takes_more_memory_than_it_may_is_refused_with_the_limit():
    config = GuidedConfig(backend="xgrammar")
    library = Library.load(config, str(MODEL), NUM_IDS, 1 << 20)
    pool = GuideProcesses(library.to_text(), NUM_IDS, max_bytes=32 << 20)
    with pytest.raises(RequestError, match="takes more than 32 MiB of memory"):
        pool.compile("choice", texts(9000), PATIENT_S, lambda: True)

    assert pool.compile("regex", "a+", PATIENT_S, lambda: True)
    pool.close()


PROGRAM = """
import sys
from trimaran.worker.config.engine_config import GuidedConfig
from trimaran.worker.guided.compiler import GuideCompiler

compiler = GuideCompiler(GuidedConfig(backend="xgrammar"), sys.argv[1], 4096)
compiler.submit("regex", "ready").result()
compiler.submit("json_schema", sys.stdin.readline())
print("compiling", flush=True)
sys.stdin.readline()
"""


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_nothing_is_left_when_the_rank_ends(how):
    rank = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(MODEL)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ,
    )  # fmt: skip
    rank.stdin.write(minutes(0) + "\n")
    rank.stdin.flush()
    assert rank.stdout.readline() == "compiling\n"
    wait_until(lambda: len(psutil.Process(rank.pid).children(recursive=True)) >= 2)
    children = psutil.Process(rank.pid).children(recursive=True)

    if how is None:
        rank.stdin.write("close\n")
    else:
        rank.send_signal(how)
    rank.stdin.close()

    _, alive = psutil.wait_procs(children, timeout=100.0)
    assert not alive, [process.cmdline() for process in alive]
    rank.wait(PATIENT_S)
    rank.stdout.close()

"""The processes that compile guides: limited, ended with their requests, and replaced."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.unit.worker.guided_engine import MODEL, ROOT, slow_schema, texts
from trimaran.comm.errors import RequestError
from trimaran.worker.config.engine_config import GuidedConfig
from trimaran.worker.guided import process_pool
from trimaran.worker.guided.compiler import GuideCompiler
from trimaran.worker.guided.library import Library
from trimaran.worker.guided.process_pool import GuideProcesses

NUM_IDS = 4096
SLICES_S = (0.1, 0.2, 0.4)
LEFT_TO_LAST_S = 0.6
"""Seconds of work that only the last level allows."""

PATIENT_S = 60.0
START_S = 250.0
"""Seconds, for a machine with other work; the library is loaded at a start."""


class Processes:
    """The forking process that was started after ``others``, and its copies."""

    def __init__(self, others: list[psutil.Process]) -> None:
        self._others = others

    def first(self) -> list[psutil.Process]:
        """None between its end and the start of the next one."""
        return [p for p in psutil.Process().children() if p not in self._others]

    def copies(self) -> list[psutil.Process]:
        return [copy for first in self.first() for copy in first.children()]

    def at_work(self) -> list[psutil.Process]:
        """Copies that compile at the last level, by CPU time rather than wall time."""
        return [p for p in self.copies() if seconds_of_work(p) > LEFT_TO_LAST_S]

    def kill_all(self) -> None:
        (first,) = self.first()
        copies = first.children()
        self._others = psutil.Process().children()
        first.kill()
        assert all_end(copies)


def seconds_of_work(process: psutil.Process) -> float:
    try:
        return process.cpu_times().user
    except psutil.NoSuchProcess:
        return 0.0


def all_end(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=PATIENT_S)[1]


def wait_until(is_so, seconds=PATIENT_S):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "the condition was not met in time"
        # Every look walks through all processes of the machine.
        time.sleep(0.1)


@pytest.fixture(scope="module")
def pool():
    """Processes with little memory for a guide."""
    library = Library.load(GuidedConfig(backend="xgrammar"), str(MODEL), NUM_IDS, 1 << 20)
    made = GuideProcesses(library.to_text(), NUM_IDS, max_bytes=32 << 20)
    yield made
    made.close()


@pytest.fixture(scope="module")
def compiler_and_processes(pool):
    """A compiler whose slow guides soon reach the last level."""
    processes = Processes(psutil.Process().children())
    config = GuidedConfig(backend="xgrammar", timeout_s=250.0)
    made = GuideCompiler(config, str(MODEL), NUM_IDS, slices_s=SLICES_S)
    made.submit("regex", "ready").result(START_S).release()
    yield made, processes
    children = [*processes.first(), *processes.copies()]
    assert len(children) > 1
    made.close()
    assert all_end(children), "a compiler that is closed leaves processes"


@pytest.fixture
def compiler(compiler_and_processes):
    return compiler_and_processes[0]


@pytest.fixture
def processes(compiler_and_processes):
    return compiler_and_processes[1]


def test_a_guide_over_the_memory_limit_is_refused_with_the_limit(pool):
    with pytest.raises(RequestError, match="takes more than 32 MiB of memory"):
        pool.compile("choice", texts(9000), PATIENT_S, lambda: True)

    # Small guides have room, and are not charged for what they share.
    process = pool.compile("regex", "a+", PATIENT_S, lambda: True)
    assert process.num_bytes < 8 << 20
    pool.close_one(process)


def test_a_guide_cancelled_at_the_start_of_its_compilation_leaves_no_traceback(pool, capfd):
    pool.close_one(pool.compile("regex", "ready", PATIENT_S, lambda: True))
    process, first = pool._take(lambda: True)
    connection = process._connection
    # The copy has its task, and has not noticed the closed connection yet.
    with socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_RD)

    connection.send(("compile", "regex", "[ab]+", PATIENT_S))
    wait_until(lambda: psutil.Process(first.pid).children() == [])

    pool.close_one(process)
    assert "Traceback" not in capfd.readouterr().err


def test_requests_with_the_same_guide_share_one_compilation_despite_cancellations(compiler):
    guide = texts(4000)
    futures = [compiler.submit("choice", guide) for _ in range(8)]
    for future in futures[::2]:
        assert future.cancel()

    grammars = [future.result(PATIENT_S) for future in futures[1::2]]

    assert len({grammar.process for grammar in grammars}) == 1
    for grammar in grammars:
        grammar.release()
    again = compiler.submit("choice", guide)
    assert again.done(), "a compiled guide is forgotten"
    assert again.result().process is grammars[0].process
    again.result().release()


def test_a_guide_without_requests_ends_at_once_and_the_next_slow_guide_starts(
    compiler, processes
):
    # The number of concurrent compilations at the last level, each of which lasts minutes.
    slow = [compiler.submit("json_schema", slow_schema(number)) for number in range(2)]
    slow.append(compiler.submit("json_schema", slow_schema(1)))
    wait_until(lambda: len(processes.at_work()) == 2)
    ended = processes.at_work()
    following = compiler.submit("json_schema", slow_schema(2))
    slow[1].cancel()
    compiler.submit("regex", "[0-9]+").result(PATIENT_S).release()
    assert processes.at_work() == ended, "a guide ends that another request waits for"

    slow[0].cancel()
    slow[2].cancel()

    assert all_end(ended)
    wait_until(lambda: len(processes.at_work()) == 1)
    following.cancel()
    wait_until(lambda: processes.at_work() == [])
    compiler.submit("regex", "a+").result(PATIENT_S).release()


def test_compiler_processes_that_end_are_replaced(compiler, processes):
    # All idle processes end first, and then the compiling process, because its guide may be the
    # reason.
    slow = compiler.submit("json_schema", slow_schema(0))
    wait_until(processes.at_work)
    processes.kill_all()
    wait_until(processes.at_work, START_S)
    assert not slow.done()
    for copy in processes.at_work():
        copy.kill()

    with pytest.raises(RequestError, match="ends its compiler, or takes more than 156 MiB"):
        slow.result(PATIENT_S)
    # Its process was idle, and is no more.
    compiler.submit("regex", "ready").result(PATIENT_S).release()


def test_a_process_whose_guide_is_not_used_ends_in_time(compiler, processes, monkeypatch):
    compiler.submit("regex", "kept").result(PATIENT_S).release()
    kept = processes.copies()
    assert kept
    compiler.submit("regex", "kept").result(PATIENT_S).release()
    assert processes.copies() == kept
    with monkeypatch.context() as patch:
        patch.setattr(process_pool, "_MAX_IDLE_S", 0.0)
        compiler.submit("regex", "other").result(PATIENT_S).release()
        assert all_end(kept)
    compiler.submit("regex", "other").result(PATIENT_S).release()


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


@pytest.mark.matrix(keep=0)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_no_compiler_process_outlives_its_rank(how):
    rank = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(MODEL)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ,
    )  # fmt: skip
    rank.stdin.write(slow_schema(0) + "\n")
    rank.stdin.flush()
    assert rank.stdout.readline() == "compiling\n"
    wait_until(lambda: len(psutil.Process(rank.pid).children(recursive=True)) >= 2, START_S)
    children = psutil.Process(rank.pid).children(recursive=True)

    if how is None:
        rank.stdin.write("close\n")
    else:
        rank.send_signal(how)
    rank.stdin.close()

    _, alive = psutil.wait_procs(children, timeout=PATIENT_S)
    assert not alive, [process.cmdline() for process in alive]
    rank.wait(PATIENT_S)
    rank.stdout.close()

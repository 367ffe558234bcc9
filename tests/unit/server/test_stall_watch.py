"""The stacks of what holds up an event loop are written, by Python code or C code."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

from trimaran.server.stall_watch import StallWatch

IN_C_CODE = """
import asyncio, ctypes, faulthandler
from trimaran.server.stall_watch import StallWatch

def holds_the_interpreter():
    # Unlike CDLL, PyDLL keeps the lock of the interpreter during the call.
    ctypes.PyDLL(None).usleep(900_000)

async def main():
    watch = StallWatch(stall_s=0.1)
    watch.start()
    await asyncio.sleep(0.2)
    holds_the_interpreter()
    watch.stop()

asyncio.run(main())
"""
ON_SIGNAL = """
import time
from trimaran.server.stall_watch import dump_stacks_on_signal
dump_stacks_on_signal()
def sleeps_for_long():
    print(flush=True)
    time.sleep(600)
sleeps_for_long()
"""


def holds_the_loop(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.001)


def test_python_code_that_holds_the_loop_is_in_the_log(caplog):
    async def scene():
        watch = StallWatch(stall_s=0.1)
        watch.start()
        await asyncio.sleep(0.3)
        holds_the_loop(1.2)
        stalled = not watch.is_turning()
        for _ in range(600):
            await asyncio.sleep(0.1)
            if "turns again" in caplog.text:
                break
        watch.stop()
        return stalled

    assert asyncio.run(scene())
    assert "the event loop has not turned for" in caplog.text
    assert "in holds_the_loop" in caplog.text
    assert "the event loop turns again" in caplog.text


def test_a_responsive_loop_logs_nothing(caplog):
    async def scene():
        watch = StallWatch(stall_s=30.0)
        watch.start()
        await asyncio.sleep(1.2)
        watch.stop()

    asyncio.run(scene())
    assert caplog.text == ""


def test_c_code_that_holds_the_interpreter_is_written_by_the_timer():
    done = subprocess.run(
        [sys.executable, "-c", IN_C_CODE], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "in holds_the_interpreter" in done.stderr


def test_a_signal_writes_the_stacks_and_ends_no_process():
    process = subprocess.Popen(
        [sys.executable, "-c", ON_SIGNAL], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.readline()
    os.kill(process.pid, signal.SIGUSR1)
    written = b""
    while b"sleeps_for_long" not in written:
        written += process.stderr.readline()
    assert process.poll() is None
    process.kill()
    process.communicate()

"""Children that end while the supervisor does."""

import subprocess
import sys

PROGRAM = """
import asyncio, contextlib, os, signal
from asyncio.selector_events import BaseSelectorEventLoop
from trimaran.launcher.supervisor.supervisor import Supervisor

close_self_pipe = BaseSelectorEventLoop._close_self_pipe

def lose_a_child_meanwhile(loop):
    close_self_pipe(loop)
    os.kill(os.getpid(), signal.SIGCHLD)

class Ending(Supervisor):
    def __init__(self):
        pass

    def _log_sinks(self):
        return {"stderr": 2}

    async def _serve(self, run_dir, children):
        return 0

BaseSelectorEventLoop._close_self_pipe = lose_a_child_meanwhile
with contextlib.ExitStack() as cleanup:
    asyncio.run(Ending()._run(cleanup))
"""


def test_a_child_that_ends_last_leaves_no_traceback():
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")

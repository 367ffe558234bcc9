"""Children that end while the supervisor does."""

import subprocess
import sys

PROGRAM = """
import os, signal
from asyncio.selector_events import BaseSelectorEventLoop
from trimaran.launcher.config import ServeConfig
from trimaran.launcher.supervisor.runtime import run
from trimaran.server.config import FrontendConfig

close_self_pipe = BaseSelectorEventLoop._close_self_pipe

def lose_a_child_meanwhile(loop):
    close_self_pipe(loop)
    os.kill(os.getpid(), signal.SIGCHLD)

async def serve(runtime):
    return 0

BaseSelectorEventLoop._close_self_pipe = lose_a_child_meanwhile
config = ServeConfig(frontend=FrontendConfig(model_repository="/nowhere"), groups=())
run(config, serve)
"""


def test_a_child_that_outlives_its_starter_leaves_no_traceback():
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")

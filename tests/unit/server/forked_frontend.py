"""Front-end processes that fork from a process with the server's imports already done.

A test of what a front end does once it runs saves the second of processor time that the imports
take. Tests of the start itself run the program.
"""

import multiprocessing
import os
import signal
import subprocess

# A child imports no other module of the tests, so this module imports few.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["trimaran.server.main", "trimaran.server.frontend"])


def _run(env, log_path):
    """Become a front end with this environment, whose standard error is appended to a file."""
    from trimaran.server.main import main

    os.environ.clear()
    os.environ.update(env)
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 2)
    os.close(log)
    main()


class ForkedFrontend:
    """A process like `subprocess.Popen`, in what tests use of it."""

    def __init__(self, env, log_path):
        self._process = _FORKS.Process(target=_run, args=(env, log_path), daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()

    def poll(self):
        """The exit code; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout=None):
        """The exit code, once the process has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("trimaran-frontend", timeout)
        return self._process.exitcode

    def kill(self):
        """End the process at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

"""Processes of tests that fork from a process with the slow imports already done.

A test of what a program does once it runs saves the second of processor time that the imports
take. Tests of a start itself run the program.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import tempfile

# A child imports this module, and so this module imports few.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([
    "trimaran.server.main", "trimaran.server.frontend",
    "trimaran.launcher.supervisor.supervisor",
])  # fmt: skip


def _run(main, args, env, log_path):
    """Become a program with this environment, whose output is appended to a file."""
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    main(*args)


class ForkedProcess:
    """A process like `subprocess.Popen`, in what tests use of it."""

    def __init__(self, main, args, env, log_path):
        """``main`` is a function that a child can import by its module's name."""
        self._process = _FORKS.Process(
            target=_run, args=(main, args, dict(env), str(log_path)), daemon=True
        )
        self._process.start()
        self.pid = self._process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()

    def poll(self):
        """The exit code, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout=None):
        """The exit code, once the process has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return self._process.exitcode

    def send_signal(self, number):
        """Signal the process, if it runs."""
        if self.poll() is None:
            # The fork server reaps an ended process before the exit code is known here.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        """End the process at once."""
        self.send_signal(signal.SIGKILL)

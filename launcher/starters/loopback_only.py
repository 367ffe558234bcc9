"""Keeps Open MPI off the network where all ranks are on one host.

Open MPI's daemons and its TCP transport bind to all interfaces; their parameters choose only
which addresses are announced. A preloaded library binds to loopback in their place.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".c")
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 60.0
_PRELOAD = "LD_PRELOAD"
_INTERFACES = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude")
"""Parameters that choose what the TCP transport announces; they exclude each other. The daemons
of Open MPI 5 refuse to run on loopback alone, and need to be reached by no process here."""


class LoopbackOnly:
    """The preloaded library of one server, compiled into a folder of the run when needed."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is deleted at the end of the run."""
        self._library = folder / "loopback_only.so"

    def env(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The variables for Open MPI's processes; what the operator has set stays as it is.

        Where the library cannot be compiled or loaded, a line in the log says so, and Open
        MPI's ports stay open on all interfaces.
        """
        if self._problem:
            return {}
        is_chosen = any(name in environ for name in _INTERFACES)
        preloaded = [str(self._library), environ.get(_PRELOAD, "")]
        return {
            **({} if is_chosen else {_INTERFACES[0]: "lo"}),
            _PRELOAD: ":".join(filter(None, preloaded)),
        }

    @functools.cached_property
    def _problem(self) -> str:
        """Why the library cannot be had; empty once it is there. Looked for once."""
        problem = self._compile() or self._try()
        if problem:
            logger.warning(
                "Open MPI's ports of this server are open on all interfaces: %s. Close them "
                "with a firewall, or mend this (docs/security.md)", problem,
            )  # fmt: skip
        return problem

    def _compile(self) -> str:
        found = (shutil.which(name) for name in (os.environ.get("CC", ""), *_COMPILERS) if name)
        compiler = next(filter(None, found), None)
        if compiler is None:
            return f"there is no C compiler to close them ({', '.join(_COMPILERS)})"
        command = [compiler, "-O1", "-shared", "-fPIC", str(_SOURCE), "-o", str(self._library)]
        try:
            done = subprocess.run(
                [*command, "-ldl"], capture_output=True, text=True, timeout=_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} failed: {error}"
        if not done.returncode:
            return ""
        lines = done.stderr.splitlines()
        reason = next((line for line in lines if "error:" in line), "".join(lines[-1:]))
        return f"{compiler} failed: {reason}"

    def _try(self) -> str:
        """Whether the loader takes the library, which it does not on a file system without
        execution; it would say so at every start of a program."""
        env = {**os.environ, _PRELOAD: str(self._library), "LC_ALL": "C"}
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", ":"], capture_output=True, text=True, env=env,
                timeout=_TIMEOUT_S,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{self._library} cannot be tried: {error}"
        return f"{self._library} is not loaded: {done.stderr.strip()}" if done.stderr else ""

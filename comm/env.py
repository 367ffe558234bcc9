"""The environment variables that Trimaran's processes pass to their children."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trimaran.comm.errors import ConfigError

SUPERVISOR = "TRIMARAN_SUPERVISOR"
TOKEN = "TRIMARAN_TOKEN"
GROUP = "TRIMARAN_GROUP"
INCARNATION = "TRIMARAN_INCARNATION"
LOG_FORMAT = "TRIMARAN_LOG_FORMAT"
LOG_LEVEL = "TRIMARAN_LOG_LEVEL"
LOG_DIR = "TRIMARAN_LOG_DIR"
LOG_PIPE = "TRIMARAN_LOG_PIPE"
"""A path to the common log, for a process whose starter drops its output."""

JOB = "TRIMARAN_JOB"
"""Set in a job that the supervisor did not start: rank 0 alone has the supervisor's address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEnv:
    """The variables with which a child connects to the supervisor."""

    supervisor: str
    """Address of the supervisor: ``unix:/path`` or ``tcp:host:port``."""

    token: str
    """One-time secret of this run, shown on every connection."""

    group: str = ""
    """Name of the worker group this process belongs to; empty for a front end."""

    incarnation: int = -1
    """The incarnation of the group that this process belongs to; -1 if unknown."""

    log_format: str = "text"
    """``text`` or ``json``."""

    log_level: str = "INFO"
    """Lowest level that is written."""

    log_dir: str = ""
    """Folder of one log file a process; empty means stderr alone."""

    def to_environ(self) -> dict[str, str]:
        """The variables that make a child read back this object."""
        return {
            SUPERVISOR: self.supervisor,
            TOKEN: self.token,
            GROUP: self.group,
            LOG_FORMAT: self.log_format,
            LOG_LEVEL: self.log_level,
            **({LOG_DIR: self.log_dir} if self.log_dir else {}),
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> ChildEnv:
        """Read the variables of this process.

        Raises:
            ConfigError: the process was not started by a supervisor.
        """
        env = os.environ if environ is None else environ
        if SUPERVISOR not in env or TOKEN not in env:
            raise ConfigError(
                f"{SUPERVISOR} and {TOKEN} are not set: this program is started by "
                "`trimaran serve`, not by hand."
            )
        return cls(
            supervisor=env[SUPERVISOR],
            token=env[TOKEN],
            group=env.get(GROUP, ""),
            incarnation=int(env.get(INCARNATION, "-1")),
            log_format=env.get(LOG_FORMAT, "text"),
            log_level=env.get(LOG_LEVEL, "INFO"),
            log_dir=env.get(LOG_DIR, ""),
        )

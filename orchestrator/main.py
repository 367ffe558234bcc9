"""The ``trimaran-orchestrator`` process: an MPI singleton that spawns worker groups."""

from __future__ import annotations

from trimaran.comm import mpi  # isort: skip  # initialises MPI: nothing that can fail comes first

import logging
import os
import signal
import sys

from trimaran.comm.deadlines import Watchdog
from trimaran.comm.env import ChildEnv
from trimaran.comm.errors import ConfigError, PeerLostError
from trimaran.comm.log import setup_logging
from trimaran.comm.messages.supervisor_link import SupervisorLink
from trimaran.orchestrator.spawner import Spawner

logger = logging.getLogger(__name__)

EXIT_FAILURE, EXIT_CONFIG = 1, 2


def main() -> None:
    """Connect to the supervisor, obey its spawn commands, and end at its shutdown command."""
    # The supervisor drains first; a signal to the whole terminal group must not cut in.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    env = ChildEnv.from_environ()
    setup_logging(
        "orchestrator",
        log_format=env.log_format,
        level=env.log_level,
        directory=env.log_dir,
    )
    link, config = SupervisorLink.connect(env, "orchestrator")

    def on_hang() -> None:
        link.state("failed", "MPI's daemon does not answer (--hang-timeout)")
        os._exit(EXIT_FAILURE)

    code = 0
    try:
        mpi.require_threads()
        watchdog = Watchdog(config["hang_timeout_s"] or float("inf"), on_hang)
        Spawner(link, watchdog).run()
        link.close()
    except ConfigError as error:
        logger.error("%s", error)
        link.state("failed", str(error), is_config_error=True)
        code = EXIT_CONFIG
    except PeerLostError as error:
        logger.error("%s", error)
        link.state("failed", str(error))
        code = EXIT_FAILURE
    except Exception as error:
        logger.exception("the orchestrator failed")
        link.state("failed", f"{type(error).__name__}: {error}")
        code = EXIT_FAILURE
    # MPI_Finalize may crash or wait for ever once a group has been lost.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

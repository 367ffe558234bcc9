"""The ``trimaran-frontend`` process."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

import uvloop

from trimaran.comm.env import SUPERVISOR, TOKEN, ChildEnv
from trimaran.comm.errors import ConfigError
from trimaran.comm.log import setup_logging
from trimaran.comm.messages.supervisor_link import SupervisorLink
from trimaran.server.config import FrontendConfig
from trimaran.server.memory import return_large_blocks
from trimaran.server.stall_watch import dump_stacks_on_signal

if TYPE_CHECKING:
    from trimaran.server.frontend import Frontend

logger = logging.getLogger(__name__)

EXIT_FAILURE, EXIT_CONFIG = 1, 2

_YOUNG_OBJECTS = 10_000
"""New containers after which the collector looks for garbage. Requests leave none; some hundred
of them at once have more objects than Python's default, which collects in each round then."""


def main() -> None:
    """Connect to the supervisor, serve, and end at the supervisor's command."""
    # The supervisor drains; a signal to the whole terminal group must not end requests.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    dump_stacks_on_signal()
    return_large_blocks()
    code = EXIT_FAILURE
    frontend = _import()
    try:
        env = ChildEnv.from_environ()
        # Processes of this one, which run code of models, inherit what is left.
        for name in (SUPERVISOR, TOKEN):
            del os.environ[name]
        setup_logging(
            "frontend",
            rank=_index(env),
            log_format=env.log_format,
            level=env.log_level,
            directory=env.log_dir,
        )
        link, wire = SupervisorLink.connect(env, "frontend")
        code = _serve(frontend, link, wire)
        link.close()
    except ConfigError as error:
        print(f"trimaran-frontend: {error}", file=sys.stderr)
        code = EXIT_CONFIG
    # Threads of libraries must not delay the end of the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _index(env: ChildEnv) -> int | None:
    """The index of this front end, by the name of its group; None for the first one."""
    _, _, index = env.group.partition("-")
    return int(index) if index else None


def _import() -> type[Frontend]:
    """Import the server. The objects that imports make stay, so the garbage collector, which
    would take a fifth of the time, is off.
    """
    gc.disable()
    from trimaran.server.frontend import Frontend

    gc.freeze()
    gc.enable()
    return Frontend


def _serve(frontend: type[Frontend], link: SupervisorLink, wire: dict[str, object]) -> int:
    """Serve until the shutdown command; the exit code. Failures go to the supervisor."""
    try:
        config = FrontendConfig.from_wire(wire)
        uvloop.run(_run(frontend, config, link))
    except ConfigError as error:
        logger.error("%s", error)
        link.state("failed", str(error), is_config_error=True)
        return EXIT_CONFIG
    except Exception as error:
        logger.exception("the front end failed")
        link.state("failed", f"{type(error).__name__}: {error}")
        return EXIT_FAILURE
    return 0


async def _run(frontend: type[Frontend], config: FrontendConfig, link: SupervisorLink) -> None:
    # Objects made so far live as long as the process: exclude them from garbage collection.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
    await frontend(config, link).run()


if __name__ == "__main__":
    main()

"""A child of the supervisor without model or server: it only keeps the process contract.

What it does wrong, and when, comes from the environment variable TEST_BEHAVIOUR: words of
the form ``role:rank:incarnation:act``, where ``*`` stands for any value.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

if "--mpi" in sys.argv:
    from mpi4py import MPI

    RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
else:
    RANK, SIZE = int(os.environ.get("TEST_RANK", "0")), int(os.environ.get("TEST_SIZE", "1"))

from trimaran.comm.env import ChildEnv
from trimaran.comm.supervisor_link import SupervisorLink


def acts(role: str, incarnation: int) -> set[str]:
    """What this process is told to do wrong."""
    found = set()
    for word in os.environ.get("TEST_BEHAVIOUR", "").split():
        who, rank, when, act = word.split(":")
        if who == role and rank in ("*", str(RANK)) and when in ("*", str(incarnation)):
            found.add(act)
    return found


def misbehave_early(link: SupervisorLink, todo: set[str]) -> None:
    """Faults before readiness."""
    if "die-loading" in todo:
        os.kill(os.getpid(), signal.SIGKILL)
    if "exit-loading" in todo:
        os._exit(7)
    if "fail-loading" in todo:
        link.state("failed", "layer 3 is missing")
        os._exit(1)
    if "config-error" in todo:
        link.state("failed", "vocab_size is 7 but must be 8", is_config_error=True)
        os._exit(2)
    if "load-for-ever" in todo:
        time.sleep(600)


def serve(link: SupervisorLink, todo: set[str]) -> None:
    """Obey commands until shutdown."""
    while True:
        select.select([link.fileno()], [], [])
        for command in link.commands():
            if command.verb == "drain" and "drain-for-ever" not in todo:
                link.state("drained", facts={"num_unfinished": int("unfinished" in todo)})
            elif command.verb == "shutdown" and "ignore-shutdown" not in todo:
                link.close()
                return
            elif command.verb == "group_state":
                print("told", command.arguments["state"], file=sys.stderr, flush=True)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    role = sys.argv[1]
    if "never-connect" in acts(role, 0):
        time.sleep(600)
    link, config = SupervisorLink.connect(ChildEnv.from_environ(), role, RANK, SIZE)
    todo = acts(role, config.get("incarnation", 0))
    link.state("loading", "half way")
    misbehave_early(link, todo)
    if "grandchild" in todo and os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(600)
    link.state("ready")
    if "die-ready" in todo:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    serve(link, todo)


if __name__ == "__main__":
    main()

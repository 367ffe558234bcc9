"""A child of the supervisor without model or server, which only keeps the process contract.

The environment variable TEST_BEHAVIOUR sets its faults: words of the form
``role:rank:incarnation:act`` or ``role:rank:incarnation:act:group``, where ``*`` stands for any
value. A front end sends the requests in the lines of the file TEST_REQUESTS to the supervisor,
as lines are added, and prints the replies and the states of groups.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path

if "--mpi" in sys.argv:
    from mpi4py import MPI

    RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
else:
    RANK, SIZE = int(os.environ.get("TEST_RANK", "0")), int(os.environ.get("TEST_SIZE", "1"))

from trimaran.comm.env import ChildEnv
from trimaran.comm.messages.supervisor_link import SupervisorLink

POLL_S = 0.02


def acts(role: str, incarnation: int) -> set[str]:
    """The faults of this process."""
    found = set()
    for word in os.environ.get("TEST_BEHAVIOUR", "").split():
        who, rank, when, act, *group = word.split(":", 4)
        is_meant = who == role and rank in ("*", str(RANK)) and when in ("*", str(incarnation))
        if is_meant and group in ([], [ChildEnv.from_environ().group]):
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
        link.state(
            "failed", "vocab_size is 7 but must be 8. Build it again.", is_config_error=True
        )
        os._exit(2)
    if "load-for-ever" in todo:
        print(f"pid {os.getpid()} loads for ever", file=sys.stderr, flush=True)
        time.sleep(600)


class Requests:
    """The lines of TEST_REQUESTS: request id, verb and arguments, as one JSON list each."""

    def __init__(self, link: SupervisorLink) -> None:
        self._link = link
        self._path = Path(os.environ.get("TEST_REQUESTS", ""))
        self.are_expected = "TEST_REQUESTS" in os.environ and sys.argv[1] == "frontend"

    def send_new(self) -> None:
        """Send the requests that are not sent yet."""
        if not self.are_expected or not self._path.exists():
            return
        taken = self._path.with_suffix(".taken")
        self._path.rename(taken)
        for line in taken.read_text().splitlines():
            request_id, verb, arguments = json.loads(line)
            if verb == "start_groups":
                # An import by all children would take half of a child's start time.
                from tritonclient.grpc.model_config_pb2 import ModelConfig

                config = ModelConfig(name=arguments["model"], backend="python")
                arguments["config"] = config.SerializeToString()
            if verb == "save_state":
                arguments["state"] = arguments["state"].encode()
            self._link.request(request_id, verb, arguments)


def serve(link: SupervisorLink, todo: set[str]) -> None:
    """Obey commands until shutdown."""
    requests = Requests(link)
    while True:
        select.select([link.fileno()], [], [], POLL_S if requests.are_expected else None)
        requests.send_new()
        for command in link.commands():
            if command.verb == "drain" and "drain-for-ever" not in todo:
                facts = {f"num_{what}": int(what in todo) for what in ("unfinished", "lost")}
                link.state("drained", facts=facts)
            elif command.verb == "shutdown" and "ignore-shutdown" not in todo:
                print(f"{sys.argv[1]} leaves", file=sys.stderr, flush=True)
                link.close()
                return
            elif command.verb == "group_state":
                told = command.arguments
                # One write: the lines of several processes meet in one pipe.
                # Tests wait for the short line, and then read the long one.
                print(f"state {json.dumps(told)}", file=sys.stderr, flush=True)
                print(f"told {told['state']} {told['group']}", file=sys.stderr, flush=True)
            elif command.verb == "reply":
                print(f"reply {json.dumps(command.arguments)}", file=sys.stderr, flush=True)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    role = sys.argv[1]
    if "never-connect" in acts(role, 0):
        time.sleep(600)
    if "exit-early" in acts(role, 0):
        os._exit(7)
    link, config = SupervisorLink.connect(ChildEnv.from_environ(), role, RANK, SIZE)
    todo = acts(role, config.get("incarnation", 0))
    if config.get("saved_state"):
        print(f"saved state {config['saved_state'].decode()}", file=sys.stderr, flush=True)
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

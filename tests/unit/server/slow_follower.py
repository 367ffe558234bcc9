"""A second front end, played by the test, that follows the first front end slowly."""

import contextlib
import threading

from controlled_frontend import DEADLINE_S
from started_frontend import Peer
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.messages.messages import Answer, Ask
from trimaran.comm.transport.sockets import Address
from trimaran.server.metrics.metrics import Metrics


class Counted:
    """A model of the slow front end, as far as its requests are counted."""

    name, version, is_ready, is_decoupled = "postprocessing", "1", True, False
    config = ModelConfig(name=name)


def counts(num_requests):
    """The counts of a front end after this many requests."""
    metrics = Metrics()
    model = metrics.measure(Counted())
    for _ in range(num_requests):
        model.metrics.success(
            batch_size=1, executed_batch=1,
            total_ns=3000, input_ns=1000, queue_ns=1000, infer_ns=1000,
        )  # fmt: skip
    return metrics.own_counts([model.statistics.message()], 0)


class SlowFollower:
    """Receives every state at once, and serves a state only on command."""

    def __init__(self, stack, address):
        self._peer = Peer(stack.enter_context(Address.parse(address).connect(DEADLINE_S)))
        who = {"token": "secret", "index": 1, "legacy": {}}
        self._peer.send(Ask(ask_id=1, verb="join", arguments=who))
        self.was_asked_for = []
        self.was_asked_to_release = []
        self.may_serve = threading.Event()
        self.counts = counts(3)
        self._waiting = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self):
        """Leave."""
        self.may_serve.set()
        with contextlib.suppress(OSError):
            self._peer.close()
        self._thread.join()

    def serve(self):
        """End all its threads."""
        self.may_serve.set()
        for ask_id in self._waiting:
            self._peer.send(Answer(ask_id=ask_id))

    def _follow(self):
        while (message := self._peer.receive(Ask, Answer)) is not None:
            if isinstance(message, Answer):
                continue
            if message.verb == "serves":
                self.was_asked_for.append(message.arguments["name"])
            if message.verb == "release":
                self.was_asked_to_release += message.arguments["groups"]
            values = self.counts if message.verb == "counts" else {}
            if message.verb in ("heard", "counts") or self.may_serve.is_set():
                # The waiter may have ended with its test.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._peer.send(Answer(ask_id=message.ask_id, values=values))
            else:
                self._waiting.append(message.ask_id)

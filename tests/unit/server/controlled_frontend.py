"""A front end with a supervisor and engines that do what a test says, over real sockets."""

import contextlib
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from google.protobuf import json_format
from started_frontend import FACTS, Peer, StartedFrontend, one_token, write_repository

from trimaran.comm.messages.messages import (
    Cancel,
    ChildRequest,
    ChildState,
    Command,
    EngineHello,
    FinishReason,
    FrontendHello,
    Ping,
    Submit,
)
from trimaran.server.repository.config_pbtxt import read_config

DEADLINE_S = 60


class Engine:
    """Rank 0 of a group: the tokens of each request are ``first_id`` and the following ids.

    While `gate` is clear, a request gets its first token and no more.
    """

    def __init__(self, model, group, first_id):
        self.group = group
        self.gate = threading.Event()
        self.gate.set()
        self.num_submitted = 0
        self._hello = EngineHello(token="secret", model=model, group=group, facts=FACTS)
        self._first_id = first_id
        self._thread = None

    def dial(self, address):
        """Serve once the front end accepts; raises OSError if the front end ends first."""
        # A real engine loads so long that the front end already expects the engine.
        while not self._is_accepted(address, self._hello):
            self._peer.sock.close()
            time.sleep(0.05)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _is_accepted(self, address, hello):
        self._peer = Peer(address.connect(DEADLINE_S))
        try:
            self._peer.send(hello)
            answer = self._peer.receive(FrontendHello)
            if answer is None:
                raise ConnectionError("the front end has ended")
        except OSError:
            self._peer.sock.close()
            raise
        return answer.accepted

    def close(self):
        """End the connection, as a process that ends does."""
        if self._thread is None:
            return
        with contextlib.suppress(OSError):
            self._peer.close()
        self._thread.join()

    def _serve(self):
        with self._peer.sock, contextlib.suppress(OSError):
            while (message := self._peer.receive(Submit, Cancel, Ping)) is not None:
                if isinstance(message, Submit):
                    self.num_submitted += 1
                    work = threading.Thread(target=self._answer, args=(message,), daemon=True)
                    work.start()

    def _answer(self, submit):
        count = submit.sampling["max_tokens"]
        for index in range(count):
            if index == 1:
                self.gate.wait(DEADLINE_S)
            is_last = index == count - 1
            reason = FinishReason.LENGTH if is_last else FinishReason.NOT_FINISHED
            with contextlib.suppress(OSError):
                self._peer.send(one_token(submit, self._first_id + index, reason))


class Stream:
    """A streamed request, begun."""

    def __init__(self, connection, max_tokens):
        self._connection = connection
        body = {"text_input": "a", "max_tokens": max_tokens, "stream": True}
        connection.request("POST", "/v2/models/ensemble/generate_stream", json.dumps(body))
        self._answer = connection.getresponse()
        assert self._answer.status == 200

    def text(self):
        """All of the text, once the stream has ended."""
        events = self._answer.read().decode().split("\n\n")
        self._connection.close()
        documents = [json.loads(event.removeprefix("data: ")) for event in events if event]
        return "".join(document["text_output"] for document in documents)


class ControlledFrontend(StartedFrontend):
    """Answers the front end's requests as a supervisor would, in a thread of its own."""

    def __init__(
        self, stack, tmp_path, *, started=(), down=(), conflicts=None, held=(), **config
    ):
        """``started`` groups are up already; groups of ``down`` take some time to come up."""
        self.states = []
        self._timers = []
        self.start_method = "mpirun"
        self.stopped = []
        self.stop_takes_s = 0.0
        """Seconds in which groups that were told to end are still in the way of others."""
        self.saved = {}
        self.engines = {}
        self.started = []
        self.conflicts = dict(conflicts or {})
        """Group that has no place to the groups that are in its way."""
        self.refuses_late = False
        """Whether conflicts are answered only behind the end of what was in the way."""
        self._late = []
        self.refusals = {}
        """Group that is refused to the text."""
        self.failing = {}
        """Group that fails before it is ready to the text."""
        self.held = set(held)
        """Groups that are started and do not get ready until `release`."""
        self.may_answer = threading.Event()
        """Whether the requester of a group may be told that the group is started."""
        self.may_answer.set()
        defaults = {"model_control_mode": "explicit", "groups": {}}
        super().__init__(stack, tmp_path, **{**defaults, **config})
        stack.callback(self._close)
        self.scratch = tmp_path / "models"
        self._thread = threading.Thread(target=self._supervise, daemon=True)
        self._thread.start()
        for group in down:
            self._report(group, group, 1, "down")
        if started:
            self.wait_until(
                lambda: self.states and self.states[-1].text == "waiting for the engines"
            )
        for group in started:
            self._start_engine(group)

    def connect(self):
        """A connection for one HTTP request."""
        return http.client.HTTPConnection(self.url[7:], timeout=DEADLINE_S)

    def wait_ready(self):
        self.wait_until(lambda: any(state.state == "ready" for state in self.states))
        self.url = f"http://127.0.0.1:{self.http_port()}"

    def wait_until(self, condition):
        """Return once a condition holds; fail after a generous time."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.01)

    def files(self, name):
        """The folders of files of this name that came with loads, in order of their paths;
        files deleted meanwhile are left out.
        """
        walked = os.walk(self.scratch)
        return sorted(Path(folder, name) for folder, _, names in walked if name in names)

    def text(self):
        """The front end's log."""
        with open(self.log.name) as log:
            return log.read()

    def metrics(self):
        """The text of the metrics port."""
        url = f"http://127.0.0.1:{self._port('Metrics Service')}/metrics"
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            return answer.read().decode()

    def release(self, group):
        """Let a held group get ready."""
        self.held.discard(group)
        self._start_engine(group)

    # ---- as a client --------------------------------------------------------------------

    def call(self, method, path, value=None):
        """Status and body of a request; the body's JSON value if the body is JSON."""
        body = None if value is None else json.dumps(value).encode()
        request = urllib.request.Request(self.url + path, data=body, method=method)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                status, content = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, content = error.code, error.read()
        return status, json.loads(content) if content else None

    def load(self, name, **parameters):
        """Load over HTTP."""
        value = {"parameters": parameters} if parameters else None
        return self.call("POST", f"/v2/repository/models/{name}/load", value)

    def load_with_file(self, folder):
        """Load an unchanged model of the repository through a load request with its
        configuration and a file ``note``."""
        config = json_format.MessageToJson(read_config(folder / "config.pbtxt"))
        return self.load(folder.name, config=config, **{"file:1/note": "eA=="})

    def unload(self, name, **parameters):
        """Unload over HTTP."""
        value = {"parameters": parameters} if parameters else None
        return self.call("POST", f"/v2/repository/models/{name}/unload", value)

    def index(self):
        """State and reason of each model in the repository index."""
        _, entries = self.call("POST", "/v2/repository/index")
        return {e["name"]: (e.get("state"), e.get("reason")) for e in entries}

    def is_ready(self):
        """Whether the server reports readiness."""
        return self.call("GET", "/v2/health/ready")[0] == 200

    def tokenize(self, text="a b"):
        """Run the preprocessing model."""
        inputs = [
            {"name": "QUERY", "datatype": "BYTES", "shape": [1, 1], "data": [text]},
            {"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": [1, 1], "data": [1]},
        ]
        return self.call("POST", "/v2/models/preprocessing/infer", {"inputs": inputs})

    def num_succeeded(self, model):
        """Requests that the statistics count."""
        status, document = self.call("GET", f"/v2/models/{model}/stats")
        assert status == 200, document
        return document["model_stats"][0]["inference_stats"]["success"]["count"]

    def generate(self, max_tokens=3):
        """Status and body of a request for text."""
        body = {"text_input": "a", "max_tokens": max_tokens}
        return self.call("POST", "/v2/models/ensemble/generate", body)

    def stream(self, max_tokens=3):
        """A stream of text whose first token has arrived."""
        return Stream(self.connect(), max_tokens)

    # ---- as the supervisor --------------------------------------------------------------

    def _supervise(self):
        handlers = {
            "start_groups": self._start_groups,
            "stop_groups": self._stop_groups,
            "save_state": self._save_state,
        }
        with contextlib.suppress(OSError):
            while (message := self.supervisor.receive(ChildState, ChildRequest)) is not None:
                if isinstance(message, ChildState):
                    self.states.append(message)
                else:
                    handlers[message.verb](message.request_id, message.arguments)

    def _close(self):
        with contextlib.suppress(OSError):
            self.supervisor.close()
        self._thread.join()
        # Engines may be held up by a front end that does not take them any more.
        self.process.kill()
        for timer in self._timers:
            timer.cancel()
            timer.join()
        for engine in self.engines.values():
            engine.close()

    def _start_groups(self, request_id, arguments):
        model, generation = arguments["model"], arguments["generation"]
        group = model if generation == 1 else f"{model}@{generation}"
        in_the_way = [g for g in self.conflicts.get(group, ()) if g not in self.stopped]
        if in_the_way or group in self.refusals:
            text = self.refusals.get(group, f"no GPU is free for {group}")
            refusal = {"request_id": request_id, "error": text, "conflicts": in_the_way}
            if self.refuses_late and in_the_way:
                self._late.append(refusal)
            else:
                self._reply(**refusal)
            return
        self.started.append((group, arguments))
        self._report(group, model, generation, "starting")
        self.may_answer.wait(DEADLINE_S)
        self._reply(request_id, groups=[group])
        if group in self.failing:
            self._report(group, model, generation, "failed", self.failing[group])
        elif group not in self.held:
            # The front end has to take the answer first, as ranks take their time to load.
            self._timers.append(threading.Timer(0.1, self._start_engine_if_needed, [group]))
            self._timers[-1].start()

    def _start_engine_if_needed(self, group):
        with contextlib.suppress(OSError):
            # The test and its front end may have ended.
            self._start_engine(group)

    def _start_engine(self, group):
        model, _, generation = group.partition("@")
        first_id = 300 * int(generation or 1)
        # Set before the front end reports that it serves.
        self.engines[group] = Engine(model, group, first_id)
        self.engines[group].dial(self.engine_address)
        self._report(group, model, int(generation or 1), "up")

    def _stop_groups(self, request_id, arguments):
        if self.stop_takes_s:
            stop = threading.Timer(self.stop_takes_s, self._end_late, [request_id, arguments])
            self._timers.append(stop)
            stop.start()
        else:
            self._end_groups(request_id, arguments)

    def _end_late(self, request_id, arguments):
        with contextlib.suppress(OSError):
            # The test and its front end may have ended.
            self._end_groups(request_id, arguments)

    def _end_groups(self, request_id, arguments):
        for group in arguments["groups"]:
            if group in self.engines:
                self.engines.pop(group).close()
            self.stopped.append(group)
        self._reply(request_id)
        while self._late:
            self._reply(**self._late.pop())

    def _save_state(self, request_id, arguments):
        self.saved = arguments
        self._reply(request_id)

    def _reply(self, request_id, error="", groups=(), conflicts=()):
        arguments = {
            "request_id": request_id, "error": error, "groups": list(groups),
            "conflicts": list(conflicts),
        }  # fmt: skip
        self.supervisor.send(Command(verb="reply", arguments=arguments))

    def _report(self, group, model, generation, state, text=""):
        arguments = {
            "group": group, "model": model, "generation": generation, "state": state,
            "text": text, "start_method": self.start_method,
        }  # fmt: skip
        self.supervisor.send(Command(verb="group_state", arguments=arguments))


@contextlib.contextmanager
def starting_over(folder):
    """Starts successive front ends in explicit mode over one repository."""
    write_repository(folder / "repository")
    with contextlib.ExitStack() as stack:

        def start(**config):
            frontend = ControlledFrontend(stack, folder, **config)
            frontend.repository = folder / "repository"
            frontend.wait_ready()
            return frontend

        yield start


@contextlib.contextmanager
def with_nothing_loaded(folder, **config):
    """A front end in explicit mode, and the folder of its repository."""
    with starting_over(folder) as start:
        yield start(**config)

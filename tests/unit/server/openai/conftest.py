"""A front end with an OpenAI port, over an engine that writes what a test says."""

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack

import numpy as np
import openai
import pytest
from started_frontend import FILL, StartedFrontend, write_repository
from tokenizers import Tokenizer

from trimaran.comm.messages.messages import (
    Cancel,
    FinishReason,
    Ping,
    RequestFailed,
    StepOutput,
    Submit,
)
from trimaran.comm.messages.token_ids import unpack_ids
from trimaran.server.config import OpenAiConfig

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Engine:
    """Rank 0 of the only group: writes `text`, one token a step, then its end.

    While `gate` is clear, a request gets its first token and no more.
    """

    def __init__(self, peer, tokenizer):
        self._peer = peer
        self.tokenizer = tokenizer
        self._sending = threading.Lock()
        self.texts = {}
        """The answer of each sequence; other sequences have that of 0."""
        self.burst = 1
        self.gate = threading.Event()
        self.submits = []
        self.cancelled = set()
        self.reset()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def reset(self):
        self.texts = {0: " one two three"}
        self.burst = 1
        self.gate.set()
        self.submits.clear()
        self.cancelled.clear()
        self.refusal = ""
        """Why every request is refused; empty: none is."""

    @property
    def prompt(self):
        """The text of the last prompt."""
        ids = unpack_ids(self.submits[-1].prompt_ids).tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    @property
    def sampling(self):
        return self.submits[-1].sampling

    def _serve(self):
        with contextlib.suppress(OSError):
            while (message := self._peer.receive(Submit, Cancel, Ping)) is not None:
                if isinstance(message, Submit):
                    self.submits.append(message)
                    work = threading.Thread(target=self._answer, args=(message,), daemon=True)
                    work.start()
                elif isinstance(message, Cancel):
                    self.cancelled.update(message.request_ids)

    def _answer(self, submit):
        if self.refusal:
            failed = RequestFailed(
                request_id=submit.request_id, kind="INVALID_ARG", text=self.refusal
            )
            self._peer.send(failed)
            return
        text = self.texts.get(submit.sequence_index, self.texts[0])
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        most = submit.sampling.get("max_tokens", 16)
        reason = FinishReason.LENGTH if most < len(ids) else FinishReason.END_ID
        ids, start = ids[:most], 0
        while start < len(ids) or not ids:
            if start:
                self.gate.wait(60)
            if submit.request_id in self.cancelled:
                return
            step = ids[start : start + self.burst]
            start += len(step)
            self._send(submit, step, reason if start >= len(ids) else 0)
            if not ids:
                return

    def _send(self, submit, ids, reason):
        extras = {}
        if submit.sampling.get("return_log_probs"):
            extras["log_probs"] = [-0.5] * len(ids)
        if submit.sampling.get("return_generation_logits"):
            rows = np.zeros((len(ids), 4096), np.float32)
            for row, token in zip(rows, ids, strict=True):
                row[token], row[7] = 9.0, 8.0
            extras["generation_logits"] = [row.tobytes() for row in rows]
            extras["logits_dtype"] = "float32"
        if reason and submit.sampling.get("return_perf_metrics"):
            extras["figures"] = {"kv_cache_reused_blocks": 1}
        with self._sending, contextlib.suppress(OSError):
            self._peer.send(
                StepOutput(
                    step=1,
                    request_ids=np.array([submit.request_id], "<u8").tobytes(),
                    sequence_indices=np.array([0], "<u2").tobytes(),
                    num_tokens=np.array([len(ids)], "<u2").tobytes(),
                    finish_reasons=np.array([reason], "u1").tobytes(),
                    token_ids=np.array(ids, "<i4").tobytes(),
                    extras={0: extras} if extras else {},
                )
            )


class Served:
    """The port, its engine, and the ways to call it."""

    def __init__(self, frontend, engine):
        self.frontend = frontend
        self.engine = engine
        self.url = f"http://127.0.0.1:{frontend._port('OpenAI service')}"
        self._clients = {}
        self.client = self.with_key("none")

    def with_key(self, key):
        """A client that shows an API key."""
        if key not in self._clients:
            self._clients[key] = openai.OpenAI(
                base_url=f"{self.url}/v1", api_key=key, max_retries=0
            )
        return self._clients[key]

    def close(self):
        for client in self._clients.values():
            client.close()

    def chat(self, content="hi", **options):
        """A chat of one message, by the client of the package ``openai``."""
        messages = options.pop("messages", [{"role": "user", "content": content}])
        return self.client.chat.completions.create(
            model="ensemble", messages=messages, **options
        )

    def post(self, path, body):
        """Status and JSON of an answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.get(path, data)

    def get(self, path, data=None):
        try:
            with urllib.request.urlopen(f"{self.url}{path}", data, timeout=60) as answer:
                raw = answer.read()
                is_json = answer.headers.get_content_type() == "application/json"
                return answer.status, json.loads(raw) if is_json else raw.decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"{}")

    @staticmethod
    def until(condition):
        """Return once a condition holds."""
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)


@pytest.fixture(scope="session")
def start_served(tmp_path_factory):
    """Starts front ends with an OpenAI port; ``config`` is that of the front end."""
    with ExitStack() as stack:

        def start(fill=None, openai_config=None, **config):
            folder = tmp_path_factory.mktemp("openai")
            write_repository(folder / "repository")
            for name, old, new in fill or ():
                path = folder / "repository" / name / "config.pbtxt"
                text = path.read_text()
                assert old in text
                path.write_text(text.replace(old, new))
            options = {"port": 0, "address": "127.0.0.1", "chat_template": TEMPLATE}
            frontend = StartedFrontend(
                stack, folder, openai=OpenAiConfig(**{**options, **(openai_config or {})}),
                **config,
            )  # fmt: skip
            peer = frontend.dial_in(stack)
            frontend.supervisor.wait_for_state("ready")
            tokenizer = Tokenizer.from_file(str(FILL["tokenizer_dir"] / "tokenizer.json"))
            served = Served(frontend, Engine(peer, tokenizer))
            stack.callback(served.close)
            return served

        yield start


@pytest.fixture(scope="session")
def shared(start_served):
    return start_served()


@pytest.fixture
def served(shared):
    """A front end that tests share."""
    shared.engine.reset()
    return shared

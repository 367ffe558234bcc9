"""Work that takes long: slow chat templates, and long texts to tokenize during a drain."""

import http.client
import json
import threading
import time

import pytest

from trimaran.comm.messages.messages import Command
from trimaran.server.openai.chat_templates import (
    Chat,
    ChatTemplate,
    RenderedWithin,
    SlowTemplateError,
    render,
)

SLOW = (
    "{% for i in range(slow or 0) %}{% for j in range(2000) %}{% endfor %}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(90000) %}{{ i }}{% endfor %}",
        "{% for i in range(90000) %}{% if messages.x %}{% endif %}{% endfor %}",
        "{% for i in range(90000) %}{% if messages[0] %}{% endif %}{% endfor %}",
        "{% for i in range(90000) %}{% if range(1) %}{% endif %}{% endfor %}",
    ],
)
def test_a_rendering_ends_when_its_time_is_over(text):
    template, chat = ChatTemplate({"default": text}), Chat(messages=[{"role": "user"}])
    with RenderedWithin(0.0), pytest.raises(SlowTemplateError):
        render(template, chat, 1 << 20)
    render(template, chat, 1 << 20)


def test_the_time_of_a_rendering_is_what_it_computes():
    """Other processes of a busy host send no short chat to a helper process."""
    text = "{% for i in range(200) %}{{ messages[0].role }}{% endfor %}"
    template, chat = ChatTemplate({"default": text}), Chat(messages=[{"role": "user"}])
    with RenderedWithin(0.4):
        time.sleep(0.5)
        assert render(template, chat, 1 << 20) == "user" * 200


@pytest.fixture(scope="module")
def served(start_served):
    return start_served(openai_config={"chat_template": SLOW}, max_text_bytes=16 << 20)


def test_a_chat_whose_template_takes_long_is_rendered_in_a_helper_process(served):
    answer = served.chat("hello", extra_body={"chat_template_kwargs": {"slow": 20000}})
    assert answer.choices[0].message.content == " one two three"
    assert served.engine.prompt == "hello"


def test_a_drain_waits_for_a_text_that_is_tokenized(served):
    text = "a house " * (512 << 10)
    body = json.dumps({"model": "ensemble", "prompt": text}).encode()
    port = served.frontend._port("OpenAI service")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    connection.request("POST", "/tokenize", body)
    for _ in range(20):
        # The front end reads what has come, and admits the request, in between.
        assert served.get("/health/live")[0] == 200
    found = {}

    def read():
        answer = connection.getresponse()
        found["status"], found["answer"] = answer.status, json.loads(answer.read())

    reader = threading.Thread(target=read)
    reader.start()
    supervisor = served.frontend.supervisor
    supervisor.send(Command(verb="drain", arguments={"timeout_s": 100}))
    supervisor.wait_for_state("drained")
    reader.join(100)
    connection.close()
    assert found["status"] == 200
    assert found["answer"]["count"] == len(found["answer"]["tokens"]) > 1 << 20
    log = served.frontend.log
    log.seek(0)
    assert "Draining: 1 requests are running" in log.read()

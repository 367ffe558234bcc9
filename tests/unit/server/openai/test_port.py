"""What the port does beside chats: adapters, priorities, keys, restrictions and drains."""

import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest
from started_frontend import FILL

from trimaran.comm.messages.messages import Command
from trimaran.server.access.config import AccessConfig
from trimaran.server.access.restrictions import Restriction

KEY, CHAT_KEY = "operators-own-key", "a-key-for-chats-only"
LEVELS = ("tensorrt_llm", "dynamic_batching {", "dynamic_batching {\n  priority_levels: 3\n"
          "  default_priority_level: 2")  # fmt: skip


@pytest.fixture(scope="session")
def guarded(start_served, tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    for name in ("poems", "rhymes"):
        (folder / "adapters" / name).mkdir(parents=True)
    keys = folder / "keys"
    keys.write_text(f"operator all {KEY}\nchat inference,metadata {CHAT_KEY}\n")
    adapters = ("tensorrt_llm", '"${lora_prefetch_dir}"', f'"{folder / "adapters"}"')
    access = AccessConfig(
        api_keys=str(keys),
        openai_restrictions={"statistics": Restriction(header="metrics-key", value="v")},
    )
    return start_served(fill=[LEVELS, adapters], access=access)


@pytest.fixture
def served(guarded):
    guarded.engine.reset()
    return guarded


def ask(served, **options):
    options = {"model": "ensemble", "prompt": "a", **options}
    return served.with_key(CHAT_KEY).completions.create(**options)


def test_adapters_are_models(served):
    names = [model.id for model in served.with_key(CHAT_KEY).models.list()]
    assert names == ["ensemble", "tensorrt_llm_bls", "poems", "rhymes"]
    assert ask(served, model="poems").model == "poems"
    assert served.engine.submits[-1].adapter == {"name": "poems"}
    ask(served)
    assert served.engine.submits[-1].adapter is None


def test_a_tier_is_a_priority_level(served):
    found = {}
    for tier in ("priority", "default", "flex"):
        ask(served, extra_body={"service_tier": tier})
        found[tier] = served.engine.submits[-1].priority
    assert found == {"priority": -1, "default": -2, "flex": -3}


def test_a_key_opens_its_categories(served):
    with pytest.raises(openai.AuthenticationError) as caught:
        served.with_key("no-key-of-this-server").models.list()
    assert caught.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError):
        served.with_key(CHAT_KEY).post("/models/ensemble/load", cast_to=object)
    assert ask(served).choices[0].text == " one two three"


def test_a_restricted_api_needs_its_header(served):
    def metrics(**headers):
        headers = {"Authorization": f"Bearer {KEY}", **headers}
        request = urllib.request.Request(f"{served.url}/metrics", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, ""
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())["error"]["message"]

    assert metrics() == (403, "This API is restricted, expecting header 'metrics-key'")
    assert metrics(**{"metrics-key": "v"}) == (200, "")


def test_models_are_loaded_in_explicit_mode_alone(served):
    with pytest.raises(openai.APIStatusError, match="explicit"):
        served.with_key(KEY).post("/models/ensemble/load", cast_to=object)


def test_a_separator_puts_the_models_name_before_the_adapters(start_served, tmp_path):
    (tmp_path / "poems").mkdir()
    adapters = ("tensorrt_llm", '"${lora_prefetch_dir}"', f'"{tmp_path}"')
    config = {"lora_separator": "-lora-", "default_max_tokens": 2, "chat_template": ""}
    served = start_served(fill=[adapters], openai_config=config)
    names = [model.id for model in served.client.models.list()]
    assert names[2:] == ["ensemble-lora-poems", "tensorrt_llm_bls-lora-poems"]
    served.client.completions.create(model="ensemble-lora-poems", prompt="a")
    assert served.engine.submits[-1].adapter == {"name": "poems"}
    assert served.engine.sampling["max_tokens"] == 2
    with pytest.raises(openai.BadRequestError, match="--chat-template FILE"):
        served.chat()


def test_a_wrong_template_refuses_the_chats_of_its_model_until_its_file_is_mended(
    start_served, tmp_path
):
    for path in FILL["tokenizer_dir"].glob("*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    folders = str(FILL["tokenizer_dir"]), str(tmp_path)
    fill = [(name, *folders) for name in ("preprocessing", "postprocessing")]
    served = start_served(fill=fill, openai_config={"chat_template": ""})
    body = {"model": "ensemble", "messages": [{"role": "user", "content": "a"}]}
    status, answer = served.post("/v1/chat/completions", body)
    assert status == 503 and "the chat template is wrong" in answer["error"]["message"]
    # Templates of all models are read for each of these requests.
    assert served.post("/tokenize", {"model": "ensemble", "prompt": "a"})[0] == 200
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert served.post("/v1/chat/completions", body)[0] == 200


def test_a_drain_waits_for_a_stream(start_served):
    served = start_served()
    served.engine.gate.clear()
    with served.chat(stream=True) as stream:
        events = iter(stream)
        texts = [next(events).choices[0].delta.content for _ in range(2)]
        served.frontend.supervisor.send(Command(verb="drain", arguments={"timeout_s": 60}))
        log = Path(served.frontend.log.name)
        served.until(lambda: "Draining: 1 requests are running" in log.read_text())
        served.engine.gate.set()
        texts += [event.choices[0].delta.content or "" for event in events]
    assert "".join(texts) == " one two three"
    served.frontend.supervisor.wait_for_state("drained")

"""``/v1/completions`` and the other routes of the port, as clients call them."""

import http.client
import json
import urllib.parse
from contextlib import closing

import openai
import pytest
from openai.types import Completion

from trimaran.comm.messages.token_ids import unpack_ids


def complete(served, prompt="Once upon", **options):
    return served.client.completions.create(model="ensemble", prompt=prompt, **options)


def test_a_text_is_continued_by_sixteen_tokens_at_most(served):
    answer = complete(served)
    Completion.model_validate(answer.model_dump(), strict=True)
    assert answer.choices[0].text == " one two three"
    assert served.engine.prompt == "<s>Once upon"
    assert served.engine.sampling.get("max_tokens", 16) == 16


def test_prompts_are_texts_or_ids_one_or_several(served):
    ids = served.post("/tokenize", {"model": "ensemble", "prompt": "Once upon"})[1]["tokens"]
    complete(served, ids)
    assert served.engine.prompt == "<s>Once upon"
    served.engine.submits.clear()
    answer = complete(served, ["a", "b"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(served.engine.submits) == 4
    served.engine.submits.clear()
    complete(served, [ids, [5, 6, 7]])
    prompts = [unpack_ids(s.prompt_ids).tolist() for s in served.engine.submits]
    assert prompts == [ids, [5, 6, 7]]
    answer = complete(served, "a", echo=True)
    assert answer.choices[0].text == "a one two three"


def test_a_stream_of_completions_is_the_text(served):
    events = list(complete(served, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.text for event in events for c in event.choices) == " one two three"
    assert events[-1].usage.completion_tokens > 0


def test_log_probabilities_have_the_older_form(served):
    found = complete(served, logprobs=2).choices[0].logprobs
    assert "".join(found.tokens) == " one two three"
    assert found.token_logprobs == [-0.5] * len(found.tokens)
    assert found.text_offset[1] == len(found.tokens[0])
    assert all(len(top) == 2 for top in found.top_logprobs)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"stop": [1]}, "stop"),
    ],
)
def test_a_wrong_completion_is_refused_with_its_member(served, change, param):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(served, **{"prompt": "a", **change})
    assert caught.value.param == param


def test_a_completion_limits_the_draft_tokens_of_a_step(served):
    complete(served)
    complete(served, extra_body={"max_draft_tokens": 0})
    complete(served, extra_body={"max_draft_tokens": 3})
    assert [submit.max_draft_tokens for submit in served.engine.submits] == [None, 0, 3]
    with pytest.raises(openai.BadRequestError, match="'max_draft_tokens' is -1") as got:
        complete(served, extra_body={"max_draft_tokens": -1})
    assert got.value.param == "max_draft_tokens"


def test_a_text_that_is_not_utf_8_is_refused(served):
    for path, body in (
        ("/v1/completions", b'{"model": "ensemble", "prompt": "a\xff"}'),
        ("/v1/completions", b'{"model": "ensemble", "prompt": "a", "stop": "\xff"}'),
        ("/tokenize", b'{"model": "ensemble", "prompt": "a\xff"}'),
    ):
        status, answer = served.post(path, body)
        assert status == 400 and "not UTF-8 text" in answer["error"]["message"]


def test_models_are_listed_and_found(served):
    names = [model.id for model in served.client.models.list()]
    assert names == ["ensemble", "tensorrt_llm_bls"]
    assert served.client.models.retrieve("ensemble").max_model_len == 1024
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("gpt")


def test_the_bls_model_answers_as_the_ensemble_does(served):
    answer = served.client.completions.create(model="tensorrt_llm_bls", prompt="a")
    assert answer.choices[0].text == " one two three"


def test_texts_become_ids_and_ids_texts(served):
    body = {"model": "ensemble", "prompt": "Once upon", "return_token_strs": True}
    status, found = served.post("/tokenize", body)
    assert status == 200 and found["count"] == len(found["tokens"])
    assert "".join(found["token_strs"]) == "<s>Once upon"
    assert found["max_model_len"] == 1024
    body = {"model": "ensemble", "tokens": found["tokens"]}
    assert served.post("/detokenize", body) == (200, {"prompt": "<s>Once upon"})
    messages = [{"role": "user", "content": "a"}]
    status, chat = served.post("/tokenize", {"model": "ensemble", "messages": messages})
    text = served.post("/detokenize", {"model": "ensemble", "tokens": chat["tokens"]})
    assert text == (200, {"prompt": "<|user|>a\n<|assistant|>"})


def test_embeddings_are_refused_by_name(served):
    with pytest.raises(openai.APIStatusError, match="embeddings are not served") as caught:
        served.client.embeddings.create(model="ensemble", input="a")
    assert caught.value.status_code == 501


def test_the_port_tells_health_version_and_metrics(served):
    assert served.get("/health")[0] == served.get("/health/ready")[0] == 200
    assert "version" in served.get("/version")[1]
    before = _num_requests(served)
    served.chat()
    assert _num_requests(served) == before + 1
    assert served.get("/v1/nothing")[0] == 404
    assert served.get("/v1/chat/completions")[0] == 405


def _num_requests(served):
    lines = served.get("/metrics")[1].splitlines()
    (line,) = [
        line for line in lines if line.startswith('nv_inference_request_success{model="e')
    ]
    return float(line.split()[-1])


def test_long_prompts_are_read_in_a_process(served):
    answer = complete(served, ["c"] * 8, max_tokens=2)
    assert len(answer.choices) == 8
    status, found = served.post("/tokenize", {"model": "ensemble", "prompt": "word " * 20_000})
    assert status == 200 and found["count"] > 20_000


def test_a_body_over_the_limit_is_refused_by_its_announced_length(served):
    address = urllib.parse.urlsplit(served.url)
    with closing(http.client.HTTPConnection(address.hostname, address.port)) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Length", str((64 << 20) + 1))
        connection.endheaders()
        answer = connection.getresponse()
        error = json.loads(answer.read())["error"]
    assert (answer.status, error["code"]) == (413, "content_too_large")
    assert "--http-max-input-size" in error["message"]

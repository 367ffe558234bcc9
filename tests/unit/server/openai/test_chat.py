"""``/v1/chat/completions`` as the package ``openai`` calls it."""

import json
import socket
import urllib.request
from urllib.parse import urlsplit

import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
]


def test_a_chat_is_rendered_by_the_template_and_answered(served):
    answer = served.chat(messages=MESSAGES)
    assert served.engine.prompt == "<|system|>Be brief.\n<|user|>a\nb\n<|assistant|>"
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role) == (" one two three", "assistant")
    assert choice.finish_reason == "stop"
    assert answer.model == "ensemble" and answer.object == "chat.completion"
    num_input = len(served.engine.submits[-1].prompt_ids) // 4
    assert answer.usage.prompt_tokens == num_input
    assert answer.usage.total_tokens == num_input + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == min(32, num_input)
    ChatCompletion.model_validate(answer.model_dump(), strict=True)


def test_a_stream_has_the_text_of_the_answer_and_ends_with_its_usage(served):
    whole = served.chat()
    events = list(served.chat(stream=True, stream_options={"include_usage": True}))
    for event in events:
        ChatCompletionChunk.model_validate(event.model_dump(), strict=True)
    *chunks, last = events
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage == whole.usage
    assert len({event.id for event in events}) == 1


def test_each_token_reaches_the_client_before_the_next_is_written(served):
    served.engine.gate.clear()
    stream = iter(served.chat(stream=True))
    assert next(stream).choices[0].delta.role == "assistant"
    assert next(stream).choices[0].delta.content == " one"
    served.engine.gate.set()
    rest = [event.choices[0].delta.content or "" for event in stream]
    assert "".join(rest) == " two three"


def test_several_choices_come_under_their_indices(served):
    served.engine.texts = {0: " red", 1: " green", 2: " blue"}
    answer = served.chat(n=3)
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [" red", " green", " blue"]
    found = ["", "", ""]
    for event in served.chat(n=3, stream=True):
        for choice in event.choices:
            found[choice.index] += choice.delta.content or ""
    assert found == texts


def test_a_stop_word_ends_the_text_and_is_no_part_of_it(served):
    served.engine.texts = {0: " one two three four"}
    assert served.chat(stop=" three").choices[0].message.content == " one two"
    assert served.chat(stop=["x", "wo th"]).choices[0].message.content == " one t"
    events = served.chat(stop="two", stream=True)
    texts = [event.choices[0].delta.content or "" for event in events]
    assert "".join(texts) == " one "


def test_a_limit_on_tokens_ends_the_text_for_length(served):
    both = {"max_completion_tokens": 2, "max_tokens": 3}
    for limit in ({"max_tokens": 2}, {"max_completion_tokens": 2}, both):
        answer = served.chat(**limit)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 2
    served.chat()
    assert served.engine.sampling["max_tokens"] == 1024


def test_sampling_settings_reach_the_engine(served):
    served.chat(
        temperature=0.5, top_p=0.25, presence_penalty=0.5, frequency_penalty=-0.5, seed=7,
        logit_bias={"5": -100, "9": 1},
        extra_body={"top_k": 3, "min_p": 0.125, "min_tokens": 2},
    )  # fmt: skip
    sampling = served.engine.sampling
    expected = {
        "temperature": 0.5, "top_p": 0.25, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "seed": 7, "top_k": 3, "min_p": 0.125, "min_tokens": 2,
    }  # fmt: skip
    assert {name: sampling[name] for name in expected} == expected
    bias = np.frombuffer(sampling["embedding_bias"], "<f4")
    assert (bias[5], bias[9], np.count_nonzero(bias)) == (-100, 1, 2)


def test_without_a_seed_two_requests_draw_differently_from_the_whole_vocabulary(served):
    served.chat()
    first = served.engine.sampling
    served.chat()
    assert first["seed"] != served.engine.sampling["seed"]
    assert first["top_p"] == 1.0
    for greedy in ({"top_p": 0}, {"temperature": 0}, {"extra_body": {"top_k": 1}}):
        served.chat(**greedy)
        names = {"top_p", "top_k", "temperature", "seed"}
        assert not names & set(served.engine.sampling)


def test_log_probabilities_come_with_tokens_and_the_likeliest(served):
    answer = served.chat(logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert "".join(each.token for each in content) == answer.choices[0].message.content
    assert b"".join(bytes(each.bytes) for each in content) == b" one two three"
    assert all(each.logprob == -0.5 for each in content)
    first, second = content[0].top_logprobs
    assert first.token == content[0].token
    assert first.logprob - second.logprob == pytest.approx(1.0)
    events = served.chat(logprobs=True, top_logprobs=2, stream=True)
    streamed = [each for event in events for c in event.choices if c.logprobs
                for each in c.logprobs.content]  # fmt: skip
    assert streamed == content


def test_the_likeliest_tokens_of_a_long_answer_come_whole(served):
    served.engine.texts = {0: " one two three" * 100}
    answer = served.chat(logprobs=True, top_logprobs=20)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens >= 300
    assert all(each.top_logprobs[0].token == each.token for each in content)
    # The logits of a whole answer never lie at the front end together.
    assert served.engine.submits[-1].streaming
    served.chat(logprobs=True)
    assert not served.engine.submits[-1].streaming


@pytest.mark.parametrize(
    ("change", "text", "param"),
    [
        ({"messages": []}, "at least one message", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "only text is served", "messages[0].content[0]"),
        ({"temperature": 3}, "'temperature' is 3 but must be between 0 and 2", "temperature"),
        ({"top_logprobs": 2}, "needs 'logprobs'", "top_logprobs"),
        ({"n": 0}, "between 1 and 128", "n"),
        ({"colour": 1}, "Unrecognized request argument supplied: colour", "colour"),
        ({"verbosity": "low"}, "must be one of medium", "verbosity"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": None}}]}]},
         "calls of functions by name", "messages[0].tool_calls"),
        ({"stream_options": {"include_usage": True}}, "only allowed when", "stream_options"),
        ({"logit_bias": {"x": 1}}, "no token id", "logit_bias"),
        ({"logit_bias": {"4096": 1}}, "the vocabulary has 4096 ids", "logit_bias"),
        ({"service_tier": "priority"}, "no priority levels", "service_tier"),
        ({"chat_template": "x"}, "--chat-template", "chat_template"),
        ({"messages": [{"role": "user", "content": 5}]}, "string or a list",
         "messages[0].content"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_with_its_member(served, change, text, param):
    body = {"model": "ensemble", "messages": [{"role": "user", "content": "a"}], **change}
    status, answer = served.post("/v1/chat/completions", body)
    error = answer["error"]
    assert status == 400 and text in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert served.engine.submits == []


def test_errors_are_those_that_the_client_knows(served):
    with pytest.raises(openai.NotFoundError) as caught:
        served.client.chat.completions.create(model="gpt", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="OpenAI's routes serve ensembles"):
        served.client.chat.completions.create(model="preprocessing", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="exceeds maximum input length"):
        served.chat("word " * 2000)
    status, answer = served.post("/v1/chat/completions", b"{")
    assert status == 400 and "JSON" in answer["error"]["message"]


def test_a_client_that_leaves_cancels_its_request(served):
    served.engine.gate.clear()
    stream = served.chat(stream=True)
    next(iter(stream))
    stream.close()
    request_id = served.engine.submits[-1].request_id
    served.until(lambda: request_id in served.engine.cancelled)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/v1/completions", {"prompt": "hi", "n": 2}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stop": ["xyz"], "n": 2}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_a_client_that_leaves_cancels_its_request_before_the_next_step(
    served, path, given, stream
):
    # The engine makes no step meanwhile, and ends a cancelled request at its next step.
    served.engine.gate.clear()
    body = json.dumps({"model": "ensemble", "stream": stream, **given}).encode()
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port)) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        num_sequences = given.get("n", 1)
        served.until(lambda: len(served.engine.submits) == num_sequences)
        if stream:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    wanted = {submit.request_id for submit in served.engine.submits}
    served.until(lambda: wanted <= served.engine.cancelled)


def test_a_long_body_is_read_in_a_process_with_the_same_answer(served):
    messages = [{"role": "user", "content": "w"}] * 80
    padded = [{"role": "user", "content": "a", "name": "x" * 40_000}]
    for given in (messages, padded):
        body = {"model": "ensemble", "messages": given, "max_tokens": 3}
        status, answer = served.post("/v1/chat/completions", body)
        assert status == 200 and answer["usage"]["completion_tokens"] == 3
    body["temperature"] = -1
    status, answer = served.post("/v1/chat/completions", body)
    assert status == 400 and answer["error"]["param"] == "temperature"


def test_the_end_token_is_no_text_even_where_special_tokens_are(served):
    answer = served.chat(extra_body={"skip_special_tokens": False})
    assert answer.choices[0].message.content == " one two three"
    served.chat(extra_body={"ignore_eos": True})
    assert "end_id" not in served.engine.sampling


def test_the_last_message_can_be_continued(served):
    messages = [*MESSAGES, {"role": "assistant", "content": "The answer"}]
    served.chat(messages=messages, extra_body={"continue_final_message": True})
    assert served.engine.prompt.endswith("<|assistant|>The answer")


def test_events_are_server_sent_events_that_end_with_done(served):
    body = {"model": "ensemble", "messages": MESSAGES, "stream": True}
    request = urllib.request.Request(
        f"{served.url}/v1/chat/completions", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        *events, end = answer.read().decode().split("\n\n")
    assert end == "" and events[-1] == "data: [DONE]"
    assert all(json.loads(event[6:])["choices"] for event in events[:-1])


def test_another_tokenizers_folder_gives_the_chat_template(start_served, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }} and more")
    config = {"chat_template": "", "chat_tokenizer": str(tmp_path)}
    served = start_served(openai_config=config)
    served.chat("a word")
    assert served.engine.prompt.endswith("a word and more")

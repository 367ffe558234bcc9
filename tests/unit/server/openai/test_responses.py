"""``/v1/responses`` as the package ``openai`` calls it."""

import json

import openai
import pytest
from openai.types.responses import Response, ResponseErrorEvent, ResponseFailedEvent

from trimaran.comm.messages.messages import RequestFailed
from trimaran.server.openai.response_requests import MAX_REPEATED_LENGTH

PARAMETERS = {
    "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"],
}  # fmt: skip
TOOLS = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Köln"}}\n</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} <tool_call>{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "<|assistant|>{# </think> #}"
)


@pytest.fixture(scope="session")
def answering(start_served):
    return start_served(openai_config={"chat_template": TEMPLATE})


@pytest.fixture
def served(answering):
    answering.engine.reset()
    return answering


def respond(served, given="hi", text=None, **options):
    if text is not None:
        served.engine.texts = {0: text}
    return served.client.responses.create(model="ensemble", input=given, **options)


def test_an_input_is_answered_by_a_message(served):
    answer = respond(served, instructions="Be brief.", temperature=0, metadata={"a": "b"})
    Response.model_validate(answer.model_dump())
    assert served.engine.prompt == "<|system|>Be brief.<|user|>hi<|assistant|>"
    assert (answer.output_text, answer.status) == (" one two three", "completed")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.instructions, answer.metadata) == ("Be brief.", {"a": "b"})
    cut = respond(served, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in cut.output] == ["incomplete"]


def test_reasoning_text_and_calls_are_items_in_their_order(served):
    answer = respond(served, text=f"<think>Hm.</think>So.\n{CALL}", tools=TOOLS)
    reasoning, message, call = answer.output
    assert reasoning.content[0].text == "Hm."
    assert message.content[0].text == "So."
    assert (call.name, json.loads(call.arguments)) == ("weather", {"place": "Köln"})
    assert [item.status for item in answer.output] == ["completed"] * 3


@pytest.mark.parametrize("burst", [1, 100])
def test_the_events_of_a_stream_build_the_whole_answer(served, burst):
    served.engine.burst = burst
    text = f"<think>Hm.</think>So.\n{CALL}"
    events = list(respond(served, text=text, tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "completed"
    deltas = {}
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.type] = deltas.get(event.type, "") + event.delta
    arguments = deltas.pop("response.function_call_arguments.delta")
    assert json.loads(arguments) == {"place": "Köln"}
    assert deltas == {
        "response.reasoning_text.delta": "Hm.", "response.output_text.delta": "So.",
    }  # fmt: skip
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    whole = respond(served, tools=TOOLS)
    assert [item.type for item in whole.output] == [item.type for item in done]


LOG_PROBS = "message.output_text.logprobs"


@pytest.mark.parametrize("burst", [1, 3, 100])
def test_the_tokens_of_a_text_have_log_probabilities_and_reasoning_is_counted(served, burst):
    served.engine.burst = burst
    options = {"tools": TOOLS, "include": [LOG_PROBS], "top_logprobs": 2}
    text = f"<think>Hm, one two three.</think>Sô ist es.\n{CALL}"
    whole = respond(served, text=text, **options)
    Response.model_validate(whole.model_dump())
    message = next(item for item in whole.output if item.type == "message")
    told = message.content[0].logprobs
    assert b"".join(bytes(each.bytes) for each in told).decode().strip() == "Sô ist es."
    assert all(each.logprob == -0.5 and len(each.top_logprobs) == 2 for each in told)
    ids = served.engine.tokenizer.encode("Hm, one two three.", add_special_tokens=False).ids
    num_reasoning = whole.usage.output_tokens_details.reasoning_tokens
    assert abs(num_reasoning - len(ids) - len("<think>")) <= len("<think>")
    events = list(respond(served, stream=True, **options))
    done = events[-1].response
    streamed = next(item for item in done.output if item.type == "message")
    assert streamed.content[0].logprobs == told
    assert done.usage.output_tokens_details.reasoning_tokens == num_reasoning
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    tokens = [each.token for event in deltas for each in event.logprobs]
    assert tokens == [each.token for each in told]
    chat = served.chat()
    assert chat.usage.completion_tokens_details.reasoning_tokens == num_reasoning


def test_without_reasoning_no_tokens_of_reasoning_are_counted(served):
    answer = respond(served, text="So.", include=[LOG_PROBS])
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert [each.top_logprobs for each in answer.output[0].content[0].logprobs] == [[], []]


@pytest.mark.parametrize("burst", [1, 100])
def test_tokens_of_a_text_that_waits_for_the_end_of_a_literal_are_told(served, burst):
    served.engine.burst = burst
    text = "1 < 2 <tool_x."
    answer = respond(served, text=text, tools=TOOLS, include=[LOG_PROBS], stream=True)
    deltas = [event for event in answer if event.type == "response.output_text.delta"]
    tokens = [each.token for event in deltas for each in event.logprobs]
    assert "".join(tokens).strip() == text == "".join(event.delta for event in deltas)


def test_the_clients_own_accumulator_reads_a_stream(served):
    served.engine.texts = {0: "So."}
    with served.client.responses.stream(model="ensemble", input="hi") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "So."


def test_calls_and_their_results_go_back_into_the_chat(served):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "weather",
         "arguments": '{"place": "Köln"}'},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
    ]  # fmt: skip
    respond(served, items)
    expected = '<|user|>?<|assistant|>weather{"place": "Köln"}<|tool|>rain<|assistant|>'
    assert served.engine.prompt == expected


def test_what_an_answer_held_goes_back_as_one_message_with_its_reasoning(served):
    answer = respond(served, text=f"<think>Hm.</think>So.\n{CALL}\n{CALL}", tools=TOOLS)
    calls = [item for item in answer.output if item.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call.call_id,
         "output": [{"type": "input_text", "text": "rain"}]}
        for call in calls
    ]  # fmt: skip
    respond(served, [{"role": "user", "content": "?"}, *answer.output, *results])
    call = 'weather{"place": "Köln"}'
    assert served.engine.prompt == (
        f"<|user|>?<|assistant|>[Hm.]So.{call}{call}<|tool|>rain<|tool|>rain<|assistant|>"
    )
    text = {"role": "assistant", "content": "One."}
    respond(served, [text, text, {"role": "user", "content": "?"}])
    assert served.engine.prompt == "<|assistant|>One.<|assistant|>One.<|user|>?<|assistant|>"


def test_allowed_tools_leave_the_others_out(served):
    clock = {"type": "function", "name": "clock", "parameters": {}, "strict": False}
    choice = {"type": "allowed_tools", "mode": "required",
              "tools": [{"type": "function", "name": "weather"}]}  # fmt: skip
    respond(served, text=CALL, tools=[*TOOLS, clock], tool_choice=choice)
    assert "clock" not in served.engine.prompt + served.engine.sampling["guide"]


def test_a_required_call_and_a_json_answer_are_guided(served):
    choice = {"type": "function", "name": "weather"}
    respond(served, text=CALL, tools=TOOLS, tool_choice=choice)
    assert "weather" in served.engine.sampling["guide"]
    form = {"type": "json_schema", "name": "place", "schema": PARAMETERS}
    served.client.responses.create(model="ensemble", input="?", text={"format": form})
    assert '"place"' in served.engine.sampling["guide"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": []}, "input"),
        (
            {
                "instructions": "a",
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
                ],
            },
            "input[0].content[0]",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]},
            "input[0].tool_calls",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"extra_body": {"colour": 1}}, "colour"),
        # The answer repeats these.
        ({"metadata": {"a": "x" * MAX_REPEATED_LENGTH}}, "metadata"),
        ({"user": "x" * MAX_REPEATED_LENGTH}, "user"),
    ],
)
def test_a_wrong_response_is_refused_with_its_member(served, change, param):
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.responses.create(**{"model": "ensemble", "input": "hi", **change})
    assert caught.value.param == param


def test_a_stream_that_fails_ends_with_an_error_and_a_failed_response(served):
    served.engine.gate.clear()
    stream = served.client.responses.create(model="ensemble", input="hi", stream=True)
    events = []
    for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta":
            break
    request_id = served.engine.submits[-1].request_id
    failure = RequestFailed(request_id=request_id, kind="INTERNAL", text="the engine broke")
    served.engine._peer.send(failure)
    events += stream
    served.engine.gate.set()
    error, *done, failed = events[-5:]
    assert isinstance(error, ResponseErrorEvent)
    assert (error.type, error.code, error.param) == ("error", None, None)
    assert error.message.endswith("the engine broke")
    assert [event.type for event in done] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
    ]  # fmt: skip
    assert isinstance(failed, ResponseFailedEvent)
    ResponseFailedEvent.model_validate(failed.model_dump())
    assert failed.response.status == "failed"
    assert failed.response.error.code == "server_error"
    assert failed.response.error.message == error.message
    assert [event.sequence_number for event in events] == list(range(len(events)))

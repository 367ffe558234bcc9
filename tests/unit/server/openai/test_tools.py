"""Tools, reasoning and JSON answers of chats, as the package ``openai`` asks for them."""

import json

import openai
import pytest
import xgrammar
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from trimaran.server.openai.errors import ApiError
from trimaran.server.openai.fields import Fields
from trimaran.server.openai.tools import (
    MAX_GUIDE_LENGTH,
    OutputForm,
    ParserOptions,
    guide_of,
    read_tools,
)

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "As <tool_call>...</tool_call>\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if open %}<think>\n{% endif %}{% endif %}"
    "{# </think> #}"
)
PARAMETERS = {
    "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"],
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "clock"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Köln"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="session")
def with_tools(start_served):
    return start_served(openai_config={"chat_template": TEMPLATE})


@pytest.fixture
def served(with_tools):
    with_tools.engine.reset()
    return with_tools


def ask(served, text, **options):
    served.engine.texts = {0: text}
    return served.chat(**options)


def guide(served):
    sampling = served.engine.sampling
    return sampling.get("guide_type"), json.loads(sampling.get("guide") or "null")


def test_calls_come_as_tool_calls_of_the_message(served):
    answer = ask(served, f"Let me see.\n{CALL}\n{CLOCK}", tools=TOOLS)
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["weather", "clock"]
    assert json.loads(calls[0].function.arguments) == {"place": "Köln"}
    assert len({call.id for call in calls}) == 2
    assert '"name": "weather"' in served.engine.prompt
    assert guide(served) == (None, None)


@pytest.mark.parametrize("burst", [1, 3, 100])
def test_a_stream_has_the_calls_of_the_whole_answer(served, burst):
    served.engine.burst = burst
    text, found, names = "", ["", ""], []
    for event in ask(served, f"One.\n{CALL}\n{CLOCK}", tools=TOOLS, stream=True):
        ChatCompletionChunk.model_validate(event.model_dump(), strict=True)
        (choice,) = event.choices
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                names.append((call.index, call.function.name, bool(call.id)))
            found[call.index] += call.function.arguments or ""
    assert choice.finish_reason == "tool_calls"
    assert (text, names) == ("One.", [(0, "weather", True), (1, "clock", True)])
    assert [json.loads(each) for each in found] == [{"place": "Köln"}, {}]


def test_reasoning_is_told_apart_from_the_answer(served):
    answer = ask(served, "<think>\nHm.\n</think>\n\nYes.")
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "Hm.")
    answer = ask(
        served, "Hm.\n</think>\n\nYes.", extra_body={"chat_template_kwargs": {"open": 1}}
    )
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes.", "Hm.")
    events = list(ask(served, "<think>Hm.</think>Yes.", stream=True))
    deltas = [event.choices[0].delta for event in events]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert (reasoning, "".join(d.content or "" for d in deltas)) == ("Hm.", "Yes.")


def test_a_required_call_is_guided_and_any_reasoning_may_come_before(served):
    ask(served, CALL, tools=TOOLS, tool_choice="required")
    kind, tag = guide(served)
    assert kind == "structural_tag"
    reasoning, calls = tag["format"]["elements"]
    assert reasoning["type"] == "optional"
    assert json.dumps(calls).count('\\"name\\"') == 4
    named = {"type": "function", "function": {"name": "weather"}}
    answer = ask(served, CALL + CLOCK, tools=TOOLS, tool_choice=named)
    assert "clock" not in json.dumps(guide(served)[1])
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    answer = ask(served, CALL + CLOCK, tools=TOOLS, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_of_allowed_tools_leaves_the_others_out(served, mode):
    named = {"type": "function", "function": {"name": "clock"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
    answer = ask(served, CLOCK, tools=TOOLS, tool_choice=allowed)
    assert answer.choices[0].message.tool_calls[0].function.name == "clock"
    assert '"clock"' in served.engine.prompt and "weather" not in served.engine.prompt
    assert ("clock" in json.dumps(guide(served)[1])) == (mode == "required")
    for wrong in ([], [{"type": "function", "function": {"name": "no"}}]):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": wrong}}
        with pytest.raises(openai.BadRequestError) as caught:
            ask(served, CLOCK, tools=TOOLS, tool_choice=choice)
        assert caught.value.param == "tool_choice"


def test_with_no_choice_a_call_is_a_text_and_the_template_sees_no_tools(served):
    answer = ask(served, CALL, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content == CALL
    assert "weather" not in served.engine.prompt


def test_a_tools_result_goes_back_into_the_chat(served):
    calls = [{"id": "c1", "type": "function", "function": {
        "name": "weather", "arguments": '{"place": "Köln"}'}}]  # fmt: skip
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    ask(served, "Rain.", messages=messages, tools=TOOLS)
    expected = '<tool_call>{"name": "weather", "arguments": {"place": "Köln"}}</tool_call>'
    assert f"<|assistant|>{expected}<|tool|>rain" in served.engine.prompt


def test_a_json_answer_is_guided_by_its_schema(shared):
    shared.engine.reset()
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS}}
    ask(shared, '{"place": "x"}', response_format=form)
    assert guide(shared)[0] == "structural_tag"
    assert guide(shared)[1]["format"]["json_schema"] == PARAMETERS
    ask(shared, "{}", response_format={"type": "json_object"})
    assert guide(shared)[1]["format"]["json_schema"] == {"type": "object"}
    ask(shared, "x", response_format={"type": "text"})
    assert guide(shared) == (None, None)


def test_the_clients_own_parser_reads_a_json_answer(shared):
    from pydantic import BaseModel

    class Place(BaseModel):
        place: str

    shared.engine.reset()
    shared.engine.texts = {0: '{"place": "Köln"}'}
    answer = shared.client.chat.completions.parse(
        model="ensemble", messages=[{"role": "user", "content": "?"}], response_format=Place
    )
    assert answer.choices[0].message.parsed == Place(place="Köln")


def test_a_json_answer_or_calls_may_come_where_both_are_asked_for(served):
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS}}
    ask(served, CALL, tools=TOOLS, response_format=form)
    assert guide(served)[1]["format"]["elements"][1]["type"] == "or"


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        ("guided_decoding_guide is no structural_tag that can be followed: x",
         "'response_format' has no schema that can be followed: x"),
        ("guided_decoding_guide: 'minimum' of a JSON schema is 'a'. Leave it out.",
         "'response_format': 'minimum' of a JSON schema is 'a'. Leave it out."),
        ("guided_decoding_guide_type is 'structural_tag' but this model serves no guided "
         "decoding.", "'response_format' needs guided decoding but this model serves no "
         "guided decoding."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_guide_is_told_by_the_member_that_made_it(shared, refusal, told, stream):
    shared.engine.refusal = refusal
    form = {"name": "p", "schema": PARAMETERS}
    try:
        with pytest.raises(openai.BadRequestError) as caught:
            form_of_chat = {"type": "json_schema", "json_schema": form}
            shared.chat(response_format=form_of_chat, stream=stream)
        assert caught.value.body["message"].endswith(told)
        assert caught.value.param == "response_format"
        with pytest.raises(openai.BadRequestError) as caught:
            text = {"format": {"type": "json_schema", **form}}
            shared.client.responses.create(model="ensemble", input="hi", text=text)
        assert caught.value.body["message"].endswith(
            told.replace("response_format", "text.format")
        )
        assert caught.value.param == "text.format"
    finally:
        shared.engine.refusal = ""


def test_a_refused_call_names_the_tools_and_other_inputs_have_their_members(served):
    served.engine.refusal = "guided_decoding_guide has schemas more than 64 levels deep."
    with pytest.raises(openai.BadRequestError, match="'tools' has schemas") as caught:
        served.chat(tools=TOOLS, tool_choice="required")
    assert caught.value.param == "tools"
    served.engine.refusal = "embedding_bias has 5 values but must have 4096."
    with pytest.raises(openai.BadRequestError, match="'logit_bias' has 5 values") as caught:
        served.chat()
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]},
         "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {
            "name": "clock", "parameters": {"properties": ["hour"]}}}]},
         "tools[0].function.parameters"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
    ],
)  # fmt: skip
def test_wrong_tools_are_refused_with_their_member(served, change, param):
    with pytest.raises(openai.BadRequestError) as caught:
        served.chat(**change)
    assert caught.value.param == param


def test_a_model_whose_form_of_calls_is_not_known_takes_no_tools(shared):
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        shared.chat(tools=TOOLS)


HARMONY_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
)
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = f"{ANALYSIS}<|channel|>final<|message|>Yes."
MESSAGE_TO_WEATHER = (
    f"{ANALYSIS}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"place": "Köln"}'
)


@pytest.fixture(scope="session")
def with_harmony(start_served):
    return start_served(openai_config={"chat_template": HARMONY_TEMPLATE})


@pytest.fixture
def harmony(with_harmony):
    with_harmony.engine.reset()
    return with_harmony


def test_channels_of_harmony_are_read_with_and_without_tools(harmony):
    message = ask(harmony, FINAL).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
    message = ask(harmony, FINAL, tools=TOOLS).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
    answer = ask(harmony, MESSAGE_TO_WEATHER, tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather", {"place": "Köln"},
    )  # fmt: skip
    events = list(ask(harmony, MESSAGE_TO_WEATHER, tools=TOOLS, stream=True))
    calls = [call for e in events for call in e.choices[0].delta.tool_calls or ()]
    assert calls[0].function.name == "weather"
    arguments = "".join(call.function.arguments for call in calls)
    assert json.loads(arguments) == {"place": "Köln"}
    assert events[-1].choices[0].finish_reason == "tool_calls"


def test_an_answer_by_harmony_is_guided_on_its_channel(harmony):
    ask(harmony, FINAL, response_format={"type": "json_object"})
    reasoning, answer = guide(harmony)[1]["format"]["elements"]
    assert reasoning["type"] == "optional"
    assert answer["elements"][0]["value"] == "<|channel|>final<|message|>"
    ask(harmony, MESSAGE_TO_WEATHER, tools=TOOLS, tool_choice="required")
    text = json.dumps(guide(harmony)[1])
    assert "to=functions.weather" in text and "to=functions.clock" in text
    ask(harmony, FINAL, tools=TOOLS)
    assert guide(harmony) == (None, None)


def test_a_response_by_harmony_has_items_of_reasoning_and_of_calls(harmony):
    harmony.engine.texts = {0: MESSAGE_TO_WEATHER}
    tools = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
    answer = harmony.client.responses.create(model="ensemble", input="hi", tools=tools)
    assert [item.type for item in answer.output] == ["reasoning", "function_call"]
    assert json.loads(answer.output[1].arguments) == {"place": "Köln"}


KIMI_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    '<|open|>message role="{{ m.role }}"<|sep|>{{ m.content }}<|close|>message<|sep|>'
    "{% endfor %}"
    '<|open|>message role="assistant"<|sep|><|open|>'
    "{{ 'response' if thinking is false else 'think' }}<|sep|>"
)
KIMI_ANSWER = "<|open|>response<|sep|>Yes.<|close|>response<|sep|>"
KIMI_END = "<|close|>message<|sep|>"
KIMI_CALL = (
    "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="weather" index="1"<|sep|>'
    '<|open|>argument key="place" type="string"<|sep|>'
    "Köln<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
)


@pytest.fixture(scope="session")
def kimi(start_served):
    return start_served(openai_config={"chat_template": KIMI_TEMPLATE})


@pytest.mark.parametrize("stream", [False, True])
def test_elements_of_kimi_k3_are_read_with_and_without_tools(kimi, stream):
    def told(text, **options):
        answer = ask(kimi, text, stream=stream, **options)
        if not stream:
            message = answer.choices[0].message
            return message.reasoning_content, message.content, message.tool_calls
        deltas = [event.choices[0].delta for event in answer if event.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        reasoning = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
        return reasoning, "".join(delta.content or "" for delta in deltas) or None, calls

    thought = "Hm.<|close|>think<|sep|>"
    for options in ({}, {"tools": TOOLS}):
        text = thought + KIMI_ANSWER + KIMI_END
        assert told(text, **options)[:2] == ("Hm.", "Yes.")
    reasoning, content, calls = told(thought + KIMI_CALL + KIMI_END, tools=TOOLS)
    assert (reasoning, content, calls[0].function.name) == ("Hm.", None, "weather")
    arguments = "".join(call.function.arguments for call in calls)
    assert json.loads(arguments) == {"place": "Köln"}


def test_an_answer_by_kimi_k3_is_guided_within_its_frame_and_a_call_behind(kimi):
    vocabulary = ["</s>", *(chr(c) for c in range(32, 127)), "ö"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    without = {"extra_body": {"chat_template_kwargs": {"thinking": False}}}
    form = {"response_format": {"type": "json_object"}}
    must = {"tools": TOOLS, "tool_choice": "required"}
    answer = KIMI_ANSWER.replace("Yes.", "{}")
    for options, texts in (
        (form, [f"Hm.<|close|>think<|sep|>{answer}"]),
        ({**form, **without}, ["{}<|close|>response<|sep|>"]),
        (must, [f"Hm.<|close|>think<|sep|>{KIMI_CALL}"]),
        ({**must, **without}, [KIMI_CALL.removeprefix("<|open|>response<|sep|>")]),
    ):
        ask(kimi, "x", **options)
        compiled = compiler.compile_structural_tag(json.dumps(guide(kimi)[1]))
        for text in texts:
            matcher = xgrammar.GrammarMatcher(compiled)
            assert matcher.accept_string(text) and matcher.accept_token(0), text
        thought = "" if options.get("extra_body") else "Hm.<|close|>think<|sep|>"
        assert not xgrammar.GrammarMatcher(compiled).accept_string(f"{thought}Yes")


def test_schemas_whose_form_would_be_huge_are_refused_before_it_is_written():
    """A form with a schema for each argument repeats the definitions in each."""
    properties = {f"p{n}": {"$ref": "#/$defs/d0"} for n in range(2000)}
    definitions = {f"d{n}": {"type": "integer"} for n in range(2000)}
    tool = {"name": "f", "parameters": {"properties": properties, "$defs": definitions}}
    body = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    form = OutputForm(tool_format="kimi_k3")
    with pytest.raises(ApiError, match=f"more than {MAX_GUIDE_LENGTH} characters"):
        guide_of(form, read_tools(Fields(body)), ParserOptions(tool_format="kimi_k3"), None)

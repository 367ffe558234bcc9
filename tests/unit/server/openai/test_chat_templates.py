"""Chats are rendered as ``apply_chat_template`` of transformers renders them.

Run as a program with a folder, the comparison is made for every ``*.jinja`` file in the folder.
"""

import json
import sys
from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from trimaran.comm.errors import ConfigError
from trimaran.server.openai.chat_templates import (
    Chat,
    ChatTemplate,
    read_chat_template,
    render,
    takes_parts,
)
from trimaran.server.openai.errors import ApiError, ErrorFacts
from trimaran.server.openai.fields import Fields
from trimaran.server.openai.messages import read_messages
from trimaran.server.openai.requests import BodyTask, ChatModel, GenerationRequest, read_chat

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "The weather <of> a place",
    "parameters": {"type": "object", "properties": {
        "place": {"type": "string", "description": "größer"},
        "days": {"type": "integer", "enum": [1, 2]}}, "required": ["place"]}}}]  # fmt: skip
CALL = {"id": "call00001", "type": "function",
        "function": {"name": "weather", "arguments": {"place": "Köln", "days": 1}}}  # fmt: skip
USER = {"role": "user", "content": "What <is> & 'that'? "}
ASSISTANT = {"role": "assistant", "content": "  An answer.\n"}
CHATS = {
    "user": {"messages": [USER]},
    "turns": {"messages": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT, USER]},
    "no_prompt": {"messages": [USER, ASSISTANT], "add_generation_prompt": False},
    "tools": {"messages": [USER], "tools": TOOLS},
    "calls": {"messages": [
        USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "rain"},
        ASSISTANT, USER], "tools": TOOLS},
    "reasoning": {"messages": [USER, {**ASSISTANT, "reasoning_content": "Hm."}, USER],
                  "options": {"enable_thinking": False}},
    "thinking": {"messages": [USER, {**ASSISTANT, "reasoning": "Hm."}],
                 "add_generation_prompt": False, "options": {"enable_thinking": True}},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"},
                                                        {"type": "text", "text": "b"}]}]},
    "documents": {"messages": [USER], "documents": [{"title": "Köln", "text": "<rain>"}]},
    "continued": {"messages": [USER, {"role": "assistant", "content": "It is "}],
                  "add_generation_prompt": False, "continue_final_message": True},
}  # fmt: skip

TEMPLATES = {
    "markers": "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + "
    "message['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    "first system": "{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content %}{% set rest = messages[1:] %}{% else %}"
    "{% set system = '' %}{% set rest = messages %}"
    "{% endif %}{{ bos_token }}{% for m in rest %}{% if loop.first and system %}"
    "{{ '[' ~ system ~ '] ' }}{% endif %}{{ m.content | trim }}"
    "{{ eos_token if m.role == 'assistant' else ' ' }}{% endfor %}",
    "alternation": "{% for m in messages if m.role in ('user', 'assistant') %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}|{% endfor %}",
    "tools as json": "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n"
    "{{ tool.function.parameters | tojson(indent=2) }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "{{ m.content }}{% endfor %}",
    "arguments by item": "{% for m in messages %}{% if m.tool_calls is defined %}"
    "{% for call in m.tool_calls %}{% set f = call.function %}<f={{ f.name }}>"
    "{% for key, value in f.arguments.items() %}<p={{ key }}>"
    "{{ value if value is string else value | tojson }}</p>{% endfor %}</f>{% endfor %}"
    "{% endif %}{{ m.content }}{% endfor %}",
    "namespace": "{% set ns = namespace(last=-1, text='') %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if loop.index0 > ns.last and m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}"
    "{% endif %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m.content }};{% endfor %}",
    "documents": "{% for d in documents or [] %}{{ loop.index }}. {{ d.title }}: "
    "{{ d.text or d | tojson }}\n{% endfor %}{{ messages[-1].content }}",
    "macro": "{% macro show(m, mark='#') %}{{ mark }} {{ m.role | upper }}: {{ m.content }}\n"
    "{% endmacro %}{% for m in messages %}{{ show(m, mark='##' if loop.last else '#') }}"
    "{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}",
    "parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}<{{ part.text }}>{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}",
    "white space": "{%- for m in messages -%}\n    {%- if m.role == 'user' %}\n  u: "
    "{{ m.content }}\n    {% else %}\n  o: {{ m.content -}}\n    {% endif %}\n"
    "{%- endfor %}\n\n",
    "thinking": "{% for m in messages %}{{ m.thinking or '' }}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>"
    "{% endif %}",
    "filters": "{{ messages | map(attribute='role') | join(',') }} {{ messages | length }} "
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }} "
    "{{ messages[-1].content.split(' ')[0] | replace('<', '[') | default('x') | e }} "
    "{{ dict(a=1) | tojson(sort_keys=true) }} {{ messages[0].content[:3] }} {{ (1, 2)[0] }}",
    "date": "{{ strftime_now('%Y') }} {{ date_string or 'none' }}{{ messages[0]['content'] }}",
    "split of reasoning": "{% for m in messages %}{% set c = m.content %}"
    "{% if '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ c.strip() }}{% endfor %}",
    "refused": "{% for m in messages %}{{ m.missing.deeper }}{% endfor %}",
    "sandboxed": "{{ messages.append(1) }}{{ ''.__class__.__mro__ }}",
    "underscore": "{% set ns = namespace(_x=1) %}{{ messages }}",
}


def reference(text, chat):
    """The prompt that transformers makes; None where it refuses the chat."""
    values = {**chat}
    messages = json.loads(json.dumps(values.pop("messages")))
    options = values.pop("options", {})
    values.setdefault("add_generation_prompt", True)
    try:
        (rendered,), _ = render_jinja_template(
            [messages], chat_template=text, **values, **TOKENS, **options
        )
    except (TemplateError, TypeError, ValueError, AttributeError, KeyError):
        return None
    return rendered


def ours(text, chat):
    """Our prompt; None where the chat is refused."""
    copied = json.loads(json.dumps(chat))
    try:
        return render(ChatTemplate({"default": text}, TOKENS), Chat(**copied), 1 << 20)
    except ApiError:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_byte_for_byte_that_of_transformers(name):
    text = TEMPLATES[name]
    found = {chat: ours(text, CHATS[chat]) for chat in CHATS}
    assert found == {chat: reference(text, CHATS[chat]) for chat in CHATS}
    if name not in ("refused", "sandboxed", "underscore"):
        assert any(found.values())


def test_templates_are_found_in_the_files_of_a_tokenizer(tmp_path):
    assert read_chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "a{{ eos_token }}", "eos_token": "</s>"}))
    chat = Chat(messages=[USER])
    assert render(read_chat_template(tmp_path), chat, 9) == "a</s>"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert render(read_chat_template(tmp_path), chat, 9) == "d"
    assert render(read_chat_template(tmp_path), Chat(messages=[USER], tools=TOOLS), 9) == "t"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert render(read_chat_template(tmp_path), chat, 9) == "file"
    assert render(read_chat_template(tmp_path, "flag"), chat, 9) == "flag"


def test_a_prompt_longer_than_the_limit_is_refused_while_it_is_rendered():
    template = ChatTemplate({"default": "{% for i in range(99999) %}word {% endfor %}"})
    with pytest.raises(ApiError, match="longer than 1000 bytes"):
        render(template, Chat(messages=[USER]), 1000)
    loop = ChatTemplate({"default": "{% for i in range(1000000) %}{% endfor %}"})
    with pytest.raises(ApiError, match="Range too big"):
        render(loop, Chat(messages=[USER]), 1000)


def test_messages_have_the_form_that_templates_read():
    def read(*messages, takes_parts=False, knows_developer=False):
        fields = Fields({"messages": list(messages)})
        return read_messages(fields, takes_parts=takes_parts, knows_developer=knows_developer)

    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    assert read(parts)[0]["content"] == "a"
    assert read(parts, takes_parts=True)[0]["content"] == [{"type": "text", "text": "a"}]
    assert takes_parts(TEMPLATES["parts"]) and not takes_parts(TEMPLATES["markers"])
    developer = {"role": "developer", "content": "a"}
    assert read(developer)[0]["role"] == "system"
    assert read(developer, knows_developer=True)[0]["role"] == "developer"
    function = {"name": "weather", "arguments": '{"place": "Köln", "days": 1}'}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**CALL, "function": function}],
    }
    assert read(call)[0] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_no_reasoning_effort_switches_the_reasoning_of_a_template_off():
    text = "{% if enable_thinking is false %}off {% endif %}{{ reasoning_effort }}"
    models = {"m": ChatModel(ChatTemplate({"default": text}), 1 << 20)}
    for members, prompt in (
        ({"reasoning_effort": "none"}, "off none"),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
         "none"),
    ):  # fmt: skip
        body = {"model": "m", "messages": [USER], **members}
        assert read_chat(Fields(body), models).prompts == [prompt]


def test_values_that_are_nested_too_deeply_are_refused_at_any_depth():
    template = ChatTemplate({"default": "{{ value | tojson }}"})
    task = BodyTask(read_chat, 1 << 20, ({"m": ChatModel(template, 1 << 20)},))

    def read(depth):
        value = "[" * depth + "]" * depth
        body = '{"model": "m", "messages": [{"role": "user", "content": "a"}],'
        return task.read(f'{body} "chat_template_kwargs": {{"value": {value}}}}}'.encode())

    low, high = 1, 1 << 17
    while high - low > 1:
        middle = (low + high) // 2
        is_read = isinstance(read(middle), GenerationRequest)
        low, high = (middle, high) if is_read else (low, middle)
    found = [read(depth) for depth in range(low + 1, low + 50)]
    assert {type(each) for each in found} == {ErrorFacts}


def test_a_list_of_templates_without_names_is_refused_by_its_file(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": ["{{ messages }}"]}))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template must be"):
        read_chat_template(tmp_path)


def main(folder):
    """Compare every template of a folder."""
    num_equal, num_rendered, names = 0, 0, sorted(Path(folder).glob("*.jinja"))
    for path in names:
        text = path.read_text(encoding="utf-8")
        results = {c: (ours(text, CHATS[c]), reference(text, CHATS[c])) for c in CHATS}
        wrong = [chat for chat, (mine, theirs) in results.items() if mine != theirs]
        num_equal += not wrong
        num_rendered += sum(theirs is not None for _, theirs in results.values())
        for chat in wrong:
            print(f"{path.name} {chat}: {results[chat][0]!r} is not {results[chat][1]!r}")
    print(f"{num_equal} of {len(names)} templates equal, {num_rendered} prompts rendered")


if __name__ == "__main__":
    main(sys.argv[1])

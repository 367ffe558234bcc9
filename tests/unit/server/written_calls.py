"""Tool calls of each form as their models write them, and the tools that they call."""

import json

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": "array", "items": {"type": "string"}},
            "options": {"type": "object", "properties": {"exact": {"type": "boolean"}}},
        },
        "required": ["place", "days"],
    },
    "search": {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    },
}
TEXTS = [
    "Köln",
    'a "quoted" \\ back',
    "line\nbreak",
    "東京 🙂",
    "",
    "</tool_call>",
    "[{]}",
    "x, y=1",
]


def hermes(calls):
    each = (json.dumps({"name": n, "arguments": a}, ensure_ascii=False) for n, a in calls)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in each)


def longcat(calls):
    each = (json.dumps({"name": n, "arguments": a}, ensure_ascii=False) for n, a in calls)
    return "\n".join(f"<longcat_tool_call>\n{call}\n</longcat_tool_call>" for call in each)


def llama3(calls):
    each = (json.dumps({"name": n, "parameters": a}, ensure_ascii=False) for n, a in calls)
    return "; ".join(each)


def mistral(calls):
    each = [{"name": n, "arguments": a} for n, a in calls]
    return f"[TOOL_CALLS]{json.dumps(each, ensure_ascii=False)}"


def jamba(calls):
    return mistral(calls).replace("[TOOL_CALLS]", "<tool_calls>") + "</tool_calls>"


def granite(calls):
    return mistral(calls).replace("[TOOL_CALLS]", "<|tool_call|>")


def phi4_mini_json(calls):
    return mistral(calls).replace("[TOOL_CALLS]", "functools")


def pythonic(calls):
    each = (f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)
    return f"[{', '.join(each)}]"


def value(each):
    """A text as it is, and JSON of any other value."""
    return each if isinstance(each, str) else json.dumps(each, ensure_ascii=False)


def tagged(opening, closing):
    """Qwen3-Coder's tags between these literals."""

    def call(name, arguments):
        values = "".join(
            f"<parameter={k}>\n{value(v)}\n</parameter>\n" for k, v in arguments.items()
        )
        return f"{opening}\n<function={name}>\n{values}</function>\n{closing}"

    return lambda calls: "\n".join(call(*each) for each in calls)


def minimax_m2(calls):
    each = (
        f'<invoke name="{n}">\n'
        + "".join(f'<parameter name="{k}">{value(v)}</parameter>\n' for k, v in a.items())
        + "</invoke>\n"
        for n, a in calls
    )
    return f"<minimax:tool_call>\n{''.join(each)}</minimax:tool_call>"


def glm45(calls):
    each = (
        f"<tool_call>{n}\n"
        + "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{value(v)}</arg_value>\n" for k, v in a.items()
        )
        + "</tool_call>"
        for n, a in calls
    )
    return "\n".join(each)


def dsml(section):
    """DeepSeek's tags in a section of this name."""
    mark = "｜DSML｜"

    def parameter(key, each):
        is_text = json.dumps(isinstance(each, str))
        begin = f'<{mark}parameter name="{key}" string="{is_text}">'
        return f"{begin}{value(each)}</{mark}parameter>\n"

    def call(name, arguments):
        values = "".join(parameter(*each) for each in arguments.items())
        return f'<{mark}invoke name="{name}">\n{values}</{mark}invoke>\n'

    return lambda calls: (
        f"<{mark}{section}>\n{''.join(call(*each) for each in calls)}</{mark}{section}>"
    )


def kimi_k2(calls):
    each = (
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>"
        f"{json.dumps(a, ensure_ascii=False)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def gemma(opening, closing, quote):
    """Gemma's objects between these literals."""

    def written(each):
        if isinstance(each, str):
            return f"{quote}{each}{quote}"
        if isinstance(each, dict):
            return f"{{{','.join(f'{k}:{written(v)}' for k, v in each.items())}}}"
        if isinstance(each, list):
            return f"[{','.join(map(written, each))}]"
        return json.dumps(each)

    return lambda calls: "".join(f"{opening}call:{n}{written(a)}{closing}" for n, a in calls)


def deepseek_v3(calls):
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n"
        f"{json.dumps(a, ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{chr(10).join(each)}<｜tool▁calls▁end｜>"


def deepseek_v31(calls):
    each = (
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json.dumps(a, ensure_ascii=False)}"
        "<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


def harmony(calls):
    each = (
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>"
        f"{json.dumps(a, ensure_ascii=False)}"
        for n, a in calls
    )
    return "<|call|><|start|>assistant".join(each)


def kimi_k3(calls):
    names = {str: "string", bool: "boolean", type(None): "null", dict: "object", list: "array"}

    def argument(key, each):
        head = f'<|open|>argument key="{key}" type="{names.get(type(each), "number")}"<|sep|>'
        return f"{head}{value(each)}<|close|>argument<|sep|>"

    each = (
        f'<|open|>call tool="{n}" index="{i}"<|sep|>'
        f"{''.join(argument(*pair) for pair in a.items())}<|close|>call<|sep|>"
        for i, (n, a) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{''.join(each)}<|close|>tools<|sep|>"


def minimax_m3(calls):
    mark = "]<]minimax[>["

    def element(key, each):
        if isinstance(each, dict):
            content = "".join(element(*pair) for pair in each.items())
        elif isinstance(each, list):
            content = "".join(element("item", item) for item in each)
        else:
            content = value(each)
        return f"{mark}<{key}>{content}{mark}</{key}>"

    each = (
        f'{mark}<invoke name="{n}">{"".join(element(*pair) for pair in a.items())}'
        f"{mark}</invoke>\n"
        for n, a in calls
    )
    return f"{mark}<tool_call>\n{''.join(each)}{mark}</tool_call>"


def cohere(calls):
    each = [
        {"tool_call_id": str(i), "tool_name": n, "parameters": a}
        for i, (n, a) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{json.dumps(each, ensure_ascii=False)}<|END_ACTION|>"


def lfm2(calls):
    return f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>"


WRITE = {
    "hermes": hermes, "llama3": llama3, "mistral": mistral, "pythonic": pythonic,
    "deepseek_v3": deepseek_v3, "deepseek_v31": deepseek_v31, "harmony": harmony,
    "qwen3_coder": tagged("<tool_call>", "</tool_call>"), "minimax_m2": minimax_m2,
    "seed_oss": tagged("<seed:tool_call>", "</seed:tool_call>"), "glm45": glm45,
    "longcat": longcat, "kimi_k3": kimi_k3, "minimax_m3": minimax_m3, "cohere": cohere,
    "lfm2": lfm2,
    "deepseek_v32": dsml("function_calls"), "deepseek_v4": dsml("tool_calls"),
    "jamba": jamba, "granite": granite, "phi4_mini_json": phi4_mini_json,
    "kimi_k2": kimi_k2, "gemma4": gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": gemma("<start_function_call>", "<end_function_call>", "<escape>"),
}  # fmt: skip


PREFACE = "Let me see."
WRITE_PREFACE = {
    "harmony": f"<|channel|>commentary<|message|>{PREFACE}<|end|><|start|>assistant",
    "kimi_k3": f"<|open|>response<|sep|>{PREFACE}<|close|>response<|sep|>",
}
"""The text before calls, where a form does not write the text as it is."""


def random_calls(draw, name):
    """Some calls of the tools."""
    calls = []
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.3:
            calls.append(("search", {"query": draw.choice(TEXTS)}))
            continue
        arguments = {"place": draw.choice(TEXTS), "days": draw.randint(-5, 400)}
        if draw.random() < 0.5:
            arguments["units"] = draw.sample(TEXTS, 2)
        if draw.random() < 0.5:
            arguments["options"] = {
                "exact": draw.random() < 0.5,
                "deep": [{"a": None, "b": 1.5}],
            }
        calls.append(("get_weather", arguments))
    return calls

"""Flags of the OpenAI port, most of them by the names of Triton's own OpenAI front end."""

from __future__ import annotations

import argparse

from trimaran.comm.files.flag_values import count, port
from trimaran.launcher.flags.parser import FlagParser
from trimaran.server.openai.tool_formats import FORMATS


def add_openai_flags(parser: argparse.ArgumentParser) -> None:
    """Declare these flags; the short help has the port alone."""
    add = parser.add_argument
    add("--openai-port", type=port, metavar="P",
        help="OpenAI port: /v1/chat/completions and the like (closed)")  # fmt: skip
    add("--openai-address", metavar="ADDR", help="OpenAI's port listens here (HTTP's)")
    add("--openai-restricted-api", nargs=3, action="append", default=[],
        metavar=("API,...", "KEY", "VALUE"),
        help="requests of inference, model-repository, metrics or health need the header KEY: "
        "VALUE on the OpenAI port; may be given several times; VALUE may be env:NAME or "
        "file:PATH")  # fmt: skip
    add("--default-max-tokens", type=count, default=0, metavar="N",
        help="most tokens of an OpenAI request that sets no limit; 0: 16 of a completion, and "
        "of a chat as many as the engine has room for (%(default)s)")  # fmt: skip
    add("--lora-separator", default="", metavar="TEXT",
        help="OpenAI clients name an adapter MODEL, TEXT, ADAPTER in one word (ADAPTER "
        "alone)")  # fmt: skip
    add("--chat-template", default="", metavar="FILE",
        help="jinja2 template of chats in place of the templates of tokenizer_dir")  # fmt: skip
    add("--tool-call-parser", default="auto", choices=("auto", *FORMATS),
        help="form in which the model writes tool calls (auto: by the chat "
        "template)")  # fmt: skip
    add("--reasoning-parser", default="auto", choices=("auto", "think", "none"),
        help="think: outputs may begin with <think>...</think> (auto: by the chat "
        "template)")  # fmt: skip
    if isinstance(parser, FlagParser):
        # A separator may begin with a hyphen.
        parser.take_flags("--lora-separator")
        parser.hide(
            "openai_address", "openai_restricted_api", "default_max_tokens", "lora_separator",
            "chat_template", "tool_call_parser", "reasoning_parser",
        )  # fmt: skip

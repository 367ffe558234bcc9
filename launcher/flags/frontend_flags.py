"""Flags of a front end: limits on what clients may send, and the OpenAI port.

Most flags of the OpenAI port have the names of Triton's own OpenAI front end.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from trimaran.comm.files.flag_values import count, port, positive, size
from trimaran.launcher.flags.parser import FlagParser
from trimaran.server.openai.parsing.reasoning_formats import (
    OTHER_REASONING_NAMES,
    REASONING_FORMATS,
)
from trimaran.server.openai.parsing.tool_formats import FORMATS, OTHER_NAMES


class _Sets(argparse.Action):
    """Another name for these flags, or for several at once."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, sets: tuple[str, ...], **options: Any
    ) -> None:
        super().__init__(option_strings, dest, **options)
        self._sets = sets

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        for name in (self.dest, *self._sets):
            setattr(namespace, name, values)


def add_body_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the limits on bodies and messages."""
    add = parser.add_argument
    add(
        "--http-max-input-size",
        type=size,
        default=64 << 20,
        metavar="BYTES",
        help="limit on a request's body, compressed or not (%(default)s)",
    )
    add(
        "--http-max-pending-size",
        type=size,
        default=256 << 20,
        metavar="BYTES",
        help="limit on all bodies that wait to be decoded; more get status 503 (%(default)s)",
    )
    add(
        "--grpc-max-message-size",
        type=size,
        default=48 << 20,
        metavar="BYTES",
        help="limit on a message from a client, compressed or not (%(default)s)",
    )
    add(
        "--grpc-max-pending-size",
        type=size,
        default=256 << 20,
        metavar="BYTES",
        help="limit on all messages that wait to be decoded; more get UNAVAILABLE "
        "(%(default)s)",
    )


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the limits on texts and logits, and the processes that tokenize."""
    add = parser.add_argument
    add("--tokenizer-workers", type=positive, default=2, metavar="N",
        help="processes of a front end that tokenize long texts (%(default)s)")  # fmt: skip
    add("--max-text-bytes", type=size, default=0, metavar="BYTES",
        help="longest text that is tokenized (16 times the engine's --max-input-len, at least "
        "1048576)")  # fmt: skip
    add("--max-unread-logits-bytes", type=size, default=0, metavar="BYTES",
        help="limit on the logits that streams of a front end hold until clients read them; "
        "beyond the limit the stream that holds most is ended, and likewise the last of "
        "several unary answers (512 tokens of the largest vocabulary, at least "
        "16777216)")  # fmt: skip
    add("--out-of-vocabulary", choices=("refuse", "clamp"), default="refuse",
        help="prompt ids outside the vocabulary: refuse the request, or take the first or last "
        "id; input_lengths beyond the ids: refuse, or take all ids; and an end_id outside: "
        "refuse, or end no output by it; for benchmarks "
        "(%(default)s)")  # fmt: skip


def _tool_format(name: str) -> str:
    return OTHER_NAMES.get(name, name)


def _reasoning_format(name: str) -> str:
    return OTHER_REASONING_NAMES.get(name, name)


def add_openai_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the OpenAI port; the short help has the port alone."""
    add = parser.add_argument
    add("--openai-port", type=port, metavar="P",
        help="OpenAI port: /v1/chat/completions and the like (closed)")  # fmt: skip
    add("--openai-address", metavar="ADDR", help="OpenAI's port listens here (HTTP's)")
    addresses = ("http_address", "grpc_address", "openai_address")
    add("--host", action=_Sets, sets=addresses, metavar="ADDR",
        help="HTTP's, gRPC's and OpenAI's ports listen here")  # fmt: skip
    for name in ("http", "grpc"):
        add(f"--kserve-{name}-port", action=_Sets, sets=(f"{name}_port",), type=port,
            metavar="P", help=f"another name for --{name}-port")  # fmt: skip
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
    add("--tokenizer", default="", metavar="DIR",
        help="a tokenizer's folder, whose chat templates replace tokenizer_dir's")  # fmt: skip
    add("--tool-call-parser", default="auto", choices=("auto", *FORMATS), type=_tool_format,
        help="form in which the model writes tool calls, also by vLLM's and SGLang's names "
        "(auto: by the chat template)")  # fmt: skip
    add("--reasoning-parser", default="auto", type=_reasoning_format,
        choices=("auto", "none", *REASONING_FORMATS),
        help="form in which outputs begin with reasoning, also by vLLM's and SGLang's names; "
        "think: <think>...</think> (auto: by the chat template)")  # fmt: skip
    if isinstance(parser, FlagParser):
        # A separator may begin with a hyphen.
        parser.take_flags("--lora-separator")
        parser.hide(
            "openai_address", "openai_restricted_api", "default_max_tokens", "lora_separator",
            "host", "kserve_http_port", "kserve_grpc_port", "tokenizer", "chat_template",
            "tool_call_parser", "reasoning_parser",
        )  # fmt: skip

"""From the flags of the OpenAI port to its configuration."""

from __future__ import annotations

import argparse
from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import read_text, unreadable
from trimaran.server.config import OpenAiConfig

_FLAG = "--openai-restricted-api"
_CATEGORIES = {
    "inference": "inference",
    "model-repository": "metadata,model-repository",
    "metrics": "statistics",
    "health": "health",
}
"""The names of Triton's OpenAI front end, and the categories that hold its routes here."""

_NEEDS_PORT: tuple[tuple[str, object], ...] = (
    ("openai_address", ""), ("openai_restricted_api", []), ("default_max_tokens", 0),
    ("lora_separator", ""), ("chat_template", ""), ("tokenizer", ""),
    ("tool_call_parser", "auto"), ("reasoning_parser", "auto"),
)  # fmt: skip


def openai_config(args: argparse.Namespace) -> OpenAiConfig:
    """The OpenAI port and what it serves.

    Raises:
        ConfigError: flags without the port, or a template that cannot be read.
    """
    if args.openai_port is None:
        # `--host` is the address of the other ports too.
        given = {name: getattr(args, name) for name, _ in _NEEDS_PORT}
        if args.openai_address == args.host:
            given["openai_address"] = None
        for name, default in _NEEDS_PORT:
            if given[name] not in (None, default):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{flag} has no effect without the OpenAI port. Add --openai-port 9000, or "
                    "leave it out."
                )
    return OpenAiConfig(
        port=args.openai_port,
        address=args.openai_address or args.http_address or "0.0.0.0",
        default_max_tokens=args.default_max_tokens,
        lora_separator=args.lora_separator,
        chat_template=_template(args.chat_template),
        chat_tokenizer=_folder(args.tokenizer),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
    )


def openai_restrictions(args: argparse.Namespace) -> list[str]:
    """The restrictions of the OpenAI port, in the form of ``--http-restricted-api``.

    Raises:
        ConfigError: an unknown API.
    """
    settings = []
    for names, key, value in args.openai_restricted_api:
        for name in names.split(","):
            if name not in _CATEGORIES:
                raise ConfigError(
                    f"unknown restricted api '{name}'. {_FLAG} takes {', '.join(_CATEGORIES)}."
                )
        categories = ",".join(_CATEGORIES[name] for name in names.split(","))
        settings.append(f"{categories}:{key}={value}")
    return settings


def _template(path: str) -> str:
    if not path:
        return ""
    try:
        return read_text(Path(path))
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(f"--chat-template {path}", error) from error


def _folder(path: str) -> str:
    if path and not Path(path).is_dir():
        raise ConfigError(
            f"--tokenizer {path} is no folder: nothing is fetched by name. Give a "
            "tokenizer's folder, or leave the flag out for the chat templates of tokenizer_dir."
        )
    return str(Path(path).resolve()) if path else ""

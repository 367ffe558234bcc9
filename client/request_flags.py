"""Flags that the clients share, and their short help."""

from __future__ import annotations

import argparse
from argparse import _ArgumentGroup
from collections.abc import Callable


def hide(parser: argparse.ArgumentParser, *dests: str) -> None:
    """Omit these flags from the short help, if the parser has a longer one."""
    hide_flags: Callable[..., None] | None = getattr(parser, "hide", None)
    if hide_flags is not None:
        hide_flags(*dests)


DEFAULT_URLS = {"http": "localhost:8000", "grpc": "localhost:8001"}


def add_protocol(parser: argparse.ArgumentParser) -> None:
    """The protocol and the address, with defaults in `DEFAULT_URLS`."""
    parser.add_argument(
        "-i", "--protocol", choices=tuple(DEFAULT_URLS), default="http", help="(http)"
    )


def add_concurrency(parser: argparse.ArgumentParser) -> None:
    """The number of concurrent requests."""
    parser.add_argument(
        "-c", "--concurrency", type=int, default=128, metavar="N",
        help="requests in flight (128)",
    )  # fmt: skip


_DTYPES = ("float16", "float32", "bfloat16")


def add_sampling(
    group: _ArgumentGroup, *, top_k: int | None = None, top_p: float | None = None
) -> None:
    """Sampling flags. None is not sent, so that the server's default applies."""
    add = group.add_argument
    add("-n", "--num-return-sequences", type=int, metavar="N", help="answers to each prompt")
    add("-b", "--beam-width", type=int, default=1, metavar="N", help="beams of a search (1)")
    add("--temperature", type=float, default=1.0, metavar="T", help="divides the logits (1)")
    add(
        "--repetition-penalty", type=float, metavar="P",
        help="above 1: ids of prompt and output are less likely",
    )  # fmt: skip
    add(
        "--presence-penalty", type=float, metavar="P",
        help="subtracted from the logits of ids in the output",
    )  # fmt: skip
    add(
        "--frequency-penalty", type=float, metavar="P",
        help="subtracted once for each time that an id is in the output",
    )  # fmt: skip
    add("--top-k", type=int, default=top_k, metavar="K", help="draw from the K likeliest ids")
    add("--top-p", type=float, default=top_p, metavar="P", help="draw from ids of this mass")
    add(
        "--seed", "--random-seed", type=int, dest="seed", metavar="N",
        help="the same number draws the same ids",
    )  # fmt: skip


def add_outputs(group: _ArgumentGroup) -> None:
    """Flags of additional outputs."""
    add = group.add_argument
    add("--exclude-input-in-output", action="store_true", help="the answer lacks the prompt")
    add("--return-log-probs", action="store_true", help="ask for log-probabilities")
    add("--return-context-logits", action="store_true", help="ask for the prompt's logits")
    add("--return-generation-logits", action="store_true", help="ask for the output's logits")
    add(
        "--return-perf-metrics", action="store_true",
        help="ask for the figures of cache and times, and print them",
    )  # fmt: skip
    add(
        "--return-kv-cache-reuse-stats", action="store_true",
        help="the same, of models of versions 0.16 to 0.18",
    )  # fmt: skip


def add_adapters(group: _ArgumentGroup) -> None:
    """A LoRA adapter, sent or known to the server, and the dtype of sent weights."""
    add = group.add_argument
    add(
        "--lora-path", metavar="DIR",
        help="send the adapter of this folder (trimaran convert-lora)",
    )  # fmt: skip
    add("--lora-task-id", type=int, metavar="ID", help="the adapter's number")
    add("--lora-name", metavar="NAME", help="an adapter that the server has")
    add("--dtype", default="float16", choices=_DTYPES, help="of what is sent (float16)")

"""Flags of `trimaran serve` that limit what clients may send."""

from __future__ import annotations

import argparse

from trimaran.comm.files.flag_values import positive, size


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
        default=64 << 20,
        metavar="BYTES",
        help="limit on a message from a client, compressed or not (%(default)s)",
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
        "33554432)")  # fmt: skip
    add("--out-of-vocabulary", choices=("refuse", "clamp"), default="refuse",
        help="prompt ids outside the vocabulary: refuse the request, or take the first or last "
        "id; and input_lengths beyond the ids: refuse, or take all ids; for benchmarks "
        "(%(default)s)")  # fmt: skip

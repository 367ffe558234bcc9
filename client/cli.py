"""`trimaran client`: one request from the command line, at the token or the text level."""

from __future__ import annotations

import argparse

from trimaran.client import text_client, token_client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two clients, each with the flags of the script that it replaces."""
    clients = parser.add_subparsers(dest="level", required=True, metavar="token|text")
    text = clients.add_parser(
        "text",
        help="text to the ensemble or BLS model (end_to_end_grpc_client.py)",
        description="Send text to the ensemble or BLS model.",
        usage="trimaran client text -p TEXT [flags]",
        epilog="Example:\n  trimaran client text -p 'What is it?' -o 20 --streaming",
    )
    text_client.add_arguments(text)
    token = clients.add_parser(
        "token",
        help="ids to the token-level model (inflight_batcher_llm_client.py)",
        description="Send token ids, or a text made into ids here, to the token-level model.",
        usage="trimaran client token [flags]",
        epilog="Example:\n  trimaran client token --tokenizer-dir llama --text Hello",
    )
    token_client.add_arguments(token)


def run(args: argparse.Namespace) -> int:
    """Run the chosen client."""
    return text_client.run(args) if args.level == "text" else token_client.run(args)

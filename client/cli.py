"""`trimaran client`: requests from the command line, at the token or the text level."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from trimaran.client import pipeline_client, speculative_client, text_client, token_client

_CLIENTS: dict[str, Callable[[argparse.Namespace], int]] = {
    "text": text_client.run,
    "token": token_client.run,
    "pipeline": pipeline_client.run,
    "speculative": speculative_client.run,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The clients, each with the flags of the script that it replaces."""
    clients = parser.add_subparsers(dest="level", required=True, metavar="|".join(_CLIENTS))
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
    pipeline = clients.add_parser(
        "pipeline",
        help="a data set to the steps and to the text models, compared (end_to_end_test.py)",
        description="Send a data set to the steps and to the text models, and compare.",
        usage="trimaran client pipeline --dataset FILE [flags]",
        epilog="Example:\n  trimaran client pipeline --dataset data.json --max-input-len 500",
    )
    pipeline_client.add_arguments(pipeline)
    speculative = clients.add_parser(
        "speculative",
        help="texts with a draft model against plain texts (speculative_decoding_test.py)",
        description="Make texts with a draft model, and compare them with plain texts.",
        usage="trimaran client speculative --url-target HOST:PORT --dataset FILE [flags]",
        epilog="Example:\n  trimaran client speculative --url-target localhost:8001 -p Hello "
        "--draft-tensorrt-llm-model-name draft",
    )
    speculative_client.add_arguments(speculative)


def run(args: argparse.Namespace) -> int:
    """Run the chosen client."""
    return _CLIENTS[args.level](args)

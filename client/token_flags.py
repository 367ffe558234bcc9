"""The flags of `trimaran client token`, as in the client of Triton's TensorRT-LLM backend."""

from __future__ import annotations

import argparse

from trimaran.client.request_flags import add_adapters, add_outputs, add_sampling, hide
from trimaran.client.stream import add_channel_arguments, add_url_arguments
from trimaran.client.vocabulary import TYPES

DEFAULT_TEXT = "Born in north-east France, Soyer trained as a"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags."""
    add_url_arguments(parser)
    add_channel_arguments(parser)
    _add_prompt(parser)
    _add_sampling(parser)
    _add_run(parser)
    _add_adapters(parser)
    _add_outputs(parser)
    hide(
        parser, "ssl", "root_certificates", "private_key", "certificate_chain",
        "grpc_compression_algorithm", "stream_timeout", "tokenizer_type", "draft_tokens_csv",
        "num_return_sequences", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "lookahead_config", "prompt_embedding_table_path", "prompt_task_id",
        "prompt_table_extra_id", "vocab_size", "lora_path", "lora_task_id", "lora_name",
        "dtype", "return_log_probs", "return_context_logits", "return_generation_logits",
        "return_perf_metrics", "return_kv_cache_reuse_stats", "correctness_threshold",
        "beam_width", "verbose", "end_id",
        "pad_id",
    )  # fmt: skip


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt")
    group.add_argument(
        "--text", default=DEFAULT_TEXT, metavar="TEXT", help="prompt; needs --tokenizer-dir"
    )
    group.add_argument("--tokenizer-dir", default="", metavar="DIR", help="tokenizer folder")
    group.add_argument("--tokenizer-type", default="auto", choices=TYPES, help="all read alike")
    group.add_argument(
        "--input-tokens-csv", default="", metavar="FILE", help="prompt ids instead of --text"
    )
    group.add_argument(
        "--draft-tokens-csv", default="", metavar="FILE", help="draft ids to verify"
    )
    group.add_argument(
        "--output-tokens-csv",
        default="",
        metavar="FILE",
        help="ids that --check-output expects",
    )
    group.add_argument(
        "--end-id",
        type=int,
        default=-1,
        metavar="ID",
        help="where no tokenizer tells it (-1)",
    )
    group.add_argument(
        "--pad-id",
        type=int,
        default=50256,
        metavar="ID",
        help="where no tokenizer does (50256)",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--request-output-len",
        type=int,
        default=16,
        metavar="N",
        help="tokens to generate (16)",
    )
    add_sampling(group, top_k=1, top_p=0.0)
    group.add_argument("--lookahead_config", metavar="[W,N,G]", help="lookahead decoding")


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("request")
    group.add_argument(
        "--model-name",
        default="tensorrt_llm",
        metavar="NAME",
        help="token model (tensorrt_llm)",
    )
    group.add_argument(
        "--request-id",
        default="",
        metavar="ID",
        help="to stop it by; --stop-after-ms makes one",
    )
    group.add_argument("-S", "--streaming", action="store_true", help="a response a step")
    group.add_argument(
        "--stop-after-ms", type=int, default=0, metavar="MS", help="stop the request then"
    )
    group.add_argument(
        "--stop-via-request-cancel", action="store_true",
        help="stop by cancelling the call instead of a stop request",
    )  # fmt: skip


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("adapters and prompt tables")
    group.add_argument(
        "--prompt-embedding-table-path", metavar="FILE",
        help="a .npy file with the vectors of virtual ids",
    )  # fmt: skip
    group.add_argument(
        "--prompt-task-id", type=int, default=0, metavar="N", help="which table of the file (0)"
    )
    group.add_argument(
        "--prompt_table_extra_id", type=int, metavar="ID",
        help="names the table, so that equal prompts share cached blocks",
    )  # fmt: skip
    group.add_argument(
        "--vocab_size", type=int, metavar="N", help="ids from here on are virtual"
    )
    add_adapters(group)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("outputs")
    group.add_argument("-c", "--check-output", action="store_true", help="print PASS! or FAIL!")
    group.add_argument(
        "--correctness-threshold", type=float, default=1.0, metavar="RATE",
        help="share of equal ids that passes (1)",
    )  # fmt: skip
    add_outputs(group)
    group.add_argument(
        "--requested-outputs", nargs="+", default=[], metavar="NAME",
        help="ask for these outputs, and expect just these",
    )  # fmt: skip

"""The flags of `trimaran serve` on how an engine runs a step: graphs, sums and draft tokens."""

from __future__ import annotations

import argparse

from trimaran.comm.files.flag_values import count, positive
from trimaran.worker.config.speculation_config import DRAFTERS


def add_step_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    _add_graph_flags(parser)
    _add_draft_flags(parser)


def _add_graph_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--deterministic",
        action="store_true",
        help="equal tokens whatever else is in the batch",
    )
    add(
        "--prompt-graph-tokens",
        type=count,
        metavar="N",
        help="CUDA graphs also of steps with prompts, up to N tokens (1024 where they can be)",
    )
    add(
        "--collective-graphs",
        action=argparse.BooleanOptionalAction,
        help="CUDA graphs also of steps in which GPUs meet (where these are on one host)",
    )
    add(
        "--first-layer-table",
        action=argparse.BooleanOptionalAction,
        help="look up the first layer's queries, keys and values by token id (on a GPU of "
        "which that takes 2 %% or less)",
    )
    add(
        "--all-reduce",
        choices=("auto", "nccl", "peer", "fused"),
        default="auto",
        help="sums over GPUs: NCCL's, by reading peers' memory, or fused: so, and by the norms "
        "behind them in steps of few tokens (auto: what works and was found to be faster)",
    )
    add(
        "--adapter-graphs",
        action="store_true",
        help="CUDA graphs also of decode steps with LoRA adapters",
    )


def _add_draft_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--speculative-decoding",
        choices=DRAFTERS,
        help="source of draft tokens: draft_tokens: requests; the others: these, and ngram: "
        "repetitions in prompt and output; lookahead: n-grams of the model itself; mtp: the "
        "layer of the target's checkpoint; eagle, medusa, redrafter, draft_model: the network "
        "of --draft-model (the folder's, or none)",
    )
    add(
        "--draft-model",
        metavar="DIR",
        help="the heads' or the draft model's folder (heads: the engine folder's own)",
    )
    add(
        "--max-draft-tokens",
        type=positive,
        metavar="N",
        help="draft tokens of a sequence that a step verifies at most (the folder's, or 5)",
    )
    add(
        "--verify-all-drafts",
        action="store_true",
        help="verify drafts of ngram or of a network also where no time is saved by it",
    )

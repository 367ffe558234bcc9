"""The outputs that a request may ask for beside its ids or its text, as they are printed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from trimaran.client.tensors import Array

_LOG_PROBS = ("cum_log_probs", "output_log_probs")
_LOGITS = ("context_logits", "generation_logits")
_METRICS = (
    "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks",
    "arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns",
    "acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens",
)  # fmt: skip


def print_extra(args: argparse.Namespace, outputs: Mapping[str, Array]) -> None:
    """Print those of `request_flags.add_outputs` that were asked for and have come."""
    log_probs = _LOG_PROBS if args.return_log_probs else ()
    logits = [name for name in _LOGITS if getattr(args, f"return_{name}")]
    metrics = _METRICS if args.return_perf_metrics else ()
    for name in log_probs:
        if name in outputs:
            print(f"{name}: {outputs[name].tolist()}")
    for name in logits:
        if name in outputs:
            print(f"{name}.shape: {list(outputs[name].shape)}")
    for name in metrics:
        if name in outputs:
            print(f"{name}: {outputs[name].flat[0]}")

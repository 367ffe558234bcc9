"""Every parameter that a token-level model's config.pbtxt may carry, and what becomes of it."""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.server.model_parameters import ModelParameters

logger = logging.getLogger(__name__)


class Effect(Enum):
    """What setting a parameter does here."""

    SERVED = "takes effect"
    ACCEPTED = "accepted without effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Known:
    """One parameter: how it parses, the values it may have, and its effect."""

    kind: str
    effect: Effect = Effect.SERVED
    allowed: tuple[str, ...] = ()
    neutral: tuple[str, ...] = ()
    """Values of a refused parameter that ask for nothing."""
    reason: str = ""


def _served(kind: str, *allowed: str) -> Known:
    return Known(kind, allowed=allowed)


def _accepted(kind: str, reason: str) -> Known:
    return Known(kind, Effect.ACCEPTED, reason=reason)


def _refused(kind: str, reason: str, *neutral: str) -> Known:
    return Known(kind, Effect.REFUSED, neutral=neutral, reason=reason)


_TRT_ONLY = "it tunes TensorRT, which is not used here"
_NO_LORA = "LoRA is not served by this version"
_NO_DRAFT = "speculative decoding is not served by this version"
_NO_ENCODER = "encoder-decoder models are not served by this version"
_OBSOLETE = "it is obsolete; the engine folder and the flags of `trimaran serve` hold it"

# Set in every filled template: no news for an operator.
_USUAL = ("FORCE_CPU_ONLY_INPUT_TENSORS", "tokenizer_dir")

KNOWN: dict[str, Known] = {
    "gpt_model_type": _served(
        "str", "inflight_fused_batching", "inflight_batching", "V1", "v1"
    ),
    "gpt_model_path": _served("str"),
    "encoder_model_path": _refused("str", _NO_ENCODER),
    "FORCE_CPU_ONLY_INPUT_TENSORS": _accepted("str", "tensors always arrive on the CPU"),
    "exclude_input_in_output": _served("bool"),
    "cancellation_check_period_ms": _accepted("int", "cancellation is immediate"),
    "stats_check_period_ms": _served("int"),
    "recv_poll_period_ms": _accepted("int", "nothing polls"),
    "iter_stats_max_iterations": _accepted("int", "the metrics hold the last iteration"),
    "request_stats_max_iterations": _accepted("int", "the metrics hold the last iteration"),
    "normalize_log_probs": _accepted("bool", "log-probabilities are not length-normalised"),
    "gpu_device_ids": _served("str"),
    "participant_ids": _refused("str", "orchestrator mode is not served by this version"),
    "num_nodes": _refused("int", "orchestrator mode is not served by this version", "1"),
    "executor_worker_path": _accepted("str", "ranks are started by mpirun"),
    "gpu_weights_percent": _refused("float", "weights are not streamed", "1", "1.0"),
    "enable_trt_overlap": _accepted("str", "overlap is --depth of `trimaran serve`"),
    "max_num_sequences": _accepted("str", _OBSOLETE),
    "max_num_tokens": _accepted("str", _OBSOLETE),
    "tokenizer_type": _accepted("str", _OBSOLETE),
    "max_tokens_in_paged_kv_cache": _served("int"),
    "kv_cache_free_gpu_mem_fraction": _served("float"),
    "cross_kv_cache_fraction": _refused("float", _NO_ENCODER),
    "kv_cache_host_memory_bytes": _refused("int", "blocks are not offloaded to the host", "0"),
    "kv_cache_onboard_blocks": _accepted("bool", "blocks are not offloaded to the host"),
    "enable_kv_cache_reuse": _served("bool"),
    "max_attention_window_size": _refused("str", "sliding windows are not served"),
    "sink_token_length": _refused("int", "sink tokens are not served", "0"),
    "batch_scheduler_policy": _served(
        "str", "max_utilization", "guaranteed_no_evict", "guaranteed_completion", "static_batch"
    ),
    "enable_chunked_context": _served("bool"),
    "lora_cache_optimal_adapter_size": _accepted("int", _NO_LORA),
    "lora_cache_max_adapter_size": _accepted("int", _NO_LORA),
    "lora_cache_gpu_memory_fraction": _accepted("float", _NO_LORA),
    "lora_cache_host_memory_bytes": _accepted("int", _NO_LORA),
    "lora_prefetch_dir": _refused("str", _NO_LORA),
    "max_beam_width": _refused("int", "beam search is not served by this version", "1"),
    "decoding_mode": _refused(
        "str", "it asks for beam search or drafts, which are not served",
        "auto", "top_k", "top_p", "top_k_top_p",
    ),
    "lookahead_window_size": _refused("int", _NO_DRAFT),
    "lookahead_ngram_size": _refused("int", _NO_DRAFT),
    "lookahead_verification_set_size": _refused("int", _NO_DRAFT),
    "medusa_choices": _refused("str", _NO_DRAFT),
    "eagle_choices": _refused("str", _NO_DRAFT),
    "speculative_decoding_fast_logits": _refused(
        "bool", _NO_DRAFT, "False", "false", "FALSE", "0"
    ),
    "guided_decoding_backend": _refused("str", "guided decoding is not served"),
    "tokenizer_dir": _accepted("str", "it serves guided decoding only"),
    "xgrammar_tokenizer_info_path": _accepted("str", "it serves guided decoding only"),
    "enable_context_fmha_fp32_acc": _accepted("bool", _TRT_ONLY),
    "multi_block_mode": _accepted("bool", _TRT_ONLY),
    "cuda_graph_mode": _accepted("bool", _TRT_ONLY),
    "cuda_graph_cache_size": _accepted("int", _TRT_ONLY),
}  # fmt: skip


def check_token_parameters(path: Path, parameters: ModelParameters) -> None:
    """Check each set parameter; log what has no effect.

    Raises:
        ConfigError: a value does not parse, is not allowed, or asks for what is not
            served; the message names file, key, value and what is allowed.
    """
    if "worker_path" in parameters.names:
        raise ConfigError(f"{path}: 'worker_path' was renamed: use 'executor_worker_path'")
    for key in parameters.names:
        known = KNOWN.get(key)
        if known is None:
            _warn_unknown(path, key)
        elif parameters.get_str(key) is not None:
            _check_value(path, parameters, key, known)


def _check_value(path: Path, parameters: ModelParameters, key: str, known: Known) -> None:
    value = parameters.get_str(key)
    if known.kind == "bool":
        parameters.get_bool(key)
    elif known.kind == "int":
        parameters.get_int(key)
    elif known.kind == "float":
        parameters.get_float(key)
    if known.allowed and value not in known.allowed:
        if key == "gpt_model_type":
            raise ConfigError(
                f"{path}: Invalid gpt_model_type. Must be "
                f"v1/inflight_batching/inflight_fused_batching. It is {value!r}."
            )
        raise ConfigError(
            f"{path}: parameter '{key}' is {value!r} but must be one of "
            f"{', '.join(known.allowed)}"
        )
    if known.effect is Effect.REFUSED and value not in known.neutral:
        neutral = f" (or set it to {known.neutral[0]})" if known.neutral else ""
        raise ConfigError(
            f"{path}: parameter '{key}' is {value!r}, but {known.reason}. "
            f"Leave it unset{neutral}."
        )
    if known.effect is Effect.ACCEPTED and key not in _USUAL:
        logger.info(
            "%s: '%s' = %s is accepted without effect: %s", path, key, value, known.reason
        )


def _warn_unknown(path: Path, key: str) -> None:
    near = difflib.get_close_matches(key, KNOWN, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    logger.warning("%s: parameter '%s' is not known and is ignored%s", path, key, hint)

"""The known parameters of each role: served, without effect, or refused, and why."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.server.repository.config_pbtxt import ModelParameters

logger = logging.getLogger(__name__)


class Effect(Enum):
    """The effect of a parameter on Trimaran."""

    SERVED = "takes effect"
    ACCEPTED = "accepted without effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One parameter: how it parses, the values it may have, and its effect."""

    kind: str
    """``str``, ``int``, ``float``, ``bool`` or ``loose_bool``."""
    effect: Effect = Effect.SERVED
    allowed: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    neutral: tuple[str, ...] = ()
    """Values of a refused parameter that request nothing."""
    reason: str = ""
    takes_class: bool = False
    """Whether the import path of a class, ``package.module.Class``, is allowed too."""
    template_name: str = ""
    """The placeholder that fills a required parameter; empty if it may stay unset."""


def served(
    kind: str, *allowed: str, low: float | None = None, high: float | None = None
) -> Known:
    """A parameter that takes effect; it may be limited to some values or to a range."""
    return Known(kind=kind, allowed=allowed, low=low, high=high)


def named_or_class(*allowed: str) -> Known:
    """A parameter that takes effect: one of these names, or the import path of a class."""
    return Known(kind="str", allowed=allowed, takes_class=True)


def is_class_path(value: str) -> bool:
    """Whether a value has the form ``package.module.Class``; imports nothing."""
    return "." in value and all(word.isidentifier() for word in value.split("."))


def required(template_name: str) -> Known:
    """A text that must be set."""
    return Known(kind="str", template_name=template_name)


def accepted(kind: str, reason: str) -> Known:
    """A parameter without effect, which is logged when it is set."""
    return Known(kind=kind, effect=Effect.ACCEPTED, reason=reason)


def refused(kind: str, reason: str, *neutral: str, allowed: tuple[str, ...] = ()) -> Known:
    """A parameter of an unsupported feature, refused unless its value is neutral."""
    return Known(
        kind=kind, effect=Effect.REFUSED, neutral=neutral, reason=reason, allowed=allowed
    )


def check_parameters(
    path: Path, parameters: ModelParameters, table: Mapping[str, Known]
) -> None:
    """Check each parameter of a model; log those without effect, warn of unknown keys.

    Raises:
        ConfigError: a value does not parse, is not allowed, or requests an unsupported
            feature; the message names file, key, value and the allowed values.
    """
    for key in parameters.names:
        if key not in table:
            near = difflib.get_close_matches(key, table, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            logger.warning("%s: parameter '%s' is not known and is ignored%s", path, key, hint)
    for key, known in table.items():
        value = parameters.get_str(key)
        if value is not None:
            _check_value(path, parameters, key, known)
        elif known.template_name:
            raise ConfigError(
                f"{path}: parameter '{key}' is not set. Fill it: trimaran fill-template -i "
                f"{path} {known.template_name}:VALUE"
            )


def _check_value(path: Path, parameters: ModelParameters, key: str, known: Known) -> None:
    value = parameters.get_str(key)
    number = _parse(parameters, key, known.kind)
    is_class = known.takes_class and is_class_path(value or "")
    if known.allowed and value not in known.allowed and not is_class:
        or_class = " or the import path of a class (package.module.Class)"
        raise ConfigError(
            f"{path}: {_documented(key)}parameter '{key}' is {value!r} but must be one of "
            f"{', '.join(known.allowed)}{or_class if known.takes_class else ''}"
        )
    _check_range(path, key, number, known)
    if known.effect is Effect.REFUSED and value not in known.neutral:
        neutral = f" (or set it to {known.neutral[0]})" if known.neutral else ""
        raise ConfigError(
            f"{path}: parameter '{key}' is {value!r}, but {known.reason}. "
            f"Leave it unset{neutral}."
        )
    if known.effect is Effect.ACCEPTED and known.reason:
        logger.info(
            "%s: '%s' = %s is accepted without effect: %s", path, key, value, known.reason
        )


def _parse(parameters: ModelParameters, key: str, kind: str) -> float | None:
    """The value if it is a number; a value that does not parse is refused."""
    if kind == "int":
        return parameters.get_int(key)
    if kind == "float":
        return parameters.get_float(key)
    if kind == "bool":
        parameters.get_bool(key)
    elif kind == "loose_bool":
        parameters.get_loose_bool(key)
    return None


def _check_range(path: Path, key: str, number: float | None, known: Known) -> None:
    if number is None:
        return
    # Written so that NaN, which compares as neither above nor below, is refused too.
    is_low = known.low is not None and not number >= known.low
    is_high = known.high is not None and not number <= known.high
    if is_low or is_high:
        bounds = f"at least {known.low:g}" if known.low is not None else ""
        if known.high is not None:
            bounds += f"{' and ' if bounds else ''}at most {known.high:g}"
        raise ConfigError(f"{path}: parameter '{key}' is {number:g} but must be {bounds}")


def _documented(key: str) -> str:
    """The text of Triton's TensorRT-LLM backend that tools look for in the log."""
    if key != "gpt_model_type":
        return ""
    return "Invalid gpt_model_type. Must be v1/inflight_batching/inflight_fused_batching. The "


_NO_IMAGES = "multimodal models are not served by this version"

PREPROCESSING_PARAMETERS: dict[str, Known] = {
    "tokenizer_dir": required("tokenizer_dir"),
    "tokenizer_type": accepted("str", "the tokenizer folder says what it is"),
    "add_special_tokens": served("loose_bool"),
    "multimodal_model_path": refused("str", _NO_IMAGES),
    "visual_model_path": refused("str", _NO_IMAGES),
    "gpt_model_path": accepted("str", "only multimodal models need it"),
    "max_num_images": accepted("str", "only multimodal models need it"),
}

POSTPROCESSING_PARAMETERS: dict[str, Known] = {
    "tokenizer_dir": required("tokenizer_dir"),
    "tokenizer_type": accepted("str", "the tokenizer folder says what it is"),
    "skip_special_tokens": served("loose_bool"),
}

BLS_PARAMETERS: dict[str, Known] = {
    "accumulate_tokens": served("loose_bool"),
    "tensorrt_llm_model_name": served("str"),
    "tensorrt_llm_draft_model_name": served("str"),
    "multimodal_encoders_name": refused("str", _NO_IMAGES),
}


_TRT_ONLY = "it tunes TensorRT, which is not used here"
_NO_ENCODER = "encoder-decoder models are not served by this version"
_NO_DISAGGREGATION = "disaggregated serving is not served by this version"
_OBSOLETE = "it is obsolete; the engine folder and the flags of `trimaran serve` hold it"

TOKEN_PARAMETERS: dict[str, Known] = {
    "gpt_model_type": served(
        "str", "inflight_fused_batching", "inflight_batching", "V1", "v1"
    ),
    "context_model_name": refused("str", _NO_DISAGGREGATION),
    "generation_model_name": refused("str", _NO_DISAGGREGATION),
    "gpt_model_path": served("str"),
    "engine_dir": served("str"),
    "encoder_model_path": refused("str", _NO_ENCODER),
    "FORCE_CPU_ONLY_INPUT_TENSORS": accepted("str", ""),
    "exclude_input_in_output": served("bool"),
    "cancellation_check_period_ms": accepted("int", "cancellation is immediate"),
    "stats_check_period_ms": served("int", low=1),
    "recv_poll_period_ms": accepted("int", "nothing polls"),
    "iter_stats_max_iterations": accepted("int", "the metrics hold the last iteration"),
    "request_stats_max_iterations": accepted("int", "the metrics hold the last iteration"),
    "normalize_log_probs": served("bool"),
    "gpu_device_ids": served("str"),
    "participant_ids": served("str"),
    "num_nodes": served("int", low=1),
    "worker_path": accepted("str", "ranks run the program trimaran-rank"),
    "executor_worker_path": accepted("str", "ranks run the program trimaran-rank"),
    "gpu_weights_percent": refused("float", "weights are not streamed", "1", "1.0"),
    "enable_trt_overlap": served("bool"),
    "enable_overlap_scheduler": served("bool"),
    "disable_overlap_scheduler": served("bool"),
    "max_num_sequences": served("int", low=1),
    "max_num_tokens": accepted("str", _OBSOLETE),
    "tokenizer_type": accepted("str", _OBSOLETE),
    "max_tokens_in_paged_kv_cache": served("int", low=1),
    "kv_cache_free_gpu_mem_fraction": served("float"),
    "cross_kv_cache_fraction": refused("float", _NO_ENCODER),
    "kv_cache_host_memory_bytes": served("int", low=0),
    "kv_cache_onboard_blocks": served("bool"),
    "enable_kv_cache_reuse": served("bool"),
    "max_attention_window_size": served("str"),
    "max_kv_cache_length": served("str"),
    "sink_token_length": served("int", low=0),
    "batch_scheduler_policy": named_or_class(
        "max_utilization", "guaranteed_no_evict", "guaranteed_completion", "static_batch"
    ),
    "enable_chunked_context": served("bool"),
    "lora_cache_optimal_adapter_size": accepted(
        "int", "an adapter takes what it needs: its cache has no pages"
    ),
    "lora_cache_max_adapter_size": served("int", low=1),
    "lora_cache_gpu_memory_fraction": served("float", low=0, high=1),
    "lora_cache_host_memory_bytes": served("int", low=0),
    "lora_prefetch_dir": served("str"),
    "max_beam_width": served("int", low=1),
    "decoding_mode": served(
        "str", "auto", "top_k", "top_p", "top_k_top_p", "beam_search", "medusa", "redrafter",
        "lookahead", "eagle",
    ),
    "lookahead_window_size": served("int", low=1),
    "lookahead_ngram_size": served("int", low=2),
    "lookahead_verification_set_size": served("int", low=1),
    "medusa_choices": served("str"),
    "eagle_choices": served("str"),
    "speculative_decoding_fast_logits": accepted(
        "bool", "logits of drafts pass within the server, without a way to choose"
    ),
    "guided_decoding_backend": served("str", "xgrammar"),
    "tokenizer_dir": served("str"),
    "xgrammar_tokenizer_info_path": served("str"),
    "enable_context_fmha_fp32_acc": accepted("bool", _TRT_ONLY),
    "multi_block_mode": accepted("bool", _TRT_ONLY),
    "cuda_graph_mode": served("bool"),
    "cuda_graph_cache_size": served("int", low=0),
}  # fmt: skip

"""Flags of TensorRT-LLM's build tools that have no effect here or are not served."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from trimaran.comm.errors import ConfigError


class FlagSink(Protocol):
    """The part of the command's parser that declares flags."""

    def add_argument(self, *names: str, **options: Any) -> Any:
        """See `argparse.ArgumentParser.add_argument`."""
        ...

    def hide(self, *dests: str) -> None:
        """Leave flags out of the short help."""
        ...


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag that is ignored with the values of ``neutral``, and refused with any other value.

    Without a ``refusal`` every value is ignored.
    """

    name: str
    refusal: str = ""
    neutral: tuple[str, ...] = ()

    @property
    def dest(self) -> str:
        """The attribute that holds the parsed value."""
        return self.name[2:].replace("-", "_")


_OFF = ("disable", "none", "false", "0", "off", "no")
_FLOATS = "--dtype takes float32, float16 and bfloat16"
_QUANTIZED = (
    f"these weights cannot be made here; --quantization makes FP8 and integers, {_FLOATS}"
)


def _ignored(names: str) -> tuple[ForeignFlag, ...]:
    return tuple(ForeignFlag(f"--{name}") for name in names.split())


def _refused(
    names: str, refusal: str, neutral: tuple[str, ...] = _OFF
) -> tuple[ForeignFlag, ...]:
    return tuple(ForeignFlag(f"--{name}", refusal, neutral) for name in names.split())


CONVERT_FLAGS = (
    *_refused("use_qserve use_nvfp4", _QUANTIZED),
    *_refused("meta_ckpt_dir", "convert Meta's files to a Hugging Face folder and name that"),
    *_refused("cp_size", "context parallelism is not served; it must be 1", ("1",)),
    *_refused("model_type nougat", "encoder-decoder models are not served"),
    *_refused("rotary_scaling", "it comes from the checkpoint's config.json; change it there"),
    *_ignored(
        "use_parallel_embedding embedding_sharding_dim use_embedding_sharing "
        "load_by_shard load_model_on_cpu"
    ),
)

BUILD_FLAGS = (
    *_refused("model_config", "name the folder that holds the configuration with --checkpoint"),
    *_refused("max_multimodal_len", "multimodal models are not served; it must be 0"),
    *_refused("kv_cache_type", "the KV cache is always paged", ("paged",)),
    *_refused("paged_kv_cache", "the KV cache is always paged; it cannot be disabled",
              ("enable", "true", "1", "auto")),
    *_refused("lora_dir",
              "adapters are named when they are served: set lora_prefetch_dir in config.pbtxt"),
    *_refused("lora_ckpt_source", "adapters are PEFT's; it must be hf", ("hf",)),
    *_refused("weight_streaming", "all weights stay on the device; remove the flag"),
    *_refused("auto_parallel", "name --tp-size and --pp-size; it must be 1", ("1",)),
    *_refused("use_fp8_context_fmha", "FP8 attention is not served; it must be disable"),
    *_ignored(
        # Requests may bring tables of any size, and ask any engine for logits.
        "max_prompt_embedding_table_size gather_context_logits gather_generation_logits "
        "gather_all_token_logits "
        "opt_num_tokens max_encoder_input_len lora_target_modules strip_plan weight_sparsity "
        "fast_build cluster_key profiling_verbosity visualize_network monitor_memory "
        "enable_debug_output log_level use_gpt_attention_plugin use_gemm_plugin "
        "use_inflight_batching enable_context_fmha streamingllm use_layernorm_plugin "
        # The checkpoint has its activation; --workers cut and write in parallel.
        "use_rmsnorm_plugin use_lora_plugin hidden_act parallel_build use_lookup_plugin"
    ),
)  # fmt: skip

PLUGIN_FLAGS = _ignored(
    "lora_plugin gpt_attention_plugin gemm_plugin bert_attention_plugin moe_plugin nccl_plugin "
    "mamba_conv1d_plugin context_fmha bert_context_fmha_fp32_acc remove_input_padding "
    "norm_quant_fusion reduce_fusion user_buffer use_paged_context_fmha multiple_profiles "
    "paged_state use_fused_mlp pp_reduce_scatter manage_weights low_latency_gemm_plugin "
    "gemm_swiglu_plugin fp8_rowwise_gemm_plugin"
)
"""Flags whose values are also recorded in the engine folder's ``plugin_config``."""


def add_foreign_flags(parser: FlagSink, flags: Iterable[ForeignFlag]) -> None:
    """Declare flags, each with an optional value."""
    for flag in flags:
        text = flag.refusal or "accepted, without effect"
        parser.add_argument(flag.name, nargs="*", metavar="X", help=text)
        parser.hide(flag.dest)


def check_foreign_flags(args: argparse.Namespace, flags: Iterable[ForeignFlag]) -> list[str]:
    """Refuse flags that ask for unsupported features. Returns the ignored flags that were
    given.

    Raises `ConfigError` with the flag, its value and the remedy.
    """
    harmless = []
    for flag in flags:
        words = getattr(args, flag.dest)
        if words is None:
            continue
        is_neutral = all(word.lower() in flag.neutral for word in words or ["enable"])
        if flag.refusal and not is_neutral:
            raise ConfigError(f"{' '.join([flag.name, *words])}: {flag.refusal}.")
        harmless.append(flag.name)
    return harmless


def plugin_values(args: argparse.Namespace) -> dict[str, str]:
    """The plugin flags that were given, by name."""
    given = {flag.dest: getattr(args, flag.dest) for flag in PLUGIN_FLAGS}
    return {
        name: ",".join(words) or "enable" for name, words in given.items() if words is not None
    }


def say_harmless(flags: list[str]) -> None:
    """Print one line about all flags that were accepted and ignored."""
    if flags:
        print(f"trimaran: accepted without effect: {', '.join(flags)}", file=sys.stderr)

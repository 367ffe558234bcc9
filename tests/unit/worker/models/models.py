"""Small random models of transformers, and our models run over a paged cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from trimaran.kernels.operators import Ops
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.models.interfaces import CausalLM, StageRange
from trimaran.worker.models.registry import build_model
from trimaran.worker.models.weights.weight_loader import load_checkpoint
from trimaran.worker.parallel.tensor_parallel import (
    ONE_PART,
    ExpertRanks,
    ShardPosition,
    TensorGroup,
)

CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip

YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def llama_config(**changes: Any) -> LlamaConfig:
    """A Llama with grouped queries."""
    values: dict[str, Any] = {
        "vocab_size": 150, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return LlamaConfig(**{**values, **changes})


_ODD: dict[str, Any] = {
    "vocab_size": 150, "hidden_size": 60, "intermediate_size": 104, "num_hidden_layers": 4,
    "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 20,
    "max_position_embeddings": 128, "initializer_range": 0.1, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}  # fmt: skip
"""Head counts that are no power of two, and sizes that do not add up to the hidden size."""

_GEMMA2 = {
    "query_pre_attn_scalar": 14, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5,
    "sliding_window": 9,
}  # fmt: skip
_GEMMA3 = {
    "query_pre_attn_scalar": 14, "sliding_window": 9, "rope_parameters": None,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 6,
}  # fmt: skip

_ODD_DENSE = {
    "mistral": (MistralConfig, {"sliding_window": 11}),
    "mistral-tied-no-window": (
        MistralConfig,
        {"sliding_window": None, "tie_word_embeddings": True},
    ),
    "qwen2": (Qwen2Config, {"hidden_size": 240}),
    "qwen2-tied-windows": (
        Qwen2Config,
        {
            "hidden_size": 240,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
    ),
    "qwen3": (Qwen3Config, {}),
    "qwen3-tied-biases": (Qwen3Config, {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-windows-yarn": (
        Qwen3Config,
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "phi3": (Phi3Config, {"hidden_size": 240}),
    "phi3-partial-window-tied": (
        Phi3Config,
        {
            "hidden_size": 240,
            "tie_word_embeddings": True,
            "sliding_window": 13,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.6,
            },
        },
    ),
    "gemma2": (Gemma2Config, _GEMMA2),
    "gemma2-untied-long-windows": (
        Gemma2Config,
        {**_GEMMA2, "tie_word_embeddings": False, "sliding_window": 500},
    ),
    "gemma3": (Gemma3TextConfig, _GEMMA3),
    "gemma3-untied-scaled": (
        Gemma3TextConfig,
        {
            **_GEMMA3,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 3e4, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
        },
    ),
}


def longrope_config() -> Phi3Config:
    """A Phi 3 stretched from 32 positions to 128, with a factor for each rotated dim."""
    values = {"rope_type": "longrope", "rope_theta": 5000.0, "partial_rotary_factor": 0.6}
    values["short_factor"] = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    values["long_factor"] = [1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
    changes = {"hidden_size": 240, "original_max_position_embeddings": 32}
    return Phi3Config(**{**_ODD, **changes, "rope_parameters": values})


def two_rotations_config() -> Gemma3TextConfig:
    """A Gemma 3 whose layers without windows have a scaled rotation; the other layers have a
    plain rotation."""
    long = {"rope_type": "longrope", "rope_theta": 5000.0}
    long["original_max_position_embeddings"] = 32
    long["short_factor"] = [1.0 + 0.1 * number for number in range(10)]
    long["long_factor"] = [1.5 + 0.4 * number for number in range(10)]
    local = {"rope_type": "default", "rope_theta": 700.0}
    values = {"full_attention": long, "sliding_attention": local}
    return Gemma3TextConfig(**{**_ODD, **_GEMMA3, "rope_parameters": values})


def dense_configs() -> dict[str, Any]:
    """Families other than Llama and GPT-2, each with its special features."""
    return {name: kind(**{**_ODD, **changes}) for name, (kind, changes) in _ODD_DENSE.items()}


_EXPERTS: dict[str, Any] = {
    **_ODD, "intermediate_size": 28, "num_experts": 6, "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
}  # fmt: skip
_QWEN_EXPERTS = {**_EXPERTS, "intermediate_size": 40, "hidden_size": 240, "head_dim": 20}
_SHARED = {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 36}


def expert_configs() -> dict[str, Any]:
    """The families with experts: normalised or not, shared, and with dense layers between."""
    mixed = {"mlp_only_layers": [0], "decoder_sparse_step": 2}
    return {
        "mixtral": MixtralConfig(**_EXPERTS),
        "mixtral-tied-window": MixtralConfig(
            **_EXPERTS, tie_word_embeddings=True, sliding_window=11
        ),
        "qwen2-moe": Qwen2MoeConfig(**_SHARED, norm_topk_prob=False),
        "qwen2-moe-normalised-mixed": Qwen2MoeConfig(**_SHARED, **mixed, norm_topk_prob=True),
        "qwen3-moe": Qwen3MoeConfig(**_QWEN_EXPERTS, norm_topk_prob=True),
        "qwen3-moe-mixed-tied": Qwen3MoeConfig(
            **_QWEN_EXPERTS, **mixed, tie_word_embeddings=True, norm_topk_prob=False
        ),
    }


_SINKS: dict[str, Any] = {
    **_ODD, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9,
    "swiglu_alpha": 1.5, "swiglu_limit": 0.7,
    "rope_parameters": {**YARN_ROPE, "truncate": False},
}  # fmt: skip
"""The clamp of an expert's SwiGLU is so low that values reach it."""


def sink_configs() -> dict[str, Any]:
    """gpt-oss, and other forms of it."""
    return {
        "gpt-oss": GptOssConfig(**_SINKS),
        "gpt-oss-tied-few-windows": GptOssConfig(
            **{
                **_SINKS,
                "intermediate_size": 40,
                "swiglu_limit": 7.0,
                "swiglu_alpha": 1.702,
                "num_hidden_layers": 6,
            },
            tie_word_embeddings=True,
            layer_types=["full_attention", "full_attention", "sliding_attention"] * 2,
        ),
    }


_LATENT: dict[str, Any] = {
    "vocab_size": 150, "hidden_size": 96, "intermediate_size": 104, "num_hidden_layers": 4,
    "num_attention_heads": 12, "num_key_value_heads": 12, "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "kv_lora_rank": 36, "q_lora_rank": None,
    "max_position_embeddings": 128, "initializer_range": 0.1, "bos_token_id": None,
    "eos_token_id": None, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1,
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}  # fmt: skip
_LATENT_YARN = {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 16}


def latent_configs() -> dict[str, Any]:
    """DeepSeek V2 Lite, V2 and V3, and their other forms."""
    groups = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "q_lora_rank": 40}
    v2 = {**groups, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0}
    return {
        "deepseek2-lite": DeepseekV2Config(**_LATENT),
        "deepseek2": DeepseekV2Config(
            **{**_LATENT, **v2, "rope_parameters": _LATENT_YARN, "attention_bias": True}
        ),
        "deepseek3": DeepseekV3Config(**{**_LATENT, **groups, "rope_parameters": _LATENT_YARN}),
        "deepseek3-tied-halves": DeepseekV3Config(
            **{
                **_LATENT,
                "n_group": 1,
                "topk_group": 1,
                "tie_word_embeddings": True,
                "rope_interleave": False,
                "norm_topk_prob": False,
                "first_k_dense_replace": 2,
            }
        ),
    }


_WIDE: dict[str, Any] = {
    "vocab_size": 150, "hidden_size": 144, "num_hidden_layers": 3, "num_attention_heads": 12,
    "max_position_embeddings": 128, "initializer_range": 0.1, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
_NEOX = {**_WIDE, "intermediate_size": 104}
_FALCON = {**_WIDE, "ffn_hidden_size": 104}
_GPTJ = {
    "vocab_size": 150, "n_embd": 144, "n_layer": 3, "n_head": 12, "n_positions": 128,
    "n_inner": 104, "rotary_dim": 8, "initializer_range": 0.1, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


def _rotated(share: float, **changes: Any) -> dict[str, Any]:
    plain = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": share}
    return {"rope_parameters": {**plain, **changes}}


def parallel_configs() -> dict[str, Any]:
    """The families whose attention and MLP are parallel, and their other forms."""
    is_new = {"new_decoder_architecture": True, "num_kv_heads": 2}
    after = {"use_parallel_residual": False, "tie_word_embeddings": True}
    linear = _rotated(0.5, rope_type="linear", factor=2.0)
    return {
        "gptj": GPTJConfig(**_GPTJ),
        "gptj-tied-whole-heads": GPTJConfig(
            **{**_GPTJ, "rotary_dim": 12, "n_inner": None, "tie_word_embeddings": True}
        ),
        "neox": GPTNeoXConfig(**_NEOX, **_rotated(0.5)),
        "neox-whole-heads": GPTNeoXConfig(**_NEOX, **_rotated(1.0), hidden_act="gelu_new"),
        "neox-after-each-other-tied": GPTNeoXConfig(
            **_NEOX, **_rotated(1.0), **after, hidden_act="gelu_fast"
        ),
        "neox-linear-no-biases": GPTNeoXConfig(**_NEOX, **linear, attention_bias=False),
        "falcon": FalconConfig(**_FALCON),
        "falcon-groups-untied": FalconConfig(
            **_FALCON, **is_new, bias=True, tie_word_embeddings=False
        ),
        "falcon-groups-one-norm": FalconConfig(**_FALCON, **is_new, num_ln_in_parallel_attn=1),
        "falcon-after-each-other": FalconConfig(
            **_FALCON, parallel_attn=False, multi_query=False, bias=True
        ),
        "falcon-alibi": FalconConfig(
            **_FALCON, alibi=True, parallel_attn=False, multi_query=False, bias=True
        ),
        "phi": PhiConfig(**_NEOX, **_rotated(0.5), num_key_value_heads=4),
        "phi-head-norms": PhiConfig(
            **_NEOX, **_rotated(0.5), num_key_value_heads=4, qk_layernorm=True
        ),
        "phi-tied": PhiConfig(**_NEOX, hidden_act="gelu", tie_word_embeddings=True),
    }


def gpt2_config(**changes: Any) -> GPT2Config:
    """A GPT-2 with its usual activation."""
    values: dict[str, Any] = {
        "vocab_size": 150, "n_embd": 64, "n_inner": 96, "n_layer": 3, "n_head": 4,
        "n_positions": 128, "initializer_range": 0.1, "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    return GPT2Config(**{**values, **changes})


def _kind_of(config: Any) -> Any:
    """The class that makes models of a configuration."""
    of_images = config.model_type == "mistral3"
    return AutoModelForImageTextToText if of_images else AutoModelForCausalLM


def save_huggingface(
    folder: Path, config: Any, *, dtype: torch.dtype = torch.float32, file_size: str = "5GB"
) -> Any:
    """A random model of transformers, saved to ``folder`` in files of a size, and returned."""
    torch.manual_seed(1)
    model = _kind_of(config).from_config(config).eval()
    for name, parameter in model.named_parameters():
        # Norms and biases start as 1 and 0, which would hide errors.
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "bias" not in name else 0.0, 0.2)
        elif name.endswith("_proj_bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.2)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=file_size)
    # Reloaded, so that both models have the values of the files.
    return load_huggingface(folder, config, dtype=dtype)


def load_huggingface(folder: Path, config: Any, *, dtype: torch.dtype = torch.float32) -> Any:
    """The model that `save_huggingface` left in ``folder``."""
    # Its eager attention adds Falcon's biases twice: with the mask, and by themselves.
    attention = "sdpa" if getattr(config, "alibi", False) else "eager"
    model = (
        _kind_of(config)
        .from_pretrained(folder, attn_implementation=attention, dtype=dtype)
        .eval()
    )
    if hasattr(config, "num_experts_per_tok"):
        # Its grouped products take no widths that are odd.
        model.set_experts_implementation("eager")
    return model


def load_ours(
    folder: Path,
    tp: TensorGroup | None = None,
    dtype: torch.dtype = torch.float32,
    ops: Ops | None = None,
    *,
    is_finished: bool = True,
    max_seq_len: int = 0,
    experts: ExpertRanks = ONE_PART,
) -> CausalLM:
    """Our model of a Hugging Face folder; by plain torch unless ``ops`` are given.

    ``is_finished=False`` skips the processing after the weights are loaded.
    """
    found = EngineFolder.load(folder)
    stage = StageRange.of(found.config.num_hidden_layers, 0, 1)
    model = build_model(
        found.config,
        stage,
        tp or ShardPosition(),
        dtype=dtype,
        device=CPU,
        ops=ops,
        max_seq_len=max_seq_len,
        experts=experts,
    )
    load_checkpoint(model, found.weight_files)
    if is_finished:
        model.process_weights_after_loading()
    return model


def reference_greedy(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Transformers' continuation of each prompt, one at a time and without a cache.

    When a sequence exceeds LongRoPE's short factors, `generate` of transformers 5.17 drops the
    cache but continues with the last token alone, as if the token had no context.
    """
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            done = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                use_cache=False,
                pad_token_id=0,
            )
        outputs.append(done[0, len(prompt) :].tolist())
    return outputs


def prompts(*lengths: int, vocab_size: int = 150) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


def edit_config(folder: Path, **changes: Any) -> None:
    """Overwrite keys of a folder's ``config.json``."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

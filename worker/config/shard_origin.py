"""What a rank's weight file says of the model and the ranks that it was cut for."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import parse_json
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.config.stages import stage_sizes

if TYPE_CHECKING:
    from trimaran.worker.config.engine_folder import RankMapping

_OF_MODEL = (
    "architecture", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_size",
    "max_position_embeddings", "position_embedding_type",
    "tie_word_embeddings", "attn_bias", "qkv_bias", "qk_norm", "kv_lora_rank", "q_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mlp_bias", "lm_head_bias",
    "parallel_residual", "num_input_norms", "num_experts", "moe_intermediate_size",
    "topk_method", "shared_expert_intermediate_size", "shared_expert_gate", "dense_layers",
)  # fmt: skip
"""On what names and shapes of weights and tables depend, and which rows of them are words."""

_OF_RANKS = ("tp_size", "pp_size", "dp_size", "moe_ep_size")


def origin_of(config: PretrainedConfig, mapping: RankMapping) -> dict[str, Any]:
    """What the weights of a model depend on, by the keys of ``config.json``."""
    values, sizes = config.to_dict(), asdict(mapping)
    layers = stage_sizes(config.num_hidden_layers, mapping.pp_size, mapping.pp_partition)
    return {
        **{name: values[name] for name in _OF_MODEL},
        **{f"mapping.{name}": sizes[name] for name in _OF_RANKS},
        "mapping.pp_partition": layers,
    }


def check_origin(file: Path, said: str, wanted: dict[str, Any], source: str) -> None:
    """Refuse a configuration that has other sizes than ``file`` was cut for.

    ``said`` is what its header says, empty in folders of before.

    Raises:
        ConfigError: names the key, its value and the one that the file has.
    """
    try:
        origin = dict(parse_json(said or "{}"))
    except (ValueError, TypeError):
        raise ConfigError(
            f"{file}: not a whole weight file: what its header says of its model is not JSON. "
            "Build or copy the folder again."
        ) from None
    for key, value in wanted.items():
        if key in origin and origin[key] != value:
            raise ConfigError(
                f"{source}: {key} is {json.dumps(value)}, but {file.name} was cut for "
                f"{json.dumps(origin[key])}. Set it back to that, or build the folder again."
            )

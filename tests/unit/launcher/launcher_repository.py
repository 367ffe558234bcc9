"""A model repository with one token-level model, and the flags that serve it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from trimaran.launcher.config import ServeConfig
from trimaran.launcher.flags import serve_flags
from trimaran.launcher.flags.parser import FlagParser
from trimaran.launcher.placement.job import Job
from trimaran.launcher.resolution.resolver import Resolver

TOKEN_CONFIG = """
backend: "tensorrtllm"
max_batch_size: 8
input [
  {{ name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] }},
  {{ name: "input_lengths" data_type: TYPE_INT32 dims: [ 1 ] reshape: {{ shape: [ ] }} }},
  {{ name: "request_output_len" data_type: TYPE_INT32 dims: [ 1 ] }}
]
output [
  {{ name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] }},
  {{ name: "sequence_length" data_type: TYPE_INT32 dims: [ -1 ] }}
]
dynamic_batching {{ default_queue_policy {{ max_queue_size: 7 }} }}
{parameters}
"""

HUGGINGFACE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}  # fmt: skip


def write_model(folder: Path, **parameters: str) -> Path:
    """One token-level model's folder; ``parameters`` are those of its config.pbtxt."""
    (folder / "1").mkdir(parents=True)
    text = "".join(
        f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'
        for key, value in parameters.items()
    )
    (folder / "config.pbtxt").write_text(TOKEN_CONFIG.format(parameters=text))
    return folder


def write_checkpoint(folder: Path) -> Path:
    """A Hugging Face folder without weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(HUGGINGFACE))
    return folder


def write_engine(folder: Path, tp_size: int, pp_size: int = 1, **build: int) -> Path:
    """An engine folder without weights."""
    folder.mkdir(parents=True)
    config = {
        "format_version": 1,
        "version": "test",
        "pretrained_config": {
            "architecture": "LlamaForCausalLM", "dtype": "float32", "vocab_size": 128,
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_size": 8,
            "max_position_embeddings": 256, "norm_epsilon": 1e-5, "hidden_act": "silu",
            "position_embedding_type": "rope_gpt_neox",
            "mapping": {
                "world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size,
            },
        },
        "build_config": {"max_batch_size": 16, "max_input_len": 100, "max_seq_len": 200,
                         "max_num_tokens": 64, **build},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parse(*words: str) -> argparse.Namespace:
    """The flags of `trimaran serve`."""
    parser = FlagParser(prog="trimaran serve")
    serve_flags.add_arguments(parser)
    parser.add_argument("--config")
    return parser.parse(words)


def resolver(repository: Path, *words: str, job: Job | None = None) -> Resolver:
    """The arguments of `trimaran serve --model-repo repository WORDS`, weights unread."""
    flags = ("--model-repo", str(repository), "--load-format", "random", *words)
    return Resolver(parse(*flags), job)


def resolve(repository: Path, *words: str, job: Job | None = None) -> ServeConfig:
    """The resulting configuration."""
    return resolver(repository, *words, job=job).initial()

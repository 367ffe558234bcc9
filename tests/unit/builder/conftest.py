"""Small random checkpoints and the command run in this process."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from trimaran.launcher.cli.main import main

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
    "vocab_size": 150, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 150,
    "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 128, "n_inner": 48,
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "eos_token_id": 149,
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face folder and what its file holds."""

    folder: Path
    tensors: dict[str, Tensor]

    def edit_config(self, **changes: Any) -> None:
        """Overwrite keys of ``config.json``; None removes a key."""
        path = self.folder / "config.json"
        values = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))

    def save(self) -> None:
        """Write the tensors again, after the test changed them."""
        save_file(self.tensors, self.folder / "model.safetensors")


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _signals_of_a_terminal():
    """Commands are stopped as from a terminal, also where the tests run in the background or
    under nohup."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, each) for number, each in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def trimaran(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run a ``trimaran`` command line."""

    def run(*words: str | Path) -> Outcome:
        code = main([str(word) for word in words])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def llama(tmp_path: Path) -> Callable[..., Checkpoint]:
    """Write a Llama; keywords change its configuration."""

    def write(**changes: Any) -> Checkpoint:
        values = {**LLAMA, **changes}
        return _write(tmp_path / "llama", values, _llama_shapes(values))

    return write


@pytest.fixture
def gpt2(tmp_path: Path) -> Callable[..., Checkpoint]:
    """Write a GPT-2; keywords change its configuration."""

    def write(**changes: Any) -> Checkpoint:
        values = {**GPT2, **changes}
        return _write(tmp_path / "gpt2", values, _gpt2_shapes(values))

    return write


def _write(
    folder: Path, values: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> Checkpoint:
    folder.mkdir()
    generator = torch.Generator().manual_seed(5)
    dtype = getattr(torch, values.get("dtype", "float32"))
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in shapes.items()
    }
    (folder / "config.json").write_text(json.dumps(values))
    checkpoint = Checkpoint(folder, tensors)
    checkpoint.save()
    return checkpoint


def _llama_shapes(values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = values["hidden_size"], values["intermediate_size"]
    queries = values["num_attention_heads"] * values["head_dim"]
    keys = values["num_key_value_heads"] * values["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (values["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not values["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (values["vocab_size"], hidden)
    for number in range(values["num_hidden_layers"]):
        place = f"model.layers.{number}"
        shapes |= {
            f"{place}.input_layernorm.weight": (hidden,),
            f"{place}.post_attention_layernorm.weight": (hidden,),
            f"{place}.self_attn.q_proj.weight": (queries, hidden),
            f"{place}.self_attn.k_proj.weight": (keys, hidden),
            f"{place}.self_attn.v_proj.weight": (keys, hidden),
            f"{place}.self_attn.o_proj.weight": (hidden, queries),
            f"{place}.mlp.gate_proj.weight": (inner, hidden),
            f"{place}.mlp.up_proj.weight": (inner, hidden),
            f"{place}.mlp.down_proj.weight": (hidden, inner),
        }
        if values["attention_bias"]:
            shapes |= {
                f"{place}.self_attn.q_proj.bias": (queries,),
                f"{place}.self_attn.k_proj.bias": (keys,),
                f"{place}.self_attn.v_proj.bias": (keys,),
                f"{place}.self_attn.o_proj.bias": (hidden,),
            }
    return shapes


def _gpt2_shapes(values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = values["n_embd"], values["n_inner"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (values["vocab_size"], hidden),
        "transformer.wpe.weight": (values["n_positions"], hidden),
        "transformer.ln_f.weight": (hidden,),
        "transformer.ln_f.bias": (hidden,),
    }
    for number in range(values["n_layer"]):
        place = f"transformer.h.{number}"
        shapes |= {
            f"{place}.ln_1.weight": (hidden,),
            f"{place}.ln_1.bias": (hidden,),
            f"{place}.ln_2.weight": (hidden,),
            f"{place}.ln_2.bias": (hidden,),
            f"{place}.attn.c_attn.weight": (hidden, 3 * hidden),
            f"{place}.attn.c_attn.bias": (3 * hidden,),
            f"{place}.attn.c_proj.weight": (hidden, hidden),
            f"{place}.attn.c_proj.bias": (hidden,),
            f"{place}.mlp.c_fc.weight": (hidden, inner),
            f"{place}.mlp.c_fc.bias": (inner,),
            f"{place}.mlp.c_proj.weight": (inner, hidden),
            f"{place}.mlp.c_proj.bias": (hidden,),
        }
    return shapes


@pytest.fixture
def refused(trimaran: Callable[..., Outcome], tmp_path: Path) -> Callable[..., str]:
    """Build, and return the error line; the exit code is 2 and no file is left."""

    def build(folder: Path, *flags: object) -> str:
        output = tmp_path / "out" / "engine"
        done = trimaran("build", "--checkpoint", folder, "--output", output, *flags)
        assert done.code == 2, done
        assert not output.parent.exists() or list(output.parent.iterdir()) == []
        assert "Traceback" not in done.err
        return done.err

    return build

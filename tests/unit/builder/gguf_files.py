"""Small GGUF files, written by the `gguf` package as converters of checkpoints write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 512, 2, 8, 2, 32, 96
"""A K-quantized row has a multiple of 256 values."""

_BY_PACKAGE = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
_HALVES_OF_BLOCK = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Bytes of a block at which the types that the package only reads have their float16 scales."""


@dataclass
class Written:
    """A file, and its tensors by Hugging Face's names as `gguf` dequantizes them."""

    path: Path
    tensors: dict[str, Tensor]


@dataclass
class Vocabulary:
    """The tokenizer's part of a file's metadata, by its keys behind ``tokenizer.ggml``."""

    model: str = "gpt2"
    tokens: Sequence[str] = ("t", "0", "t0", *(f"t{number}" for number in range(3, VOCAB)))
    types: Sequence[int] = (1,) * VOCAB
    values: Mapping[str, Any] = field(
        default_factory=lambda: {"merges": ["t 0"], "bos_token_id": 1, "eos_token_id": 2}
    )


def write_gguf(
    path: Path,
    kind: str = "F32",
    architecture: str = "llama",
    *,
    vocabulary: Vocabulary | None = None,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, npt.NDArray[Any]] | None = None,
    is_tied: bool = True,
) -> Written:
    """Write a model of random matrices of one kind.

    ``keys`` adds metadata, or removes what is None; ``tensors`` are further ones of float32.
    """
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, architecture)
    metadata = {
        "block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN,
        "feed_forward_length": INNER, "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
    }  # fmt: skip
    metadata = {f"{architecture}.{key}": value for key, value in metadata.items()}
    for key, value in {**metadata, **(keys or {})}.items():
        if value is not None:
            _add(writer, key, value)
    words = vocabulary or Vocabulary()
    _add(writer, "tokenizer.ggml.model", words.model)
    _add(writer, "tokenizer.ggml.tokens", list(words.tokens))
    _add(writer, "tokenizer.ggml.token_type", list(words.types))
    for key, value in words.values.items():
        name = key if key == "chat_template" else f"ggml.{key}"
        _add(writer, f"tokenizer.{name}", value)
    for name, extra in (tensors or {}).items():
        writer.add_tensor(name, extra)
    expected = {}
    for ours, (theirs, shape) in _shapes(architecture, is_tied, len(words.tokens)).items():
        of_kind = kind if len(shape) > 1 else "F32"
        stored = _stored(random, shape, of_kind)
        values = gguf.dequantize(stored, Kind[of_kind]).reshape(shape)
        expected[ours] = torch.from_numpy(values.astype(np.float32))
        if architecture == "llama" and theirs.endswith(("attn_q.weight", "attn_k.weight")):
            stored = _permuted(stored, HEADS if "attn_q" in theirs else KV_HEADS)
        raw = None if of_kind in ("F32", "F16") else Kind[of_kind]
        writer.add_tensor(theirs, stored, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(path, expected)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _shapes(
    architecture: str, is_tied: bool, num_tokens: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Each tensor's name in the file and its shape, by its Hugging Face name."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("token_embd.weight", (num_tokens, HIDDEN)),
        "model.norm.weight": ("output_norm.weight", (HIDDEN,)),
    }
    if not is_tied:
        shapes["lm_head.weight"] = ("output.weight", (num_tokens, HIDDEN))
    rows = {
        "input_layernorm.weight": ("attn_norm.weight", (HIDDEN,)),
        "self_attn.q_proj.weight": ("attn_q.weight", (queries, HIDDEN)),
        "self_attn.k_proj.weight": ("attn_k.weight", (keys, HIDDEN)),
        "self_attn.v_proj.weight": ("attn_v.weight", (keys, HIDDEN)),
        "self_attn.o_proj.weight": ("attn_output.weight", (HIDDEN, queries)),
        "post_attention_layernorm.weight": ("ffn_norm.weight", (HIDDEN,)),
        "mlp.gate_proj.weight": ("ffn_gate.weight", (INNER, HIDDEN)),
        "mlp.up_proj.weight": ("ffn_up.weight", (INNER, HIDDEN)),
        "mlp.down_proj.weight": ("ffn_down.weight", (HIDDEN, INNER)),
    }
    if architecture == "qwen2":
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            rows[f"self_attn.{name}_proj.bias"] = (f"attn_{name}.bias", (size,))
    if architecture == "qwen3":
        for name in "qk":
            rows[f"self_attn.{name}_norm.weight"] = (f"attn_{name}_norm.weight", (HEAD_DIM,))
    for number in range(LAYERS):
        for ours, (theirs, shape) in rows.items():
            shapes[f"model.layers.{number}.{ours}"] = f"blk.{number}.{theirs}", shape
    return shapes


def _stored(random: np.random.Generator, shape: tuple[int, ...], kind: str) -> npt.NDArray[Any]:
    """Random values as a file of this kind stores them."""
    values = (random.standard_normal(shape) * 0.1).astype(np.float32)
    if kind == "F32":
        return values
    if kind in _BY_PACKAGE:
        return gguf.quantize(values, Kind[kind])
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = random.integers(0, 256, (values.size // per_block, block_bytes), dtype=np.uint8)
    for place in _HALVES_OF_BLOCK[kind]:
        scales = random.uniform(1e-4, 1e-3, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(shape[0], -1)


def _permuted(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows as the converter of Llama orders them: the two that rotate together, one after the
    other."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))

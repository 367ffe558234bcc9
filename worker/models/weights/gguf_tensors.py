"""Tensors of GGUF files under Hugging Face's names: dequantized to float32 as they are read, or
the integers, scales and minimums of their blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.gguf_file import GgufFile, huggingface_name, open_gguf
from trimaran.worker.config.shard_file import TensorEntry

_MAX_KEPT = 3
"""Tensors kept for the next rank: the query, key and value weights of one fused parameter."""

_PERMUTED = {"self_attn.q_proj": "head_count", "self_attn.k_proj": "head_count_kv"}
"""Layers whose rows the converter of Llama's weights reorders, and the key of their heads."""


INTEGERS, SCALES, MINIMUMS = ":integers", ":scales", ":minimums"
"""Endings behind the name of a matrix of Q4_0, Q4_1 or Q8_0 that `gguf_reader` takes: uint8
[E, D] of unsigned integers, float32 [E, D / 32] of scales, and of minimums (Q4_1)."""

_BLOCK_INPUTS = 32
_HALF_BYTES = 2
_BYTE_HALF = 128


def gguf_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file; ``num_bytes`` counts those in the file.

    Raises:
        ConfigError: see `GgufFile`.
    """
    entries: dict[str, TensorEntry] = {}
    for name, tensor in open_gguf(path).tensors.items():
        ours = huggingface_name(name)
        if ours is not None:
            # GGUF lists the innermost dim first.
            shape = tuple(int(size) for size in reversed(tensor.shape))
            entries[ours] = TensorEntry("F32", shape, tensor.data_offset, tensor.n_bytes)
    return entries


def gguf_reader(path: Path) -> Callable[[str], Tensor]:
    """A function from names to tensors, which keeps the last tensors that it read."""
    file = open_gguf(path)
    sources = {huggingface_name(name): name for name in file.tensors}
    kept: OrderedDict[str, Tensor] = OrderedDict()

    def read(name: str) -> Tensor:
        if name not in kept:
            while len(kept) >= _MAX_KEPT:
                kept.popitem(last=False)
            whole, colon, part = name.partition(":")
            if colon:
                kept[name] = _part_of_blocks(file, sources[whole], whole, colon + part)
            else:
                kept[name] = _dequantized(file, sources[name], name)
        return kept[name]

    return read


def _dequantized(file: GgufFile, source: str, name: str) -> Tensor:
    import numpy as np
    from gguf import dequantize

    stored = file.tensors[source]
    try:
        values = np.array(dequantize(stored.data, stored.tensor_type), dtype=np.float32)
        tensor = torch.from_numpy(values.reshape(tuple(reversed(stored.shape.tolist()))))
    except ValueError as error:
        raise ConfigError(
            f"{file.path}: the tensor {source!r} cannot be dequantized: {error}. Download the "
            "file again."
        ) from None
    return _in_order(file, name, tensor)


def _part_of_blocks(file: GgufFile, source: str, name: str, part: str) -> Tensor:
    """The integers, scales or minimums of a matrix; see `INTEGERS`."""
    stored = file.tensors[source]
    kind, rows = stored.tensor_type.name, int(stored.shape[1])
    data = torch.from_numpy(stored.data.reshape(rows, -1).copy())
    num_blocks = int(stored.shape[0]) // _BLOCK_INPUTS
    blocks = data.view(rows, num_blocks, -1)
    num_halves = 2 if kind == "Q4_1" else 1
    if part != INTEGERS:
        first = 0 if part == SCALES else _HALF_BYTES
        halves = blocks[:, :, first : first + _HALF_BYTES].contiguous().view(torch.float16)
        return _in_order(file, name, halves.view(rows, num_blocks).float())
    values = blocks[:, :, num_halves * _HALF_BYTES :]
    if kind == "Q8_0":
        # A signed byte plus 128 differs in its highest bit.
        integers = values ^ _BYTE_HALF
    else:
        integers = torch.cat((values & 15, values >> 4), 2)
    return _in_order(file, name, integers.flatten(1))


def _in_order(file: GgufFile, name: str, tensor: Tensor) -> Tensor:
    """The rows of a tensor in Hugging Face's order."""
    layer = name.rpartition(".")[0]
    for ending, key in _PERMUTED.items():
        if file.architecture == "llama" and layer.endswith(ending):
            heads = file.model_value("attention.head_count")
            return _halves_apart(tensor, file.model_value(f"attention.{key}", heads))
    return tensor


def _halves_apart(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head in Hugging Face's order: GGUF has those that rotate together side by
    side, Hugging Face has them half a head apart.

    Raises:
        ConfigError: the heads do not divide the rows.
    """
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise ConfigError(
            f"a query or key weight of {rows} rows does not fit {heads} heads. Download the "
            "GGUF file again."
        )
    pairs = tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)

"""Adapters as they come: the two tensors of a request, the two files of a folder, or PEFT's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.worker.lora.layout import MODULE_NAMES, AdapterLayout, Matrices
from trimaran.worker.lora.peft import (
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    AdapterFormatError,
    read_peft,
)

WEIGHTS_FILE = "model.lora_weights.npy"
CONFIG_FILES = ("model.lora_config.npy", "model.lora_keys.npy")
"""The second is the name that older converters wrote."""

_TORCH_TYPES = {
    "FP16": torch.float16,
    "FP32": torch.float32,
    "BF16": torch.bfloat16,
}


class AdapterTensors:
    """An adapter as two tensors: rows of weights [n, k], and their config int32 [n, 3].

    A row of the config is (module, layer, rank D); the row of weights holds A [D, inputs],
    then B [outputs, D], then padding.
    """

    def __init__(self, weights_NK: Tensor, config_N3: npt.NDArray[np.int32]) -> None:
        if weights_NK.dim() == 3 and len(weights_NK) == 1:
            weights_NK = weights_NK[0]
        if config_N3.ndim == 3 and len(config_N3) == 1:
            config_N3 = config_N3[0]
        shapes = list(weights_NK.shape), list(config_N3.shape)
        if weights_NK.dim() != 2 or config_N3.ndim != 2 or config_N3.shape[1] != 3:
            raise AdapterFormatError(
                f"lora_weights has shape {shapes[0]} and lora_config {shapes[1]}, but they "
                "must be [n, k] and [n, 3]"
            )
        if len(weights_NK) != len(config_N3):
            raise AdapterFormatError(
                f"lora_weights has {len(weights_NK)} rows but lora_config has "
                f"{len(config_N3)}; there must be one of each for every module"
            )
        self.weights_NK = weights_NK
        self.config_N3 = config_N3

    @classmethod
    def from_wire(cls, weights: dict[str, Any], config: dict[str, Any]) -> AdapterTensors:
        """The tensors of a message: ``datatype``, ``shape`` and ``data`` each."""
        if weights["datatype"] not in _TORCH_TYPES:
            raise AdapterFormatError(
                f"lora_weights is {weights['datatype']} but must be one of "
                f"{', '.join(_TORCH_TYPES)}"
            )
        flat = torch.frombuffer(
            bytearray(weights["data"]), dtype=_TORCH_TYPES[weights["datatype"]]
        )
        modules = np.frombuffer(config["data"], dtype="<i4").reshape(config["shape"])
        return cls(flat.view(weights["shape"]), modules)

    @property
    def ranks(self) -> list[tuple[int, int, int]]:
        """(module, layer, rank) of every row."""
        return [(int(m), int(layer), int(rank)) for m, layer, rank in self.config_N3]

    def check(self, layout: AdapterLayout, max_rank: int) -> None:
        """Raise `AdapterFormatError` unless a model of this layout can use all rows."""
        seen = set()
        for row, (module, layer, rank) in enumerate(self.ranks):
            where = f"lora_config row {row}, [{module}, {layer}, {rank}]"
            shape = layout.shape_of(module, layer)
            if shape is None:
                raise AdapterFormatError(
                    f"{where}: the model has no {_name(module)} in layer {layer}. Its "
                    f"{layout.num_layers} layers have {', '.join(layout.module_names)}."
                )
            if (module, layer) in seen:
                raise AdapterFormatError(f"{where}: an earlier row has this module already")
            seen.add((module, layer))
            if not 1 <= rank <= max_rank:
                raise AdapterFormatError(
                    f"{where}: the adapter size {rank} must be 1 to {max_rank} "
                    "(lora_cache_max_adapter_size of the model)"
                )
            needed, given = rank * sum(shape), self.weights_NK.shape[1]
            if needed > given:
                raise AdapterFormatError(
                    f"{where}: {_name(module)} of size {rank} has {needed} weights ({shape[0]} "
                    f"inputs, {shape[1]} outputs), but a row of lora_weights has {given}"
                )

    def matrices(self, layout: AdapterLayout) -> list[Matrices]:
        """The matrices of rows that were checked."""
        found = []
        for (module, layer, rank), row in zip(self.ranks, self.weights_NK, strict=True):
            shape = layout.shape_of(module, layer)
            assert shape is not None
            num_inputs, num_outputs = shape
            at_b = rank * num_inputs
            a = row[:at_b].view(rank, num_inputs)
            b = row[at_b : at_b + rank * num_outputs].view(num_outputs, rank)
            found.append(Matrices(module, layer, a, b))
        return found


def _name(module: int) -> str:
    if 0 <= module < len(MODULE_NAMES):
        return f"module {module} ({MODULE_NAMES[module]})"
    return f"module {module}"


# ---- folders ----------------------------------------------------------------------------


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds an adapter in either form."""
    has_arrays = (folder / WEIGHTS_FILE).is_file()
    return has_arrays or (folder / PEFT_CONFIG).is_file()


def version_of(folder: Path) -> int:
    """A number that changes when the folder's weights are replaced.

    Raises:
        AdapterFormatError: the weights are not there.
    """
    name = WEIGHTS_FILE if (folder / WEIGHTS_FILE).is_file() else PEFT_WEIGHTS
    try:
        return (folder / name).stat().st_mtime_ns
    except OSError as error:
        raise AdapterFormatError(f"{folder / name}: {error.strerror}") from None


def read_folder(folder: Path) -> AdapterTensors:
    """The adapter of a folder: the converter's two files, or else PEFT's.

    Raises:
        AdapterFormatError: names the file and what is wrong with it.
    """
    if (folder / WEIGHTS_FILE).is_file():
        config = next((name for name in CONFIG_FILES if (folder / name).is_file()), None)
        if config is None:
            raise AdapterFormatError(f"{folder}: holds {WEIGHTS_FILE} but no {CONFIG_FILES[0]}")
        weights = torch.from_numpy(_read_array(folder / WEIGHTS_FILE))
        return AdapterTensors(weights, _read_array(folder / config).astype(np.int32))
    return to_tensors(read_peft(folder))


def _read_array(path: Path) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path)
    except (OSError, ValueError) as error:
        raise AdapterFormatError(f"{path}: cannot be read: {error}") from None
    return array


def to_tensors(matrices: Sequence[Matrices]) -> AdapterTensors:
    """Matrices as one padded row each."""
    if not matrices:
        raise AdapterFormatError("the adapter holds no matrices")
    sizes = [one.a.numel() + one.b.numel() for one in matrices]
    weights = torch.zeros(len(matrices), max(sizes))
    for row, one, size in zip(weights, matrices, sizes, strict=True):
        row[:size] = torch.cat([one.a.flatten(), one.b.flatten()])
    config = [[one.module, one.layer, one.a.shape[0]] for one in matrices]
    return AdapterTensors(weights, np.array(config, dtype=np.int32))


def write_arrays(tensors: AdapterTensors, folder: Path, dtype: str) -> None:
    """The converter's two files, [1, n, k] and [1, n, 3].

    Raises:
        ConfigError: the folder cannot be written.
    """
    weights = tensors.weights_NK.numpy().astype(dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / WEIGHTS_FILE, weights[None])
        np.save(folder / CONFIG_FILES[0], tensors.config_N3[None])
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None

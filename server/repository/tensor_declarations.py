"""Checks how a model's configuration declares its inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from trimaran.comm.errors import ConfigError


def check_declarations(path: Path, config: ModelConfig) -> None:
    """Refuse declarations that no request could meet. Outputs may be declared twice.

    Raises:
        ConfigError: names the file, the tensor and what is wrong with it.
    """
    names = [tensor.name for tensor in config.input]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{path}: the input '{twice}' is declared twice. Remove one of them.")
    for side, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            _check_tensor(f"{path}: the {side} '{tensor.name}'", tensor)


def _check_tensor(which: str, tensor: Any) -> None:
    if not tensor.name:
        raise ConfigError(f"{which} has no name. Give it one.")
    if tensor.data_type == DataType.TYPE_INVALID:
        raise ConfigError(f"{which} has no data_type. Name one, as in TYPE_FP32.")
    shapes = [("dims", tensor.dims)]
    if tensor.HasField("reshape"):
        shapes.append(("reshape", tensor.reshape.shape))
    for key, shape in shapes:
        if any(size < -1 or size == 0 for size in shape):
            raise ConfigError(
                f"{which} has {key} {list(shape)} but each must be 1 or more, or -1 for any"
            )
    if _elements(tensor.dims) != _elements(shapes[-1][1]):
        raise ConfigError(
            f"{which} has dims {list(tensor.dims)} but reshape {list(tensor.reshape.shape)}, "
            "which is of another size. Make them equal."
        )


def _elements(shape: Sequence[int]) -> tuple[int, int]:
    """How many elements the fixed dimensions make, and how many dimensions vary."""
    return prod(size for size in shape if size != -1), list(shape).count(-1)

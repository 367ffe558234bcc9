"""Checks on declared inputs, outputs and choices of a model's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from math import prod
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from trimaran.comm.errors import ConfigError


def check_enums(path: Path, config: Message) -> None:
    """Refuse an enum number without a name, which protobuf text accepts.

    Raises:
        ConfigError: names the file, the field, the number and the names.
    """
    for name, field, value in _numbers(config, ""):
        if value not in field.enum_type.values_by_number:
            names = ", ".join(each.name for each in field.enum_type.values)
            raise ConfigError(f"{path}: {name} is {value} but must be one of {names}")


def _numbers(message: Message, prefix: str) -> Iterator[tuple[str, Any, int]]:
    """Every enum field that is set: its path, its descriptor and its number."""
    for field, value in message.ListFields():
        if field.type not in (FieldDescriptor.TYPE_ENUM, FieldDescriptor.TYPE_MESSAGE):
            continue
        found = [(prefix + field.name, value)]
        if isinstance(value, Mapping):
            found = [(f"{prefix}{field.name}[{key!r}]", value[key]) for key in value]
        elif isinstance(value, MutableSequence):
            found = [(f"{prefix}{field.name}[{n}]", item) for n, item in enumerate(value)]
        for name, item in found:
            if field.type == FieldDescriptor.TYPE_ENUM:
                yield name, field, item
            elif isinstance(item, Message):
                yield from _numbers(item, f"{name}.")


def check_declarations(path: Path, config: ModelConfig) -> None:
    """Refuse declarations that no request could satisfy. Outputs may be declared twice.

    Raises:
        ConfigError: names the file, the tensor and the fault.
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
    """The product of the fixed dimensions, and the number of variable ones."""
    return prod(size for size in shape if size != -1), list(shape).count(-1)

"""Checks that the choices in a model's configuration are among those that there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableSequence
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from trimaran.comm.errors import ConfigError


def check_enums(path: Path, config: Message) -> None:
    """Refuse a number that stands for no choice, which a configuration may have where a
    choice's name is meant.

    Raises:
        ConfigError: names the file, the field, the number and the names.
    """
    for name, field, value in _numbers(config, ""):
        if value not in field.enum_type.values_by_number:
            names = ", ".join(each.name for each in field.enum_type.values)
            raise ConfigError(f"{path}: {name} is {value} but must be one of {names}")


def _numbers(message: Message, prefix: str) -> Iterator[tuple[str, Any, int]]:
    """Every choice that is set: where it is, its field and its number."""
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

"""JSON bodies of ``infer`` whose tensors hold one value each, read without tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.server.inference.tensor_bytes import from_config
from trimaran.server.protocol.single_values import SINGLES, NotPlainError, is_short_id

_MEMBERS = frozenset(("id", "inputs", "outputs"))
_OF_INPUT = frozenset(("name", "datatype", "shape", "data"))


@dataclass(frozen=True, slots=True)
class PlainInfer:
    """A body in which every input has one value."""

    id: str
    values: dict[str, Any]
    """The value of each input, as its tensor holds the value."""

    outputs: list[str]
    """The requested outputs."""


@dataclass(frozen=True, slots=True)
class _Single:
    """An input that one value fits."""

    datatype: str
    shape: list[int]
    read: Callable[[Any], Any]


class PlainInferReader:
    """Reads the plain bodies for one model. Stateless; never raises for a client's fault."""

    def __init__(self, config: ModelConfig) -> None:
        batch = [1] if config.max_batch_size > 0 else []
        self._inputs: dict[str, _Single] = {}
        for entry in config.input:
            datatype, dims = from_config(entry.data_type), entry.dims
            fits = all(dim in (-1, 1) for dim in dims) and not entry.HasField("reshape")
            if fits and datatype in SINGLES:
                shape = batch + [1] * len(dims)
                self._inputs[entry.name] = _Single(datatype, shape, SINGLES[datatype])
        self._required = frozenset(e.name for e in config.input if not e.optional)

    def read(self, document: object) -> PlainInfer | None:
        """The request of a body's JSON; None of any other request, and of a wrong one."""
        # A subclass stands for an object with repeated keys.
        if type(document) is not dict or not document.keys() <= _MEMBERS:
            return None
        request_id, outputs = document.get("id", ""), document.get("outputs", [])
        if not is_short_id(request_id) or type(outputs) is not list:
            return None
        values = self._values(document.get("inputs"))
        if not values or not all(map(_is_only_name, outputs)):
            return None
        return PlainInfer(request_id, values, [output["name"] for output in outputs])

    def _values(self, entries: object) -> dict[str, Any] | None:
        if type(entries) is not list:
            return None
        values: dict[str, Any] = {}
        for entry in entries:
            if type(entry) is not dict or entry.keys() != _OF_INPUT:
                return None
            name, shape, data = entry["name"], entry["shape"], entry["data"]
            single = self._inputs.get(name) if type(name) is str else None
            if (
                single is None
                or name in values
                or entry["datatype"] != single.datatype
                # True and 1.0 equal 1.
                or shape != single.shape
                or any(type(dim) is not int for dim in shape)
                or type(data) is not list
                or len(data) != 1
            ):
                return None
            try:
                values[name] = single.read(data[0])
            except NotPlainError:
                return None
        return values if self._required <= values.keys() else None


def _is_only_name(output: object) -> bool:
    """Whether an entry of the outputs says nothing but its name."""
    return type(output) is dict and len(output) == 1 and type(output.get("name")) is str

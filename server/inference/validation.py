"""Checks that a request fits a model's configuration, with the texts clients match on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInput

from trimaran.comm.errors import RequestError
from trimaran.server.inference.cooperative import Cooperative, run_at_once
from trimaran.server.inference.request import Tensor
from trimaran.server.inference.tensor_bytes import (
    Array,
    Buffer,
    CutLengthError,
    count_in_chunks,
    element_bytes,
    from_bytes,
    from_config,
    split_in_chunks,
)
from trimaran.server.shared_memory.region_specs import RegionSlice

INVALID_DATATYPE = "<invalid>"
MAX_ELEMENTS = (1 << 63) - 1
MAX_STRINGS = 1 << 20
"""Most strings of an input, as of a body's JSON under the default limit."""

_FEW_BYTES = 64 << 10
"""Strings of fewer bytes are made without counting them first."""

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension "
    "to be prepended to each input shape. If you want to specify the full shape including "
    "the batch dim in your input dims config, try setting max_batch_size to zero. See the "
    "model configuration docs for more info on max_batch_size."
)


@dataclass(slots=True)
class WireInput:
    """An input as a client sent it: the claimed shape, and elements not yet checked against
    it.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Array | Buffer
    """A flat array, or the bytes of a binary tensor."""

    region_slice: RegionSlice | None = None
    """The bytes in memory of the client; ``data`` is empty until they are read."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """An input of the configuration, read once: protobuf takes longer than the checks."""

    datatype: str
    shape: tuple[int, ...]
    """The shape of clients' tensors, with the batch dimension; -1 is any."""

    reshape: tuple[int, ...] | None
    """The shape for the model without the batch dimension; None if it is the same."""

    @classmethod
    def of(cls, entry: ModelInput, config: ModelConfig) -> _Entry:
        batch = (-1,) if config.max_batch_size > 0 else ()
        reshape = tuple(entry.reshape.shape) if entry.HasField("reshape") else None
        return cls(from_config(entry.data_type), batch + tuple(entry.dims), reshape)


class Validator:
    """The checks of one model's requests. Built once per model, shared by all requests."""

    def __init__(self, config: ModelConfig) -> None:
        self._name = config.name
        self._max_batch_size = config.max_batch_size
        self._inputs = {entry.name: _Entry.of(entry, config) for entry in config.input}
        self._outputs = frozenset(entry.name for entry in config.output)
        self._required = [entry.name for entry in config.input if not entry.optional]

    def check(
        self, inputs: Sequence[WireInput], outputs: Iterable[str], request_id: str
    ) -> dict[str, Tensor]:
        """The inputs as tensors, in the order given.

        Raises:
            RequestError: the request does not fit the configuration.
        """
        return run_at_once(self.check_in_chunks(inputs, outputs, request_id))

    def check_in_chunks(
        self, inputs: Sequence[WireInput], outputs: Iterable[str], request_id: str
    ) -> Cooperative[dict[str, Tensor]]:
        """`check`, cooperatively."""
        tensors: dict[str, Tensor] = {}
        try:
            self._check_all(inputs, outputs)
            for wire in inputs:
                tensors[wire.name] = yield from self._tensor(wire)
        except _Prefixed as error:
            raise error.of(request_id) from None
        return tensors

    def check_shapes(
        self, inputs: Sequence[WireInput], outputs: Iterable[str], request_id: str
    ) -> None:
        """Check everything except the elements.

        Raises:
            RequestError: the request does not fit the configuration.
        """
        try:
            self._check_all(inputs, outputs)
            for wire in inputs:
                self._check_entry(wire)
        except _Prefixed as error:
            raise error.of(request_id) from None

    def _check_all(self, inputs: Sequence[WireInput], outputs: Iterable[str]) -> None:
        given: dict[str, WireInput] = {}
        for wire in inputs:
            if wire.name in given:
                raise _Prefixed(f"input '{wire.name}' already exists in request")
            given[wire.name] = wire
        for name in outputs:
            if name not in self._outputs:
                raise RequestError(
                    f"unexpected inference output '{name}' for model '{self._name}'"
                )
        self._check_names(given)
        self._check_batch(inputs)

    def _check_names(self, given: dict[str, WireInput]) -> None:
        most, least = len(self._inputs), len(self._required)
        if not least <= len(given) <= most:
            expected = (
                f"expected {most} inputs"
                if most == least
                else f"expected number of inputs between {least} and {most}"
            )
            missing = [name for name in self._required if name not in given]
            raise _Prefixed(
                f"{expected} but got {len(given)} inputs for model '{self._name}'. "
                f"Got input(s) {_quoted(given)}, but missing required input(s) "
                f"{_quoted(missing)}. Please provide all required input(s)."
            )
        for name in given:
            if name not in self._inputs:
                raise RequestError(
                    f"unexpected inference input '{name}' for model '{self._name}'"
                )
        missing = [name for name in self._required if name not in given]
        if missing:
            raise _Prefixed(
                f"expected number of inputs between {least} and {most} but got {len(given)} "
                f"inputs for model '{self._name}'. Got input(s) {_quoted(given)}, but missing "
                f"required input(s) {_quoted(missing)}. Please provide all required input(s)."
            )

    def _check_batch(self, inputs: Sequence[WireInput]) -> None:
        for wire in inputs:
            if min(wire.shape, default=0) < 0:
                raise _Prefixed(
                    f"All input dimensions should be specified for input '{wire.name}' for "
                    f"model '{self._name}', got {_dims(wire.shape)}"
                )
        if self._max_batch_size == 0:
            return
        batch_size: int | None = None
        for wire in inputs:
            if not wire.shape:
                raise _Prefixed(
                    f"input '{wire.name}' has no shape but model requires batch dimension for "
                    f"'{self._name}'"
                )
            if batch_size is None:
                batch_size = wire.shape[0]
            elif wire.shape[0] != batch_size:
                raise _Prefixed(
                    f"input '{wire.name}' batch size does not match other inputs for "
                    f"'{self._name}'"
                )
        if batch_size is not None and batch_size > self._max_batch_size:
            raise _Prefixed(
                f"inference request batch-size must be <= {self._max_batch_size} for "
                f"'{self._name}'"
            )
        if batch_size == 0:
            raise _Prefixed(f"inference request batch-size must be >= 1 for '{self._name}'")

    def _tensor(self, wire: WireInput) -> Cooperative[Tensor]:
        entry = self._check_entry(wire)
        count = math.prod(wire.shape)
        if count > MAX_ELEMENTS:
            raise _Prefixed(too_many_elements(wire))
        if wire.datatype == "BYTES":
            if isinstance(wire.data, np.ndarray):
                flat = wire.data
            else:
                flat = yield from self._strings(wire, wire.data, count)
            self._check_strings(wire, len(flat), count)
        else:
            flat = self._numbers(wire, count)
        return Tensor(wire.name, wire.datatype, flat.reshape(self._served_shape(wire, entry)))

    def _check_entry(self, wire: WireInput) -> _Entry:
        """The configuration entry that an input fits, elements not yet checked."""
        entry = self._inputs[wire.name]
        if wire.datatype != entry.datatype:
            raise _Prefixed(
                f"inference input '{wire.name}' data-type is '{wire.datatype}', but model "
                f"'{self._name}' expects '{entry.datatype}'"
            )
        self._check_shape(wire, entry)
        return entry

    def _check_shape(self, wire: WireInput, entry: _Entry) -> None:
        expected = entry.shape
        fits = len(expected) == len(wire.shape)
        for want, got in zip(expected, wire.shape, strict=False):
            fits = fits and want in (-1, got)
        if not fits:
            raise _Prefixed(
                f"unexpected shape for input '{wire.name}' for model '{self._name}'. Expected "
                f"{_dims(expected)}, got {_dims(wire.shape)}. "
                + (_BATCH_NOTE if self._max_batch_size > 0 else "")
            )

    def _served_shape(self, wire: WireInput, entry: _Entry) -> tuple[int, ...]:
        """The shape that the model sees: the client's, or the configured ``reshape``."""
        target = entry.reshape
        if target is None:
            return wire.shape
        batch = wire.shape[:1] if self._max_batch_size > 0 else ()
        variable = iter(
            got for want, got in zip(entry.shape, wire.shape, strict=True) if want == -1
        )
        if batch:
            next(variable)
        return batch + tuple(next(variable, -1) if dim == -1 else dim for dim in target)

    def _numbers(self, wire: WireInput, count: int) -> Array:
        """The elements of fixed size."""
        if isinstance(wire.data, np.ndarray):
            num_bytes = wire.data.nbytes
        else:
            num_bytes = len(memoryview(wire.data))
        expected = count * element_bytes(wire.datatype)
        if num_bytes != expected:
            raise _Prefixed(
                f"input byte size mismatch for input '{wire.name}' for model '{self._name}'. "
                f"Expected {expected}, got {num_bytes}"
            )
        if isinstance(wire.data, np.ndarray):
            return wire.data
        return from_bytes(wire.data, wire.datatype, (count,))

    def _strings(self, wire: WireInput, raw: Buffer, expected: int) -> Cooperative[Array]:
        """The elements of a binary BYTES tensor, whose number is checked before many of them
        are made: each takes some 50 bytes of memory, whatever its length.
        """
        try:
            if len(memoryview(raw)) > _FEW_BYTES:
                count = yield from count_in_chunks(raw, wire.name, MAX_STRINGS)
                if count > MAX_STRINGS:
                    raise _Prefixed(
                        f"input '{wire.name}' has more than {MAX_STRINGS} strings. Send "
                        "several requests."
                    )
                self._check_strings(wire, count, expected)
            return (yield from split_in_chunks(raw, wire.name))
        except CutLengthError as error:
            # As in Triton, the error of a cut string names neither the request nor the model.
            raise _Prefixed(error.text_for(self._name)) from None

    def _check_strings(self, wire: WireInput, count: int, expected: int) -> None:
        if count > expected:
            raise _Prefixed(
                f"unexpected number of string elements {count} for inference input "
                f"'{wire.name}' for model '{self._name}', expecting {expected}"
            )
        if count < expected:
            raise _Prefixed(
                f"expected {expected} string elements for inference input '{wire.name}' for "
                f"model '{self._name}', got {count}"
            )


def too_many_elements(wire: WireInput) -> str:
    """The error of an input with more elements than any server can count."""
    return (
        f"invalid shape for input '{wire.name}': shape {_dims(wire.shape)} has more than "
        f"{MAX_ELEMENTS} elements"
    )


class _Prefixed(Exception):
    """The text of a failed check, which clients see with the request id in front."""

    def of(self, request_id: str) -> RequestError:
        """The error of a request."""
        return RequestError(f"[request id: {request_id or '<id_unknown>'}] {self}")


def _dims(shape: Iterable[int]) -> str:
    return "[" + ",".join(str(dim) for dim in shape) + "]"


def _quoted(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"

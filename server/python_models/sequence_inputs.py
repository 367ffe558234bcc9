"""Inputs that ``sequence_batching`` adds to requests: control inputs and states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelSequenceBatching

from trimaran.comm.errors import ConfigError, RequestError
from trimaran.server.inference.request import Tensor
from trimaran.server.inference.tensor_bytes import NUMPY_TYPES, from_config
from trimaran.server.python_models.wire import SEQUENCE_END, SEQUENCE_START, Packed, pack

_Control = ModelSequenceBatching.Control
_IDS = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")
_FLAGS = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}
_INITIAL_STATE = "initial_state"


@dataclass(frozen=True, slots=True)
class _ControlInput:
    """One control input; ``values`` are those of false and true, and empty for the id."""

    name: str
    kind: int
    datatype: str
    values: tuple[float, ...] = ()


class SequenceInputs:
    """Makes the inputs that a model's ``sequence_batching`` declares."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        """``path`` is the configuration's file; ``initial_state/`` lies beside it.

        Raises:
            ConfigError: a declaration contradicts itself or another one.
        """
        batching = config.sequence_batching
        self._path = path
        self.is_batching = config.max_batch_size > 0
        """Whether the first dimension of inputs is the batch's."""
        self._num_batch_dims = int(self.is_batching)
        self._controls = [c for each in batching.control_input for c in self._control(each)]
        self._check_names(config)
        self._initial = [self._initial_state(state) for state in batching.state]
        self._inputs = {state.output_name: state.input_name for state in batching.state}
        self.state_outputs = {s.output_name: from_config(s.data_type) for s in batching.state}
        """Outputs that hold the next state, with their datatypes."""
        self._for_clients = {output.name for output in config.output}

    def controls(
        self, sequence_id: int | str, flags: int, *, is_ready: bool = True
    ) -> list[Packed]:
        """The control inputs of one request, of shape [1], or [1, 1] for models that batch.

        Raises:
            RequestError: the id has no form in the datatype of the input.
        """
        told = {
            _Control.CONTROL_SEQUENCE_START: bool(flags & SEQUENCE_START),
            _Control.CONTROL_SEQUENCE_END: bool(flags & SEQUENCE_END),
            _Control.CONTROL_SEQUENCE_READY: is_ready,
        }
        made = []
        for control in self._controls:
            if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
                value: object = _id_value(control, sequence_id)
            else:
                value = control.values[told[control.kind]]
            shape = (1,) * (1 + self._num_batch_dims)
            data = np.full(shape, value, NUMPY_TYPES[control.datatype])
            made.append(pack(Tensor(control.name, control.datatype, data)))
        return made

    def initial_states(self) -> dict[str, Packed]:
        """The state inputs of a sequence's first request, by their names."""
        return {packed[0]: packed for packed in self._initial}

    def take_states(self, tensors: list[Packed], states: dict[str, Packed]) -> list[Packed]:
        """Put the state outputs of a response into ``states``; returns the client's outputs."""
        for name, datatype, shape, data in tensors:
            if name in self._inputs:
                given = self._inputs[name]
                states[given] = [given, datatype, shape, memoryview(bytes(data))]
        return [t for t in tensors if t[0] not in self._inputs or t[0] in self._for_clients]

    # ---- the configuration --------------------------------------------------------------

    def _control(self, entry: ModelSequenceBatching.ControlInput) -> list[_ControlInput]:
        return [self._one_control(entry.name, control) for control in entry.control]

    def _one_control(self, name: str, control: ModelSequenceBatching.Control) -> _ControlInput:
        kind = _Control.Kind.Name(control.kind)
        given = [field for field in _FLAGS if getattr(control, field)]
        if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
            datatype = "none"
            if control.data_type != DataType.TYPE_INVALID:
                datatype = from_config(control.data_type)
            if datatype not in _IDS or given:
                self._refuse(
                    f"control input '{name}' of {kind} has the data_type {datatype}"
                    f"{' and ' + given[0] if given else ''}; give it one data_type of "
                    "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
                )
            return _ControlInput(name, control.kind, datatype)
        if len(given) != 1 or len(getattr(control, given[0])) != 2:
            self._refuse(
                f"control input '{name}' of {kind} needs one of {', '.join(_FLAGS)}, with two "
                "values, for false and for true"
            )
        values = tuple(getattr(control, given[0]))
        return _ControlInput(name, control.kind, _FLAGS[given[0]], values)

    def _check_names(self, config: ModelConfig) -> None:
        states = config.sequence_batching.state
        kinds = [_Control.Kind.Name(control.kind) for control in self._controls]
        names = [tensor.name for tensor in config.input]
        names += [control.name for control in self._controls]
        names += [state.input_name for state in states]
        outputs = [state.output_name for state in states]
        for what, found in (("input", names), ("output", outputs), ("control", kinds)):
            twice = {each for each in found if found.count(each) > 1}
            if twice:
                self._refuse(f"the {what} '{min(twice)}' is declared twice; keep one of them")
        if "" in names or "" in outputs:
            self._refuse("a control input or a state has no name; name its tensors")

    def _initial_state(self, state: ModelSequenceBatching.State) -> Packed:
        """The declared initial state, or zeros. Variable dimensions without one are 1 long."""
        datatype, dims, data = from_config(state.data_type), list(state.dims), None
        if state.data_type == DataType.TYPE_INVALID:
            self._refuse(f"state '{state.input_name}' has no data_type; name its type")
        if state.use_growable_memory:
            self._refuse(
                f"use_growable_memory of state '{state.input_name}' needs GPU memory, and "
                "states are kept in the host's; leave it out"
            )
        if len(state.initial_state) > 1:
            self._refuse(f"state '{state.input_name}' has several initial states; keep one")
        for initial in state.initial_state:
            dims, fits = list(initial.dims), _dims_fit(initial.dims, state.dims)
            if initial.data_type != state.data_type or not fits:
                self._refuse(
                    f"the initial state of '{state.input_name}' is {dims} of "
                    f"{from_config(initial.data_type)}, but the state is {list(state.dims)} "
                    f"of {datatype}; make them equal"
                )
            if initial.HasField("data_file"):
                data = self._read(initial.data_file)
        shape = [1] * self._num_batch_dims + [1 if dim == -1 else dim for dim in dims]
        count = math.prod(shape)
        size = 4 if datatype == "BYTES" else NUMPY_TYPES[datatype].itemsize
        if data is None:
            data = bytes(count * size)
        elif datatype != "BYTES" and len(data) != count * size:
            self._refuse(
                f"the file of the initial state of '{state.input_name}' has {len(data)} bytes, "
                f"but {shape} of {datatype} needs {count * size}"
            )
        return [state.input_name, datatype, shape, memoryview(data)]

    def _read(self, name: str) -> bytes:
        path = self._path.parent / _INITIAL_STATE / name
        try:
            return path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} of sequence_batching cannot be read: {error}") from error

    def _refuse(self, text: str) -> None:
        raise ConfigError(f"{self._path}: sequence_batching: {text}.")


def as_null(inputs: Sequence[Packed]) -> list[Packed]:
    """Inputs of the same shapes as these, of zeros and empty strings."""
    made = []
    for name, datatype, shape, data in inputs:
        size = 4 * math.prod(shape) if datatype == "BYTES" else len(data)
        made.append([name, datatype, shape, memoryview(bytes(size))])
    return made


def with_states(states: Mapping[str, Packed]) -> list[Packed]:
    """The state inputs of the next request. Sending changes a packed tensor, so these are
    copies.
    """
    return [list(packed) for packed in states.values()]


def _id_value(control: _ControlInput, sequence_id: int | str) -> object:
    if control.datatype == "BYTES":
        return str(sequence_id).encode("utf-8", "surrogateescape")
    if isinstance(sequence_id, str):
        # A null request has no id.
        if not sequence_id:
            return 0
        raise RequestError(
            f"sequence id '{sequence_id}' is a string, but the model's control input "
            f"'{control.name}' is {control.datatype}; send a number"
        )
    limits = np.iinfo(NUMPY_TYPES[control.datatype])
    if not limits.min <= sequence_id <= limits.max:
        raise RequestError(
            f"sequence id {sequence_id} is outside of {limits.min} to {limits.max}, the "
            f"numbers of the model's control input '{control.name}' of {control.datatype}"
        )
    return sequence_id


def _dims_fit(dims: Sequence[int], declared: Sequence[int]) -> bool:
    """Whether fixed dimensions are among the declared ones, where -1 is any length."""
    return len(dims) == len(declared) and all(
        given > 0 and wanted in (-1, given)
        for given, wanted in zip(dims, declared, strict=True)
    )

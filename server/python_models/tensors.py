"""The tensors of ``triton_python_backend_utils``, and its names for their types."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc.model_config_pb2 import DataType

from trimaran.server.inference.request import Tensor as ServedTensor
from trimaran.server.inference.tensor_bytes import NUMPY_TYPES, from_config
from trimaran.server.python_models import wire

_CPU = 1
_BF16 = "BF16"
_NUMBERS = {
    number: "BYTES" if name == "TYPE_STRING" else name.removeprefix("TYPE_")
    for name, number in DataType.items()
    if name != "TYPE_INVALID"
}
_NAMES = {dtype: name for name, dtype in NUMPY_TYPES.items() if name != _BF16}
_SCALARS: dict[str, Any] = {
    name: np.object_ if name == "BYTES" else dtype.type for name, dtype in NUMPY_TYPES.items()
}


class TritonModelException(Exception):
    """An error raised to the user code of a model."""

    def message(self) -> str:
        """The text."""
        return str(self)


class Tensor:
    """A named array in this process's memory.

    ``BYTES`` tensors hold ``bytes`` objects. ``BF16`` tensors hold uint16 bit patterns, because
    numpy has no bfloat16.
    """

    def __init__(self, name: str, array: npt.NDArray[Any]) -> None:
        """Wrap an array, without a copy where possible.

        Raises:
            TritonModelException: not an array, or an array of an unsupported type.
        """
        if not isinstance(array, np.ndarray):
            raise TritonModelException(
                f"tensor '{name}' is given a {type(array).__name__}, not a numpy array"
            )
        if array.dtype.kind in "SU":
            # Fixed-width strings lose trailing zero bytes; objects keep them.
            array = array.astype(object)
        self._name = str(name)
        self._array = array
        self._datatype = _datatype(name, array)

    @classmethod
    def from_packed(cls, packed: wire.Packed) -> Tensor:
        """A tensor received over the wire, in its own memory."""
        served = wire.unpack(packed, is_writable=True)
        tensor = cls.__new__(cls)
        tensor._name, tensor._datatype = served.name, served.datatype
        tensor._array = served.data
        return tensor

    def to_packed(self, datatype: str | None = None) -> wire.Packed:
        """The wire form as ``datatype``; uint16 bit patterns may be BF16.

        Raises:
            TritonModelException: the tensor has another type.
        """
        chosen = self._datatype
        if datatype == _BF16 and chosen == "UINT16":
            chosen = _BF16
        if datatype not in (None, chosen):
            raise TritonModelException(
                f"output '{self._name}' is {chosen}, but the model's config.pbtxt says "
                f"{datatype}. Convert it, as with astype(), or change the configuration."
            )
        return wire.pack(ServedTensor(self._name, chosen, self._array))

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """The tensor of another library, or its capsule, without a copy if it is in host
        memory.

        Raises:
            TritonModelException: not contiguous, or of a type that numpy lacks.
        """
        source = tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)
        if source.__dlpack_device__()[0] != _CPU and hasattr(source, "cpu"):
            source = source.cpu()
        try:
            array = np.from_dlpack(source)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TritonModelException(
                f"tensor '{name}' cannot be taken: {error} (bfloat16 goes as a view of uint16)"
            ) from error
        if not array.flags.c_contiguous:
            raise TritonModelException(
                f"tensor '{name}' is not contiguous in C order. Make it so first."
            )
        return Tensor(name, array)

    def name(self) -> str:
        """The name."""
        return self._name

    def as_numpy(self) -> npt.NDArray[Any]:
        """The elements, not copied."""
        return self._array

    def triton_dtype(self) -> int:
        """The number of the type in a model configuration."""
        return numpy_to_triton_type(self._array.dtype) if self._datatype != _BF16 else 14

    def shape(self) -> list[int]:
        """The dimensions."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Always true: tensors are in host memory."""
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule of the tensor, without a copy."""
        return self._array.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)


class _Capsule:
    """A DLPack capsule in the form that numpy expects."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type of a number of a model configuration."""
    return _SCALARS[_NUMBERS[data_type]]


def numpy_to_triton_type(data_type: Any) -> int:
    """The number in a model configuration of a numpy type."""
    dtype = np.dtype(data_type)
    if dtype.kind in "SUO":
        return int(DataType.TYPE_STRING)
    return int(DataType.Value(f"TYPE_{_known(dtype)}"))


def triton_string_to_numpy(name: str) -> Any:
    """The numpy type of a name such as ``TYPE_FP32``."""
    return _SCALARS[from_config(DataType.Value(name))]


def _datatype(name: str, array: npt.NDArray[Any]) -> str:
    if array.dtype.kind == "O":
        return "BYTES"
    try:
        return _known(array.dtype)
    except KeyError:
        raise TritonModelException(
            f"tensor '{name}' has the numpy type {array.dtype}, which no tensor has; known "
            f"types: {', '.join(map(str, _NAMES))}"
        ) from None


def _known(dtype: np.dtype[Any]) -> str:
    return _NAMES[dtype.newbyteorder("=")]

"""The tensors of one sample of a request, read by name and type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trimaran.comm.errors import RequestError
from trimaran.server.inference.request import Tensor


class SampleInputs:
    """Sample ``index`` of a batched request. An input that is absent or empty is None."""

    def __init__(self, inputs: Mapping[str, Tensor], index: int, is_batched: bool) -> None:
        self._inputs = inputs
        self._index = index
        self._is_batched = is_batched

    @property
    def names(self) -> Iterable[str]:
        """The inputs that are present, maybe empty."""
        return self._inputs

    def has_any(self, names: frozenset[str]) -> bool:
        """Whether an input of these names is present, maybe empty."""
        return not names.isdisjoint(self._inputs)

    def array(self, name: str) -> npt.NDArray[Any] | None:
        """The sample's array without the batch dimension."""
        tensor = self._inputs.get(name)
        if tensor is None or tensor.data.size == 0:
            return None
        return tensor.data[self._index, ...] if self._is_batched else tensor.data

    def scalar(self, *names: str) -> Any:
        """The first element of the first of these inputs that is present, or None."""
        for name in names:
            tensor = self._inputs.get(name)
            if tensor is None:
                continue
            if tensor.data.size == 1:
                # Most inputs of most requests: the array of the only sample is not cut out.
                return tensor.data.item()
            array = self.array(name)
            if array is not None:
                return array.item(0)
        return None

    def flag(self, *names: str) -> bool:
        """As `scalar`, as a truth value; absent is False."""
        return bool(self.scalar(*names))

    def ids(self, name: str) -> list[int]:
        """A flat list of integers; absent is empty."""
        array = self.array(name)
        return [] if array is None else array.reshape(-1).tolist()

    def texts(self, name: str) -> list[str]:
        """A flat list of strings; absent is empty.

        Raises:
            RequestError: not UTF-8.
        """
        array = self.array(name)
        return [] if array is None else [to_text(name, item) for item in array.flat]


class PlainInputs(SampleInputs):
    """One sample whose inputs hold one plain value each: numbers, flags and texts."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @property
    def names(self) -> Iterable[str]:
        """See `SampleInputs`."""
        return self._values

    def has_any(self, names: frozenset[str]) -> bool:
        """See `SampleInputs`."""
        return not names.isdisjoint(self._values)

    def array(self, name: str) -> npt.NDArray[Any] | None:
        """The value as the array of one element."""
        value = self._values.get(name)
        return None if value is None else np.array([value])

    def scalar(self, *names: str) -> Any:
        """See `SampleInputs`."""
        for name in names:
            value = self._values.get(name)
            if value is not None:
                return value
        return None


def to_text(name: str, raw: Any) -> str:
    """One element of a BYTES tensor.

    Raises:
        RequestError: not UTF-8.
    """
    try:
        return raw if isinstance(raw, str) else bytes(raw).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"input '{name}' is not UTF-8 text: {error}") from None


def batch_size(inputs: Mapping[str, Tensor], name: str, is_batched: bool) -> int:
    """Samples of a request, by the first dimension of this input."""
    tensor = inputs.get(name)
    return int(tensor.shape[0]) if is_batched and tensor is not None else 1

"""Arrays to the input tensors of a gRPC request, and a response's outputs back to arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from trimaran.comm.errors import ConfigError

Array = np.ndarray[Any, Any]


def tensor(name: str, values: Any, dtype: Any) -> Any:
    """An input tensor. ``dtype`` is numpy's, ``str`` for text, or ``"BF16"``.

    Raises:
        ConfigError: a value that such a tensor cannot hold.
    """
    if dtype is str:
        array = np.array(_as_bytes(name, values), dtype=object)
        datatype = "BYTES"
    elif dtype == "BF16":
        array = np.asarray(values, dtype=triton_to_np_dtype("BF16"))
        datatype = "BF16"
    else:
        array = _as_numbers(name, values, np.dtype(dtype))
        datatype = np_to_triton_dtype(array.dtype)
    holder = grpcclient.InferInput(name, list(array.shape), datatype)
    holder.set_data_from_numpy(array)
    return holder


def row(name: str, value: Any, dtype: Any, num_rows: int = 1) -> Any:
    """A tensor that holds one value in each row of the batch, or nothing for None."""
    return None if value is None else tensor(name, [[value]] * num_rows, dtype)


def present(tensors: Sequence[Any]) -> list[Any]:
    """The tensors that are to be sent: those without a value are not."""
    return [each for each in tensors if each is not None]


def outputs_of(result: Any) -> dict[str, Array]:
    """The outputs of one response, by name."""
    return {
        output.name: result.as_numpy(output.name) for output in result.get_response().outputs
    }


def _as_numbers(name: str, values: Any, dtype: np.dtype[Any]) -> Array:
    try:
        return np.asarray(values, dtype=dtype)
    except OverflowError:
        limits = np.iinfo(dtype)
        outside = next(
            value
            for value in np.asarray(values, dtype=object).flat
            if not limits.min <= value <= limits.max
        )
        raise ConfigError(
            f"{name}: {outside} cannot be sent. Name a number from {limits.min} to "
            f"{limits.max}."
        ) from None


def _as_bytes(name: str, values: Any) -> Any:
    if isinstance(values, str):
        try:
            return values.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{name}: {values!r} is not a text in UTF-8. Convert it first."
            ) from None
    if isinstance(values, Sequence) and not isinstance(values, bytes):
        return [_as_bytes(name, value) for value in values]
    return values

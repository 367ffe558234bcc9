"""Arrays to the input tensors of a gRPC request, and a response's outputs back to arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

Array = np.ndarray[Any, Any]


def tensor(name: str, values: Any, dtype: Any) -> Any:
    """An input tensor. ``dtype`` is numpy's, ``str`` for text, or ``"BF16"``."""
    if dtype is str:
        array = np.array(_as_bytes(values), dtype=object)
        datatype = "BYTES"
    elif dtype == "BF16":
        array = np.asarray(values, dtype=np.float32)
        datatype = "BF16"
    else:
        array = np.asarray(values, dtype=dtype)
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


def _as_bytes(values: Any) -> Any:
    if isinstance(values, str):
        return values.encode()
    if isinstance(values, Sequence) and not isinstance(values, bytes):
        return [_as_bytes(value) for value in values]
    return values

"""The tensor datatypes of the protocol: their names, element sizes and numpy types."""

from __future__ import annotations

from typing import Any

import numpy as np
from tritonclient.grpc.model_config_pb2 import DataType

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
    # Bit patterns: numpy has no bfloat16.
    "BF16": np.dtype("<u2"),
}

ONLY_BINARY = frozenset(("FP16", "BF16"))
"""Datatypes that have no JSON form."""

LENGTH_PREFIX_BYTES = 4
"""Each element of a BYTES tensor is preceded by its length."""


def element_bytes(datatype: str) -> int:
    """Bytes of one element; 0 for BYTES, whose elements vary."""
    return 0 if datatype == "BYTES" else NUMPY_TYPES[datatype].itemsize


def from_config(data_type: int) -> str:
    """The protocol's name of a model configuration's data type (TYPE_STRING is BYTES)."""
    name: str = DataType.Name(data_type)
    return "BYTES" if name == "TYPE_STRING" else name.removeprefix("TYPE_")

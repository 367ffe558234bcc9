"""Inputs and outputs of tritonclient's HTTP and gRPC modules, made from plain values."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from tritonclient.utils import np_to_triton_dtype

DTYPES = {
    "text_input": np.object_, "max_tokens": np.int32, "stream": np.bool_, "stop": np.bool_,
    "input_ids": np.int32, "input_lengths": np.int32, "request_output_len": np.int32,
    "streaming": np.bool_, "top_k": np.int32, "seed": np.uint64, "temperature": np.float32,
    "return_log_probs": np.bool_,
}  # fmt: skip
TEXT = {"text_input": "It was a dark and", "max_tokens": 12}
IDS = {"input_ids": [0, 547, 1319], "input_lengths": 3, "request_output_len": 12}


def inputs(module: ModuleType, **values: Any) -> list[Any]:
    """One sample's inputs of ``tritonclient.http`` or ``tritonclient.grpc``."""
    made = []
    for name, value in values.items():
        row = value if isinstance(value, list) else [value]
        row = [item.encode() if isinstance(item, str) else item for item in row]
        array = np.array([row], dtype=DTYPES[name])
        tensor = module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def outputs(module: ModuleType, *names: str) -> list[Any]:
    """Requested outputs."""
    return [module.InferRequestedOutput(name) for name in names]


def text_of(result: Any) -> str:
    """The only text of an answer of a text model."""
    (text,) = result.as_numpy("text_output").reshape(-1)
    return bytes(text).decode()

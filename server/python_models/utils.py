"""What a model's code imports as ``triton_python_backend_utils``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trimaran.server.inference.tensor_bytes import split_strings, to_bytes
from trimaran.server.python_models.inference_request import (
    MEMORY_CPU,
    MEMORY_GPU,
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    InferenceRequest,
    PreferredMemory,
    ask,
)
from trimaran.server.python_models.link import the_link
from trimaran.server.python_models.model_metrics import Metric, MetricFamily
from trimaran.server.python_models.responses import (
    RESPONSE_COMPLETE_FINAL,
    InferenceResponse,
    InferenceResponseSender,
    TritonError,
)
from trimaran.server.python_models.tensors import (
    Tensor,
    TritonModelException,
    numpy_to_triton_type,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from trimaran.server.python_models.wire import Log

__all__ = [
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "Logger",
    "Metric",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

TRITONSERVER_RESPONSE_COMPLETE_FINAL = RESPONSE_COMPLETE_FINAL
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = RELEASE_RESCHEDULE
TRITONSERVER_MEMORY_CPU = MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MEMORY_GPU


class ModelConfig:
    """The type that ``auto_complete_config`` names; no configuration is ever completed."""


class Logger:
    """Lines for the server's log."""

    INFO, WARNING, ERROR, VERBOSE = range(4)
    _LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)

    @classmethod
    def log(cls, message: str, level: int = INFO) -> None:
        """Log at one of the levels of this class."""
        the_link().send(Log(level=cls._LEVELS[level], text=str(message)))

    @classmethod
    def log_info(cls, message: str) -> None:
        """Log what operators may want to know."""
        cls.log(message, cls.INFO)

    @classmethod
    def log_warn(cls, message: str) -> None:
        """Log what may need somebody's attention."""
        cls.log(message, cls.WARNING)

    @classmethod
    def log_error(cls, message: str) -> None:
        """Log what went wrong."""
        cls.log(message, cls.ERROR)

    @classmethod
    def log_verbose(cls, message: str) -> None:
        """Log what only debugging needs."""
        cls.log(message, cls.VERBOSE)


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    """A request's input of this name, or None."""
    return next((t for t in request.inputs() if t.name() == name), None)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    """A response's output of this name, or None."""
    return next((t for t in response.output_tensors() if t.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """An input's part of a model configuration, or None."""
    return next((t for t in model_config.get("input", ()) if t["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """An output's part of a model configuration, or None."""
    return next((t for t in model_config.get("output", ()) if t["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether a model configuration is that of a decoupled model."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def serialize_byte_tensor(tensor: npt.NDArray[Any]) -> bytes | None:
    """The strings of an array, each after its length in 4 bytes; None for no strings."""
    return to_bytes(tensor, "BYTES") if tensor.size else None


def deserialize_bytes_tensor(encoded: bytes) -> npt.NDArray[np.object_]:
    """The inverse of `serialize_byte_tensor`, flat."""
    return split_strings(encoded, "")


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a model of the server could run now."""
    return bool(ask("is_model_ready", name=model_name, version=str(model_version))["ready"])


def load_model(
    model_name: str, config: str = "", files: Mapping[str, bytes] | None = None
) -> None:
    """Load a model; ``files`` has paths after ``file:``, ``config`` is JSON.

    Raises:
        TritonModelException: it was not loaded.
    """
    ask("load_model", name=model_name, config=config, files=dict(files or {}))


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Begin to unload a model.

    Raises:
        TritonModelException: the server does not let models be unloaded.
    """
    ask("unload_model", name=model_name, unload_dependents=unload_dependents)

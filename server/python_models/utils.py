"""The module that user code imports as ``triton_python_backend_utils``, metrics included."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trimaran.server.inference.tensor_bytes import split_strings, to_bytes
from trimaran.server.python_models import wire
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

_numbers = itertools.count(1)
_KINDS = (wire.COUNTER, wire.GAUGE, wire.HISTOGRAM)


class Metric:
    """One series, which is removed with the last object for it in any process."""

    def __init__(
        self, family: MetricFamily, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> None:
        """Show the series.

        Raises:
            TritonModelException: the family's name is taken, or has other buckets.
        """
        self._number = next(_numbers)
        self._kind = family.kind
        described = {
            "name": family.name,
            "description": family.description,
            "kind": family.kind,
            "bounds": [float(bound) for bound in buckets],
        }
        ask("metric_hold", metric=self._number, family=described, labels=dict(labels))

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge.

        Raises:
            TritonModelException: a counter would fall.
        """
        self._expect("incremented", wire.COUNTER, wire.GAUGE)
        if self._kind == wire.COUNTER and value < 0:
            raise TritonModelException(f"a counter cannot be incremented by {value}, below 0")
        self._change("add", value)

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._expect("set", wire.GAUGE)
        self._change("set", value)

    def observe(self, value: float) -> None:
        """Add a value to a histogram."""
        self._expect("given values to observe", wire.HISTOGRAM)
        self._change("observe", value)

    def value(self) -> float:
        """The value of a counter or a gauge, including changes by other processes."""
        self._expect("asked for one value", wire.COUNTER, wire.GAUGE)
        return float(ask("metric_value", metric=self._number)["value"])

    def _expect(self, what: str, *kinds: str) -> None:
        if self._kind not in kinds:
            raise TritonModelException(
                f"a {self._kind} cannot be {what}; a {' or a '.join(kinds)} can"
            )

    def _change(self, verb: str, amount: float) -> None:
        change = wire.MetricChange(metric=self._number, verb=verb, amount=float(amount))
        the_link().send(change)

    def __del__(self) -> None:
        self._change("drop", 0.0)


class MetricFamily:
    """A name under which series with different labels are shown."""

    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, name: str, description: str, kind: int) -> None:
        """Name a family.

        Raises:
            TritonModelException: ``kind`` is not a constant of this class.
        """
        if kind not in range(len(_KINDS)):
            raise TritonModelException(
                f"metric family '{name}' is of kind {kind}, which is none of COUNTER, GAUGE "
                "and HISTOGRAM"
            )
        self.name = name
        self.description = description
        self.kind = _KINDS[kind]

    def Metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] = ()
    ) -> Metric:
        """A series of this family; ``buckets`` are a histogram's upper bounds.

        Raises:
            TritonModelException: buckets of another kind of metric, or of a histogram with
                others.
        """
        if bool(buckets) != (self.kind == wire.HISTOGRAM):
            raise TritonModelException(
                f"a metric of the {self.kind} '{self.name}' is given the buckets "
                f"{list(buckets)}; a histogram has some, others have none"
            )
        return Metric(self, labels or {}, buckets)


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
    """The type that ``auto_complete_config`` names; configurations are never completed."""


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
        """Log information for operators."""
        cls.log(message, cls.INFO)

    @classmethod
    def log_warn(cls, message: str) -> None:
        """Log an event that may need attention."""
        cls.log(message, cls.WARNING)

    @classmethod
    def log_error(cls, message: str) -> None:
        """Log an error."""
        cls.log(message, cls.ERROR)

    @classmethod
    def log_verbose(cls, message: str) -> None:
        """Log details for debugging."""
        cls.log(message, cls.VERBOSE)


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    """A request's input of this name, or None."""
    return next((t for t in request.inputs() if t.name() == name), None)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    """A response's output of this name, or None."""
    return next((t for t in response.output_tensors() if t.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """The entry of an input in a model configuration, or None."""
    return next((t for t in model_config.get("input", ()) if t["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """The entry of an output in a model configuration, or None."""
    return next((t for t in model_config.get("output", ()) if t["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether a model configuration has the decoupled policy."""
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
        TritonModelException: the model was not loaded.
    """
    ask("load_model", name=model_name, config=config, files=dict(files or {}))


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Begin to unload a model.

    Raises:
        TritonModelException: the server does not allow unloading.
    """
    ask("unload_model", name=model_name, unload_dependents=unload_dependents)

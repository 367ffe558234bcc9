"""Error texts that clients look for, in the words of both implementations of a token model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackendTexts:
    """What one ``backend`` of ``config.pbtxt`` says."""

    not_decoupled: str
    """A stream of a model that is not decoupled."""

    no_stop_id: str
    """A stop request without an id."""


TENSORRT_LLM = BackendTexts(
    not_decoupled="Streaming is only supported if model is deployed using decoupled mode.",
    no_stop_id="Trying to stop a request but request ID is not provided",
)
_PYTHON = BackendTexts(
    not_decoupled="Streaming is only supported in decoupled mode.",
    no_stop_id="A request id must be provided for request cancellation",
)


def texts_of(backend: str) -> BackendTexts:
    """The texts of a backend by its name."""
    return _PYTHON if backend == "python" else TENSORRT_LLM

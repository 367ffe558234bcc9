"""Errors in OpenAI's form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.http.messages import JSON, retry_header
from trimaran.server.protocol import json_access
from trimaran.server.protocol.infer_json import BodyTooLargeError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    501: "invalid_request_error",
}
_TOO_LARGE = 413
_CODES = {401: "invalid_api_key", 404: "not_found", 501: "unsupported"}


class ApiError(RequestError):
    """A request that is refused, with the field that is wrong and OpenAI's code for it."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: ErrorKind = ErrorKind.INVALID_ARG,
    ) -> None:
        super().__init__(message, kind)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class ErrorFacts:
    """An `ApiError` between processes."""

    message: str
    param: str | None
    code: str | None
    kind: ErrorKind

    @classmethod
    def of(cls, error: RequestError) -> ErrorFacts:
        """The facts of any error of a request."""
        param = error.param if isinstance(error, ApiError) else None
        code = error.code if isinstance(error, ApiError) else None
        return cls(str(error), param, code, error.kind)

    @property
    def shown_code(self) -> str | None:
        """The code that clients see."""
        return self.code or _CODES.get(self.kind.http_status)

    def document(self) -> bytes:
        """The JSON object of the error."""
        return error_object(self.kind.http_status, self.message, self.param, self.code)

    def error(self) -> ApiError:
        """The error again."""
        return ApiError(self.message, param=self.param, code=self.code, kind=self.kind)


_MEMBERS = {
    "embedding_bias": "logit_bias", "min_length": "min_tokens", "runtime_top_k": "top_k",
    "runtime_top_p": "top_p", "runtime_min_p": "min_p", "num_return_sequences": "n",
    "random_seed": "seed", "request_output_len": "max_tokens",
    "stop_words_list": "stop", "lora_name": "model",
}  # fmt: skip
"""Inputs of the token model, and the members of requests that set them."""

_NAMES = re.compile(rf"\b(?:{'|'.join(_MEMBERS)})\b")
_NO_GUIDE = re.compile(r"\bguided_decoding_guide is no (?:structural_tag|json_schema|json)\b")
_GUIDE_KIND = re.compile(r"\bguided_decoding_guide_type is '\w+'")
_GUIDE = re.compile(r"\bguided_decoding_guide(?:_type)?\b")


def in_members(error: RequestError, guide_members: Sequence[str]) -> RequestError:
    """An error of the engine with the members of the request in the place of the token model's
    inputs. ``guide_members`` are those that set the guide."""
    if isinstance(error, ApiError):
        return error
    text, param = str(error), None
    if guide_members and _GUIDE.search(text):
        members, param = " or ".join(f"'{name}'" for name in guide_members), guide_members[0]
        text = _NO_GUIDE.sub(f"{members} has no schema", text)
        text = _GUIDE_KIND.sub(f"{members} needs guided decoding", text)
        text = _GUIDE.sub(members, text)
    found = _NAMES.search(text)
    if found is not None:
        param = param or _MEMBERS[found.group()]
        text = _NAMES.sub(lambda match: f"'{_MEMBERS[match.group()]}'", text)
    return error if param is None else ApiError(text, param=param, kind=error.kind)


def unknown_model(name: str) -> ApiError:
    """The error of a name that no model and no adapter has."""
    return ApiError(
        f"The model '{name}' does not exist. GET /v1/models lists the models.",
        param="model",
        code="model_not_found",
        kind=ErrorKind.NOT_FOUND,
    )


def no_text_model(name: str) -> ApiError:
    """The error of a model that takes no texts."""
    return ApiError(
        f"The model '{name}' is not served here: OpenAI's routes serve ensembles and BLS "
        "models whose preprocessing is native. GET /v1/models lists them.",
        param="model",
        code="model_not_found",
        kind=ErrorKind.NOT_FOUND,
    )


def error_object(
    status: int, text: str, param: str | None = None, code: str | None = None
) -> bytes:
    """The JSON object of an error."""
    default = "server_error" if status >= 500 else "invalid_request_error"
    error = {
        "message": text,
        "type": _TYPES.get(status, default),
        "param": param,
        "code": code or _CODES.get(status),
    }
    return json_access.dump({"error": error})


def error_of(error: RequestError) -> bytes:
    """The JSON object of a request's error."""
    return ErrorFacts.of(error).document()


def error_response(error: RequestError) -> web.Response:
    """The answer to a request that failed before anything was sent."""
    if isinstance(error, BodyTooLargeError):
        body = error_object(_TOO_LARGE, str(error), code="content_too_large")
        return web.Response(status=_TOO_LARGE, body=body, content_type=JSON)
    return web.Response(
        status=error.kind.http_status,
        body=error_of(error),
        content_type=JSON,
        headers=retry_header(error),
    )


def plain_error(status: int, text: str) -> web.Response:
    """The answer of an error that is no `RequestError`."""
    return web.Response(status=status, body=error_object(status, text), content_type=JSON)

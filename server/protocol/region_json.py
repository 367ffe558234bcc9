"""Registrations of shared memory as JSON."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.inference.tensor_bytes import Buffer
from trimaran.server.protocol import json_access
from trimaran.server.protocol.json_access import JsonObject, as_string, as_unsigned
from trimaran.server.shared_memory.cuda_memory import HANDLE_BYTES
from trimaran.server.shared_memory.region_specs import Kind, RegionSpec

_WRONG_HANDLE = "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"


def region_of_json(kind: Kind, name: str, body: Buffer) -> RegionSpec:
    """The region that a body registers.

    Raises:
        RequestError: a member is missing or of another type.
    """
    # As in Triton, a body of another type has no members, and errors of type name no field.
    document = _members(json_access.parse(body))
    if kind == "system":
        return RegionSpec(
            kind=kind,
            name=name,
            key=as_string(_member(document, "key"), ""),
            offset=as_unsigned(document.get("offset", 0), ""),
            num_bytes=as_unsigned(_member(document, "byte_size"), ""),
        )
    handle = _members(_member(document, "raw_handle"))
    raw = _decoded(as_string(_inner(handle, "b64"), ""))
    return RegionSpec(
        kind=kind,
        name=name,
        raw_handle=raw,
        device_id=as_unsigned(_inner(document, "device_id"), ""),
        num_bytes=as_unsigned(_inner(document, "byte_size"), ""),
    )


def json_of_region(spec: RegionSpec) -> dict[str, Any]:
    """A region as clients see it."""
    if spec.kind == "system":
        place = {"key": spec.key, "offset": spec.offset}
    else:
        place = {"device_id": spec.device_id}
    return {"name": spec.name, **place, "byte_size": spec.num_bytes}


def check_handle(raw: bytes) -> bytes:
    """The bytes of a handle, if they have its size.

    Raises:
        RequestError: they have another size.
    """
    if len(raw) != HANDLE_BYTES:
        raise RequestError(_WRONG_HANDLE)
    return raw


def _decoded(text: str) -> bytes:
    try:
        return check_handle(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        raise RequestError(_WRONG_HANDLE) from None


def _members(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _inner(document: JsonObject, name: str) -> Any:
    if name not in document:
        raise RequestError(
            f"attempt to access non-existing object member '{name}'", ErrorKind.INTERNAL
        )
    return document[name]


def _member(document: JsonObject, name: str) -> Any:
    if name not in document:
        raise RequestError(f"Shared memory register request has no '{name}' field")
    return document[name]

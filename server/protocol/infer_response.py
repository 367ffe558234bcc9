"""An answer to ``POST .../infer``: JSON with optional binary blobs, or best classes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from trimaran.comm.errors import RequestError
from trimaran.server.inference.cooperative import Cooperative
from trimaran.server.inference.request import InferResponse, Tensor
from trimaran.server.inference.tensor_bytes import object_array, to_parts
from trimaran.server.protocol import json_access
from trimaran.server.protocol.infer_json import ParsedInfer, RequestedOutput
from trimaran.server.protocol.tensor_json import BodyPart, LongValues, few_values, to_body

_UNSUPPORTED = frozenset(("BYTES", "FP16", "BF16", "BOOL"))


def classify(
    output: Tensor, num_classes: int, *, is_batching: bool, labels: list[str]
) -> Tensor:
    """The ``num_classes`` largest values of each row as ``value:index[:label]`` strings.

    Raises:
        RequestError: the output's datatype has no order that clients can read.
    """
    if output.datatype in _UNSUPPORTED:
        raise RequestError(
            f"class result not available for output due to unsupported type '{output.datatype}'"
        )
    rows = output.data.reshape(output.shape[0] if is_batching else 1, -1)
    count = min(num_classes, rows.shape[1])
    texts: list[bytes] = []
    is_fraction = rows.dtype.kind == "f"
    for row in rows:
        for index in np.argsort(-row.astype(np.float64), kind="stable")[:count]:
            label = f":{labels[index]}" if index < len(labels) else ""
            value = f"{row[index]:f}" if is_fraction else str(row[index])
            texts.append(f"{value}:{index}{label}".encode())
    shape = (len(rows), count) if is_batching else (count,)
    return Tensor(output.name, "BYTES", object_array(texts, shape))


_SHORT_ITEMS = 1 << 14
"""Number of values that are classified without leaving the event loop, within milliseconds."""

_HOLE = b'"data":[null]'


@dataclass(frozen=True, slots=True)
class EncodedInfer:
    """A response body; ``json_bytes`` is None without binary data after the JSON."""

    parts: deque[BodyPart]
    num_bytes: int | None
    """None: some parts become texts while they are sent."""

    json_bytes: int | None


async def select_outputs(
    outputs: list[Tensor],
    wanted: Sequence[RequestedOutput],
    labels: Mapping[str, list[str]],
    *,
    is_batching: bool,
) -> list[Tensor]:
    """The requested outputs, classified where requested; all outputs if none is named."""
    if not wanted:
        return outputs
    by_name = {output.name: output for output in wanted}
    selected = []
    for tensor in outputs:
        output = by_name.get(tensor.name)
        if output is None:
            continue
        if output.num_classes:
            texts = labels.get(tensor.name, [])
            tensor = await _classified(
                tensor, output.num_classes, texts, is_batching=is_batching
            )
        selected.append(tensor)
    return selected


async def _classified(
    tensor: Tensor, num_classes: int, labels: list[str], *, is_batching: bool
) -> Tensor:
    chosen = partial(classify, tensor, num_classes, is_batching=is_batching, labels=labels)
    if tensor.data.size <= _SHORT_ITEMS:
        return chosen()
    # Sorting cannot be split, but numpy releases the interpreter.
    return await asyncio.to_thread(chosen)


def encode_infer(
    response: InferResponse, parsed: ParsedInfer, *, is_coded: bool
) -> Cooperative[EncodedInfer]:
    """The body for a response to a parsed request. Long values are left as they are, unless the
    body ``is_coded`` or has binary data, whose place is told in front.

    Raises:
        RequestError: an output was requested in JSON but has no JSON form.
    """
    binary = {output.name: output.is_binary for output in parsed.outputs}
    is_whole = is_coded or parsed.is_binary_by_default or any(binary.values())
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    if response.parameters:
        document["parameters"] = response.parameters
    entries: list[dict[str, Any]] = []
    long: list[list[BodyPart]] = []
    blobs: list[bytes] = []
    for tensor in response.outputs:
        entry: dict[str, Any] = {
            "name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape),
        }  # fmt: skip
        if tensor.name in parsed.targets:
            entries.append(entry)
            continue
        if binary.get(tensor.name, parsed.is_binary_by_default):
            blob = yield from to_parts(tensor.data, tensor.datatype)
            entry["parameters"] = {"binary_data_size": sum(map(len, blob))}
            blobs += blob
        else:
            values = few_values(tensor.data, tensor.datatype, tensor.name)
            if values is None:
                own = tensor.data, tensor.datatype, tensor.name
                long.append((yield from to_body(*own, is_whole=is_whole)))
            entry["data"] = [None] if values is None else values
        entries.append(entry)
    head = json_access.dump(document)[:-1]
    parts: list[BodyPart] = [head + b',"outputs":']
    parts += (*_filled(json_access.dump(entries), long), b"}")
    json_bytes = sum_of_lengths(parts)
    if json_bytes is None:
        return EncodedInfer(deque(parts), None, None)
    num_bytes = json_bytes + sum(map(len, blobs))
    return EncodedInfer(deque([*parts, *blobs]), num_bytes, json_bytes if blobs else None)


def sum_of_lengths(parts: Iterable[BodyPart]) -> int | None:
    """The bytes of a body; None if some parts become texts while they are sent."""
    num_bytes = 0
    for part in parts:
        if isinstance(part, LongValues):
            return None
        num_bytes += len(part)
    return num_bytes


def _filled(entries: bytes, long: list[list[BodyPart]]) -> list[BodyPart]:
    """The JSON text of entries in parts, with long values in place of their nulls."""
    # Unambiguous: quotes in strings are escaped, and no other element is null.
    start, *rest = entries.split(_HOLE)
    parts: list[BodyPart] = [start]
    for values, text in zip(long, rest, strict=True):
        parts += [b'"data":[', *values, b"]" + text]
    return parts

"""The body of an answer to ``POST .../infer``: JSON with optional binary blobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimaran.server import json_access
from trimaran.server.classification import classify
from trimaran.server.infer_json import ParsedInfer, RequestedOutput
from trimaran.server.inference import InferResponse, Tensor
from trimaran.server.tensor_bytes import to_bytes
from trimaran.server.tensor_json import json_values


@dataclass(frozen=True, slots=True)
class EncodedInfer:
    """A response body; ``json_bytes`` is None when nothing binary follows the JSON."""

    body: bytes
    json_bytes: int | None


def select_outputs(
    outputs: list[Tensor],
    wanted: list[RequestedOutput],
    labels: Mapping[str, list[str]],
    *,
    is_batching: bool,
) -> list[Tensor]:
    """The outputs that were asked for, classified where that was asked; all if none was."""
    if not wanted:
        return outputs
    by_name = {output.name: output for output in wanted}
    selected = []
    for tensor in outputs:
        output = by_name.get(tensor.name)
        if output is None:
            continue
        if output.num_classes:
            tensor = classify(
                tensor,
                output.num_classes,
                is_batching=is_batching,
                labels=labels.get(tensor.name, []),
            )
        selected.append(tensor)
    return selected


def encode_infer(
    response: InferResponse,
    parsed: ParsedInfer,
    max_batch_size: int,
    labels: Mapping[str, list[str]],
) -> EncodedInfer:
    """The body for a response to a parsed request.

    Raises:
        RequestError: an output has no JSON form but was asked for in JSON.
    """
    binary = {output.name: output.is_binary for output in parsed.outputs}
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    if response.parameters:
        document["parameters"] = response.parameters
    entries: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    tensors = select_outputs(
        response.outputs, parsed.outputs, labels, is_batching=max_batch_size > 0
    )
    for tensor in tensors:
        entry: dict[str, Any] = {
            "name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape),
        }  # fmt: skip
        if binary.get(tensor.name, parsed.is_binary_by_default):
            blobs.append(to_bytes(tensor.data, tensor.datatype))
            entry["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            entry["data"] = json_values(tensor.data, tensor.datatype, tensor.name)
        entries.append(entry)
    document["outputs"] = entries
    head = json_access.dump(document)
    if not any(blobs):
        return EncodedInfer(head, None)
    return EncodedInfer(head + b"".join(blobs), len(head))

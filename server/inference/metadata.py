"""What clients may ask about a model: its metadata and its completed configuration."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup
from tritonclient.grpc.service_pb2 import ModelMetadataResponse

from trimaran.server.inference.request import Model
from trimaran.server.inference.tensor_bytes import from_config

PROTOCOL_VERSION = "2.73.0"
"""The Triton release whose protocol this server follows."""

EXTENSIONS = (
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)",
    "schedule_policy", "model_configuration", "system_shared_memory", "cuda_shared_memory",
    "binary_tensor_data", "parameters", "statistics", "trace", "logging",
)  # fmt: skip


def server_metadata(server_id: str) -> dict[str, Any]:
    """The answer to ``GET /v2``."""
    return {"name": server_id, "version": PROTOCOL_VERSION, "extensions": list(EXTENSIONS)}


def completed_config(model: Model) -> ModelConfig:
    """The model's configuration, completed with the server's defaults."""
    config = ModelConfig()
    config.CopyFrom(model.config)
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    if config.platform != "ensemble":
        if not config.HasField("optimization"):
            config.optimization.input_pinned_memory.enable = True
            config.optimization.output_pinned_memory.enable = True
        _complete_instances(config)
    if config.backend == "python" and not config.default_model_filename:
        config.default_model_filename = "model.py"
    if model.is_decoupled or config.platform == "ensemble":
        config.model_transaction_policy.decoupled = model.is_decoupled
    return config


def _complete_instances(config: ModelConfig) -> None:
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        group.count = group.count or 1
        if group.kind == ModelInstanceGroup.Kind.KIND_AUTO:
            group.kind = ModelInstanceGroup.Kind.KIND_CPU


def metadata_message(model: Model, versions: Sequence[str]) -> ModelMetadataResponse:
    """Names, datatypes and shapes of a model's tensors, batch dimension included."""
    config = model.config
    batch = [-1] if config.max_batch_size > 0 else []
    response = ModelMetadataResponse(
        name=model.name, versions=versions, platform=config.platform or config.backend
    )
    for entries, tensors in (
        (config.input, response.inputs),
        (config.output, response.outputs),
    ):
        for entry in entries:
            tensors.add(
                name=entry.name,
                datatype=from_config(entry.data_type),
                shape=[*batch, *entry.dims],
            )
    return response


def to_json(message: Message) -> dict[str, Any]:
    """A message as JSON members: its own field names, defaults written out, 64-bit numbers as
    numbers. Unset messages are omitted.
    """
    members: dict[str, Any] = {}
    fields: Sequence[Any] = message.DESCRIPTOR.fields
    for field in fields:
        value = getattr(message, field.name)
        # Containers are recognised by type: descriptors differ between protobuf releases.
        if isinstance(value, Mapping):
            inner = field.message_type.fields_by_name["value"]
            members[field.name] = {str(key): _json(inner, value[key]) for key in sorted(value)}
        elif isinstance(value, MutableSequence):
            members[field.name] = [_json(field, item) for item in value]
        elif not field.has_presence or message.HasField(field.name):
            members[field.name] = _json(field, value)
    return members


def _json(field: Any, value: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return to_json(value)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return field.enum_type.values_by_number[value].name
    return value

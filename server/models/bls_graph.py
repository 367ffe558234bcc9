"""The BLS role where steps run code of their own: a graph, wired as the native one is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ConfigError
from trimaran.server.inference.request import Model
from trimaran.server.models.graph_model import GraphModel, GraphStep
from trimaran.server.models.text_models import BLS_MAPS
from trimaran.server.repository.model_repository import RepositoryModel, Role

_TOKEN_OUTPUTS = {"output_ids": "_output_ids", "sequence_length": "_sequence_length"}
_TEXT = "OUTPUT"


def bls_graph(model: RepositoryModel, version: int, steps: Mapping[Role, Model]) -> GraphModel:
    """A graph of the three steps. Each response of the token-level model is decoded alone,
    by whatever the postprocessing does.

    Raises:
        ConfigError: tokens are to be accumulated, which only native postprocessing can.
    """
    if model.parameters.get_loose_bool("accumulate_tokens"):
        raise ConfigError(
            f"{model.config_path}: accumulate_tokens is true, but the steps run code of their "
            "own, which is given each response alone. Set it to false, or leave "
            "postprocessing out of --python-models."
        )
    pre, token, post = (
        steps[role] for role in (Role.PREPROCESSING, Role.TOKEN, Role.POSTPROCESSING)
    )
    own_inputs = {tensor.name for tensor in model.config.input}
    own_outputs = {tensor.name for tensor in model.config.output}
    before = {tensor.name: f"_{tensor.name}" for tensor in pre.config.output}
    into_token = {k: v for k, v in BLS_MAPS.token.items() if v in own_inputs}
    for name, source in BLS_MAPS.token_from_preprocessing.items():
        if source in before:
            into_token[name] = before[source]
    renamed = {k: v for k, v in BLS_MAPS.outputs.items() if v in own_outputs and k != _TEXT}
    graph = (
        _step(
            pre, {k: v for k, v in BLS_MAPS.preprocessing.items() if v in own_inputs}, before
        ),
        _step(token, into_token, {**renamed, **_TOKEN_OUTPUTS}),
        _step(
            post,
            {"TOKENS_BATCH": "_output_ids", "SEQUENCE_LENGTH": "_sequence_length"},
            {_TEXT: BLS_MAPS.outputs[_TEXT]},
        ),
    )
    # The graph completes its configuration, which is not the model's.
    config = ModelConfig()
    config.CopyFrom(model.config)
    return GraphModel(replace(model, config=config), version, graph)


def _step(model: Model, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> GraphStep:
    """A step with those of these tensors that its model declares."""
    has_input = {tensor.name for tensor in model.config.input}
    has_output = {tensor.name for tensor in model.config.output}
    return GraphStep(
        model,
        {name: source for name, source in inputs.items() if name in has_input},
        {name: target for name, target in outputs.items() if name in has_output},
    )

"""Checks that an ensemble's steps exist and that its tensors connect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from trimaran.comm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Source:
    """The source of a tensor of the ensemble."""

    data_type: int
    text: str


def check_ensemble(path: Path, config: ModelConfig, models: Mapping[str, ModelConfig]) -> None:
    """Check the graph against the models of the repository.

    Raises:
        ConfigError: a step's model or tensor does not exist, a tensor is read but written
            by no step or by two, types differ, or a step takes smaller batches.
    """
    steps = config.ensemble_scheduling.step
    if not steps:
        raise ConfigError(f"{path}: the ensemble has no step")
    for step in steps:
        _check_step(path, config, step, models)
    sources = _sources(path, config, models)
    for step in steps:
        model = models[step.model_name]
        types = {tensor.name: tensor.data_type for tensor in model.input}
        for name, tensor in step.input_map.items():
            reader = f"input '{name}' of step '{step.model_name}'"
            _check_connection(path, sources.get(tensor), tensor, types[name], reader)
    for output in config.output:
        reader = "an output of the ensemble"
        _check_connection(path, sources.get(output.name), output.name, output.data_type, reader)


def check_step_versions(
    path: Path, config: ModelConfig, versions: Mapping[str, Sequence[int]]
) -> None:
    """Check that the steps' models serve the versions that the steps name.

    Raises:
        ConfigError: a step's model does not.
    """
    for step in config.ensemble_scheduling.step:
        served = versions.get(step.model_name, ())
        # -1 means the latest version; so does 0, the value of an omitted version.
        if step.model_version > 0 and step.model_version not in served:
            raise ConfigError(
                f"{path}: a step runs version {step.model_version} of '{step.model_name}', "
                f"which serves {', '.join(map(str, served))}. Name that, or -1 for the latest."
            )


def _check_step(
    path: Path, config: ModelConfig, step: Any, models: Mapping[str, ModelConfig]
) -> None:
    model = models.get(step.model_name)
    if model is None:
        raise ConfigError(
            f"{path}: step model '{step.model_name}' is not in the repository, which holds "
            f"{', '.join(models)}"
        )
    if config.max_batch_size > model.max_batch_size:
        raise ConfigError(
            f"{path}: max_batch_size is {config.max_batch_size} but step '{step.model_name}' "
            f"takes at most {model.max_batch_size}. Lower the first or raise the second."
        )
    sides = (("input", model.input, step.input_map), ("output", model.output, step.output_map))
    for side, tensors, mapped in sides:
        unknown = sorted(set(mapped) - {tensor.name for tensor in tensors})
        if unknown:
            raise ConfigError(
                f"{path}: step '{step.model_name}' maps the {side} '{unknown[0]}', which that "
                "model's config.pbtxt does not declare"
            )
    needed = {tensor.name for tensor in model.input if not tensor.optional}
    lacking = sorted(needed - set(step.input_map))
    if lacking:
        raise ConfigError(
            f"{path}: step '{step.model_name}' lacks the required input '{lacking[0]}'. Map it."
        )


def _sources(
    path: Path, config: ModelConfig, models: Mapping[str, ModelConfig]
) -> dict[str, _Source]:
    sources = {
        tensor.name: _Source(tensor.data_type, "an input of the ensemble")
        for tensor in config.input
    }
    for step in config.ensemble_scheduling.step:
        types = {t.name: t.data_type for t in models[step.model_name].output}
        for name, tensor in step.output_map.items():
            text = f"output '{name}' of step '{step.model_name}'"
            if tensor in sources:
                raise ConfigError(
                    f"{path}: '{tensor}' is written twice: as {sources[tensor].text} and as "
                    f"{text}"
                )
            sources[tensor] = _Source(types[name], text)
    return sources


def _check_connection(
    path: Path, source: _Source | None, tensor: str, data_type: int, reader: str
) -> None:
    if source is None:
        raise ConfigError(
            f"{path}: '{tensor}', read as {reader}, is neither an input of the ensemble nor "
            "written by a step"
        )
    if source.data_type != data_type:
        raise ConfigError(
            f"{path}: '{tensor}' is {DataType.Name(source.data_type)} as {source.text} but "
            f"{DataType.Name(data_type)} as {reader}. Make them equal."
        )

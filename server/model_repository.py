"""The model repository on disk: which models there are, their roles and their settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ConfigError
from trimaran.server.config_pbtxt import read_config
from trimaran.server.model_parameters import ModelParameters
from trimaran.server.token_parameters import check_token_parameters

logger = logging.getLogger(__name__)


class Role(Enum):
    """What a model does in a request's way. OTHER runs user code."""

    PREPROCESSING = "preprocessing"
    TOKEN = "token model"
    POSTPROCESSING = "postprocessing"
    ENSEMBLE = "ensemble"
    BLS = "bls"
    OTHER = "other"


# Inputs and outputs that only a model of that role has together.
_SIGNATURES: tuple[tuple[Role, frozenset[str], frozenset[str]], ...] = (
    (
        Role.PREPROCESSING,
        frozenset({"QUERY", "REQUEST_OUTPUT_LEN"}),
        frozenset({"INPUT_ID", "REQUEST_INPUT_LEN"}),
    ),
    (
        Role.POSTPROCESSING,
        frozenset({"TOKENS_BATCH", "SEQUENCE_LENGTH"}),
        frozenset({"OUTPUT"}),
    ),
    (
        Role.TOKEN,
        frozenset({"input_ids", "input_lengths", "request_output_len"}),
        frozenset({"output_ids", "sequence_length"}),
    ),
    (Role.BLS, frozenset({"text_input", "max_tokens"}), frozenset({"text_output"})),
)


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """One folder of the repository."""

    name: str
    folder: Path
    config: ModelConfig
    role: Role
    versions: tuple[int, ...]
    parameters: ModelParameters

    @property
    def config_path(self) -> Path:
        """The file that error messages name."""
        return self.folder / "config.pbtxt"


@dataclass(frozen=True, slots=True)
class ModelRepository:
    """All models of a repository, by name."""

    path: Path
    models: dict[str, RepositoryModel]

    @classmethod
    def load(cls, path: str | Path) -> ModelRepository:
        """Read and check every model of the repository.

        Raises:
            ConfigError: names the folder or file, the line or key, the value and what is
                allowed.
        """
        root = Path(path)
        if not root.is_dir():
            raise ConfigError(
                f"model repository {root} is not a folder. Write one: trimaran init-repo {root}"
            )
        folders = sorted(f for f in root.iterdir() if f.is_dir() and not f.name.startswith("."))
        models = {f.name: _load_model(f) for f in folders if (f / "config.pbtxt").exists()}
        if not models:
            raise ConfigError(
                f"model repository {root} holds no MODEL/config.pbtxt. Write the five "
                f"models: trimaran init-repo {root}"
            )
        repository = cls(root, models)
        for model in models.values():
            if model.role is Role.ENSEMBLE:
                _check_ensemble(model, repository)
        return repository

    def of_role(self, role: Role) -> list[RepositoryModel]:
        """The models with this role, by name."""
        return [model for model in self.models.values() if model.role is role]


def _load_model(folder: Path) -> RepositoryModel:
    path = folder / "config.pbtxt"
    config = read_config(path)
    if config.name and config.name != folder.name:
        raise ConfigError(
            f"{path}: name is {config.name!r} but the folder is {folder.name!r}. Make them "
            "equal or remove the name."
        )
    config.name = folder.name
    versions = _versions(folder)
    values = {key: value.string_value for key, value in config.parameters.items()}
    parameters = ModelParameters(values, path)
    role = _role(config)
    if role is Role.TOKEN:
        check_token_parameters(path, parameters)
    return RepositoryModel(folder.name, folder, config, role, versions, parameters)


def _versions(folder: Path) -> tuple[int, ...]:
    found = []
    for entry in folder.iterdir():
        if not entry.is_dir():
            continue
        if entry.name.isdigit() and int(entry.name) > 0:
            found.append(int(entry.name))
        else:
            logger.warning(
                "%s: '%s' is not a version number and is ignored", folder, entry.name
            )
    if not found:
        raise ConfigError(f"{folder}: holds no version folder. Make one: mkdir {folder}/1")
    return tuple(sorted(found))


def _role(config: ModelConfig) -> Role:
    if config.platform == "ensemble" or config.HasField("ensemble_scheduling"):
        return Role.ENSEMBLE
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    for role, needed_inputs, needed_outputs in _SIGNATURES:
        if needed_inputs <= inputs and needed_outputs <= outputs:
            return role
    return Role.OTHER


def _check_ensemble(ensemble: RepositoryModel, repository: ModelRepository) -> None:
    """Every step's model and tensors exist, and every tensor that is read is written."""
    steps = ensemble.config.ensemble_scheduling.step
    if not steps:
        raise ConfigError(f"{ensemble.config_path}: the ensemble has no step")
    available = {tensor.name for tensor in ensemble.config.input}
    for step in steps:
        available |= set(step.output_map.values())
    for step in steps:
        model = repository.models.get(step.model_name)
        if model is None:
            raise ConfigError(
                f"{ensemble.config_path}: step model '{step.model_name}' is not in "
                f"{repository.path}. It holds {', '.join(repository.models)}."
            )
        _check_maps(ensemble, step.model_name, model, step, available)
    missing = {tensor.name for tensor in ensemble.config.output} - available
    if missing:
        raise ConfigError(
            f"{ensemble.config_path}: no step writes the output(s) {', '.join(sorted(missing))}"
        )


def _check_maps(
    ensemble: RepositoryModel,
    name: str,
    model: RepositoryModel,
    step: Any,
    available: set[str],
) -> None:
    sides = (
        ("input", {t.name for t in model.config.input}, dict(step.input_map)),
        ("output", {t.name for t in model.config.output}, dict(step.output_map)),
    )
    for side, declared, mapped in sides:
        unknown = sorted(set(mapped) - declared)
        if unknown:
            raise ConfigError(
                f"{ensemble.config_path}: step '{name}' maps the {side} '{unknown[0]}', which "
                f"{model.config_path} does not declare"
            )
    unwritten = sorted(set(sides[0][2].values()) - available)
    if unwritten:
        raise ConfigError(
            f"{ensemble.config_path}: step '{name}' reads '{unwritten[0]}', which is neither "
            "an input of the ensemble nor written by a step"
        )
    needed = {t.name for t in model.config.input if not t.optional} - set(sides[0][2])
    if needed:
        raise ConfigError(
            f"{ensemble.config_path}: step '{name}' lacks the required input "
            f"'{sorted(needed)[0]}'"
        )

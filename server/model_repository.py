"""The model repository on disk: which models there are, their roles and their settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ConfigError
from trimaran.server.config_pbtxt import read_config
from trimaran.server.ensemble_graph import check_ensemble
from trimaran.server.model_parameters import ModelParameters
from trimaran.server.parameter_table import check_parameters
from trimaran.server.role_parameters import (
    BLS_PARAMETERS,
    POSTPROCESSING_PARAMETERS,
    PREPROCESSING_PARAMETERS,
)
from trimaran.server.signatures import Role, check_tensors, role_of
from trimaran.server.token_parameters import TOKEN_PARAMETERS

logger = logging.getLogger(__name__)


__all__ = ["ModelRepository", "RepositoryModel", "Role"]

_PARAMETERS = {
    Role.PREPROCESSING: PREPROCESSING_PARAMETERS,
    Role.TOKEN: TOKEN_PARAMETERS,
    Role.POSTPROCESSING: POSTPROCESSING_PARAMETERS,
    Role.BLS: BLS_PARAMETERS,
}


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """One folder of the repository."""

    name: str
    folder: Path
    config: ModelConfig
    role: Role
    versions: tuple[int, ...]
    """The versions to serve, as the version policy chooses them: the latest by default."""
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
        configs = {name: model.config for name, model in models.items()}
        for model in models.values():
            if model.role is Role.ENSEMBLE:
                check_ensemble(model.config_path, model.config, configs)
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
    versions = _chosen(path, config, _versions(folder))
    values = {key: value.string_value for key, value in config.parameters.items()}
    parameters = ModelParameters(values, path)
    role = role_of(path, config)
    check_tensors(path, config, role)
    if role in _PARAMETERS:
        check_parameters(path, parameters, _PARAMETERS[role])
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


def _chosen(path: Path, config: ModelConfig, found: tuple[int, ...]) -> tuple[int, ...]:
    """The versions that the model's policy serves, of those that exist."""
    policy = config.version_policy
    if policy.HasField("all"):
        return found
    if policy.HasField("specific"):
        missing = sorted(set(policy.specific.versions) - set(found))
        if missing or not policy.specific.versions:
            named = f"version {missing[0]}" if missing else "no version"
            raise ConfigError(
                f"{path}: version_policy names {named}, but the folder holds "
                f"{', '.join(map(str, found))}"
            )
        return tuple(sorted(policy.specific.versions))
    return found[-(policy.latest.num_versions or 1) :]

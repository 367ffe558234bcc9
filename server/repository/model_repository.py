"""The model repository on disk: its models, their roles, and whose code is executed."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import unreadable
from trimaran.server.inference.queue_policy import check_queue
from trimaran.server.repository.config_checks import check_declarations, check_enums
from trimaran.server.repository.config_pbtxt import ModelParameters, read_config
from trimaran.server.repository.ensemble_graph import check_ensemble, check_step_versions
from trimaran.server.repository.metric_settings import check_buckets, check_tags
from trimaran.server.repository.parameter_table import (
    BLS_PARAMETERS,
    POSTPROCESSING_PARAMETERS,
    PREPROCESSING_PARAMETERS,
    TOKEN_PARAMETERS,
    check_parameters,
)
from trimaran.server.repository.signatures import Role, check_tensors, role_of

_NATIVE, _EXECUTE = "native", "execute"


@dataclass(frozen=True, slots=True)
class PythonModels:
    """The models of pre- and postprocessing and BLS whose ``model.py`` is run.

    A model of another role always runs its code. A token-level model never does: worker groups
    answer its requests.
    """

    names: frozenset[str] = frozenset()
    are_all: bool = False

    @classmethod
    def parse(cls, text: str) -> PythonModels:
        """Read ``native``, ``execute``, or names with commas between."""
        if text == _NATIVE:
            return cls()
        if text == _EXECUTE:
            return cls(are_all=True)
        return cls(frozenset(filter(None, (name.strip() for name in text.split(",")))))

    def executes(self, name: str) -> bool:
        """Whether this model's code is run if it has any."""
        return self.are_all or name in self.names


logger = logging.getLogger(__name__)


__all__ = [
    "ModelRepository",
    "NoVersionError",
    "RepositoryModel",
    "Role",
    "load_model",
    "model_folders",
    "repository_model",
]

CONFIG_FILE = "config.pbtxt"
CODE_FILE = "model.py"
NATIVE = PythonModels()

EXECUTABLE = (Role.PREPROCESSING, Role.POSTPROCESSING, Role.BLS)
"""The native roles whose models may run their own code instead."""

_VERSION = re.compile("[1-9][0-9]*")
"""The only valid form of a version's folder name."""

_PARAMETERS = {
    Role.PREPROCESSING: PREPROCESSING_PARAMETERS,
    Role.TOKEN: TOKEN_PARAMETERS,
    Role.POSTPROCESSING: POSTPROCESSING_PARAMETERS,
    Role.BLS: BLS_PARAMETERS,
}


class NoVersionError(ConfigError):
    """A model's folder holds no version to serve."""


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """One folder of the repository."""

    name: str
    folder: Path
    config: ModelConfig
    role: Role
    versions: tuple[int, ...]
    """The versions that the version policy selects: by default the latest."""
    parameters: ModelParameters

    @property
    def config_path(self) -> Path:
        """The file that error messages name."""
        return self.folder / CONFIG_FILE

    def has_code(self, version: int) -> bool:
        """Whether a version is served by user code in Python."""
        return _has_code(self.folder, self.config, version)

    @property
    def steps(self) -> tuple[str, ...]:
        """The distinct models that this one runs; empty unless it is composed of others."""
        if self.role is Role.BLS:
            token = self.parameters.get_str("tensorrt_llm_model_name") or "tensorrt_llm"
            draft = self.parameters.get_str("tensorrt_llm_draft_model_name")
            drafts = (draft,) if draft and draft != token else ()
            return ("preprocessing", token, "postprocessing", *drafts)
        steps = self.config.ensemble_scheduling.step
        return tuple(dict.fromkeys(step.model_name for step in steps))


@dataclass(frozen=True, slots=True)
class ModelRepository:
    """All models of a repository, by name."""

    path: Path
    models: dict[str, RepositoryModel]

    @classmethod
    def load(
        cls,
        path: str | Path,
        names: Collection[str] | None = None,
        python: PythonModels = NATIVE,
    ) -> ModelRepository:
        """Read and check every model of the repository, or the named ones.

        Raises:
            ConfigError: names the folder or file, the line or key, the value and the allowed
                values.
        """
        root = Path(path)
        folders = model_folders(root)
        if not folders:
            raise ConfigError(
                f"model repository {root} holds no MODEL/{CONFIG_FILE}. Write the five "
                f"models: trimaran init-repo {root}"
            )
        wanted = {name: f for name, f in folders.items() if names is None or name in names}
        repository = cls(root, {name: load_model(f, python) for name, f in wanted.items()})
        configs = {name: model.config for name, model in repository.models.items()}
        served = {name: model.versions for name, model in repository.models.items()}
        for model in repository.of_role(Role.ENSEMBLE):
            check_ensemble(model.config_path, model.config, configs)
            check_step_versions(model.config_path, model.config, served)
        return repository

    def of_role(self, role: Role) -> list[RepositoryModel]:
        """The models with this role, by name."""
        return [model for model in self.models.values() if model.role is role]


def model_folders(root: Path) -> dict[str, Path]:
    """The folder of every model of a repository, by name.

    Raises:
        ConfigError: the repository is no folder, or cannot be read now.
    """
    try:
        if not root.is_dir():
            raise ConfigError(
                f"model repository {root} is not a folder. Write one: trimaran init-repo {root}"
            )
        folders = sorted(f for f in root.iterdir() if f.is_dir() and f.name[0] != ".")
        return {f.name: f for f in folders if _holds_model(f)}
    except OSError as error:
        raise unreadable(f"model repository {root}", error) from error


def _holds_model(folder: Path) -> bool:
    try:
        return (folder / CONFIG_FILE).exists()
    except PermissionError:
        # The error is reported for that model alone; the others load. At a mount point, root
        # alone may read some folders of the file system.
        return folder.name != "lost+found"


def load_model(folder: Path, python: PythonModels = NATIVE) -> RepositoryModel:
    """The model of a folder, as its config.pbtxt describes it.

    Raises:
        ConfigError: as for `ModelRepository.load`.
        NoVersionError: there is no version to serve.
    """
    return repository_model(folder, read_config(folder / CONFIG_FILE), python)


def repository_model(
    folder: Path, config: ModelConfig, python: PythonModels = NATIVE
) -> RepositoryModel:
    """The model of a folder under a given configuration; the folder's own is not read.

    ``python`` says which models of a native role run their own code.

    Raises:
        ConfigError: as for `ModelRepository.load`.
        NoVersionError: there is no version to serve.
    """
    path = folder / CONFIG_FILE
    own = ModelConfig()
    own.CopyFrom(config)
    if own.name and own.name != folder.name:
        raise ConfigError(
            f"{path}: name is {own.name!r} but the folder is {folder.name!r}. Make them "
            "equal or remove the name."
        )
    own.name = folder.name
    check_enums(path, own)
    _check_counts(path, own)
    check_declarations(path, own)
    versions = _chosen(path, own, _versions(folder))
    parameters = parameters_of(folder, own)
    role = role_of(path, own, has_code=_has_code(folder, own, versions[-1]))
    if role in EXECUTABLE and _executes(folder, own, versions[-1], python):
        role = Role.OTHER
    check_tensors(path, own, role)
    check_queue(path, own)
    if role is not Role.OTHER and own.HasField("sequence_batching"):
        raise ConfigError(
            f"{path}: sequence_batching is set, but this {role.value} model runs natively and "
            "takes each request by itself. Remove it, or run the model's own model.py "
            "(--python-models)."
        )
    check_tags(path, own)
    check_buckets(path, own)
    if role in _PARAMETERS:
        check_parameters(path, parameters, _PARAMETERS[role])
    return RepositoryModel(folder.name, folder, own, role, versions, parameters)


def _check_counts(path: Path, config: ModelConfig) -> None:
    if config.max_batch_size < 0:
        raise ConfigError(
            f"{path}: max_batch_size is {config.max_batch_size} but must be 0 (no batches) or "
            "more"
        )
    for group in config.instance_group:
        if group.count < 0:
            raise ConfigError(
                f"{path}: instance_group has the count {group.count} but must have 1 or more"
            )


def _has_code(folder: Path, config: ModelConfig, version: int) -> bool:
    path = folder / str(version) / CODE_FILE
    try:
        return config.backend == "python" and path.is_file()
    except OSError as error:
        raise unreadable(f"{path}:", error) from error


def _executes(folder: Path, config: ModelConfig, version: int, python: PythonModels) -> bool:
    """Whether a model of a native role runs its own code.

    Raises:
        ConfigError: it was named for that, and has none.
    """
    has_code = _has_code(folder, config, version)
    if folder.name in python.names and not has_code:
        raise ConfigError(
            f"--python-models names '{folder.name}', but its backend is {config.backend!r} "
            f"(python is needed), or {folder / str(version) / CODE_FILE} does not exist. "
            "Leave the name out."
        )
    return has_code and python.executes(folder.name)


def parameters_of(folder: Path, config: ModelConfig) -> ModelParameters:
    """The parameters of a configuration, unchecked."""
    values = {key: value.string_value for key, value in config.parameters.items()}
    return ModelParameters(values, folder / CONFIG_FILE)


def _versions(folder: Path) -> tuple[int, ...]:
    found = []
    try:
        entries = [entry for entry in folder.iterdir() if entry.is_dir()]
    except OSError as error:
        raise unreadable(f"{folder}:", error) from error
    for entry in entries:
        if _VERSION.fullmatch(entry.name):
            found.append(int(entry.name))
        else:
            logger.warning(
                "%s: '%s' is not a version number and is ignored", folder, entry.name
            )
    if not found:
        raise NoVersionError(f"{folder}: holds no version folder. Make one: mkdir {folder}/1")
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
            raise NoVersionError(
                f"{path}: version_policy names {named}, but the folder holds "
                f"{', '.join(map(str, found))}"
            )
        return tuple(sorted(set(policy.specific.versions)))
    return found[-(policy.latest.num_versions or 1) :]

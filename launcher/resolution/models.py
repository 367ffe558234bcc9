"""Which models a server starts with, and the data-parallel replicas of each."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trimaran.comm.errors import ConfigError
from trimaran.comm.topology import MAX_RANKS
from trimaran.launcher.config import TokenizerFolder
from trimaran.server.repository.model_repository import (
    ModelRepository,
    PythonModels,
    RepositoryModel,
    Role,
    load_model,
    model_folders,
)

_ALL = "*"
_LLM_API_FILE = "model.yaml"
"""The settings of an LLM API model, in its version folder."""

MIG_PREFIX = "MIG-"
_GPU = re.compile(r"0*[0-9]{1,9}")
_RANK = re.compile(r"0*[1-9][0-9]{0,8}")
_T = TypeVar("_T")
MAX_INSTANCES = 1024
"""Most instances of a model, each a worker group; protects memory from a mistyped count."""


@dataclass(frozen=True, slots=True)
class StartModels:
    """The models that are loaded at the start."""

    token: tuple[RepositoryModel, ...]
    """Token-level models, whose groups start with the server."""

    text: str
    """The model of the example request: an ensemble, else a BLS model, else none."""

    tokenizers: tuple[TokenizerFolder, ...] = ()
    """The tokenizers of native pre- and postprocessing, each folder once."""


def start_models(args: argparse.Namespace) -> StartModels:
    """The models to start with by these flags. Other models of the repository are not read.

    Raises:
        ConfigError: a model is unusable or missing, or there are more than a server runs.
    """
    is_explicit = args.model_control_mode == "explicit"
    names = None
    if is_explicit and _ALL not in args.load_model:
        names = _with_steps(Path(args.model_repo), args.load_model)
        if not names:
            return StartModels((), "")
    python = PythonModels.parse(args.python_models)
    _check_names(Path(args.model_repo), python)
    repository = ModelRepository.load(args.model_repo, names, python)
    return StartModels(
        tuple(_token_models(args, repository, may_be_none=is_explicit)),
        _text(repository),
        tuple(_tokenizers(repository)),
    )


def _tokenizers(repository: ModelRepository) -> list[TokenizerFolder]:
    found: dict[str, TokenizerFolder] = {}
    for role in (Role.PREPROCESSING, Role.POSTPROCESSING):
        for model in repository.of_role(role):
            # The front end refuses a model without this parameter.
            folder = model.parameters.get_str("tokenizer_dir")
            if folder is not None:
                found.setdefault(folder, TokenizerFolder(model.config_path, folder))
    return list(found.values())


def _check_names(root: Path, python: PythonModels) -> None:
    unknown = sorted(python.names - model_folders(root).keys())
    if unknown:
        raise ConfigError(
            f"--python-models {unknown[0]}: no model of that name. The repository holds "
            f"{', '.join(model_folders(root)) or 'none'}; give native, execute, or names."
        )


def _with_steps(root: Path, names: Sequence[str]) -> set[str]:
    """The named models and their steps: loading a model loads its steps."""
    folders = model_folders(root)
    found: set[str] = set()
    waiting = list(names)
    for name in names:
        if name not in folders:
            raise ConfigError(
                f"--load-model {name}: no model of that name. The repository holds "
                f"{', '.join(folders) or 'none'}."
            )
    while waiting:
        name = waiting.pop()
        if name not in found and name in folders:
            found.add(name)
            waiting += load_model(folders[name]).steps
    return found


def _token_models(
    args: argparse.Namespace, repository: ModelRepository, *, may_be_none: bool
) -> list[RepositoryModel]:
    found = {model.name: model for model in repository.of_role(Role.TOKEN)}
    names = args.tensorrt_llm_model_name
    chosen = list(found)
    if names is not None:
        chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in found:
            raise ConfigError(
                f"--tensorrt-llm-model-name {name}: no token-level model of that name. The "
                f"repository holds {', '.join(sorted(found)) or 'none'}."
            )
    if not found and not may_be_none:
        raise ConfigError(_no_token_model(repository))
    if not args.multi_model and len(chosen) > 1:
        where = "--tensorrt-llm-model-name names" if names else "the model repository holds"
        raise ConfigError(
            f"{where} {len(chosen)} token-level models ({', '.join(sorted(chosen))}) and a "
            "server runs one. Serve them all with --multi-model, or choose one with "
            "--tensorrt-llm-model-name."
        )
    return [found[name] for name in chosen]


def _no_token_model(repository: ModelRepository) -> str:
    for model in repository.of_role(Role.OTHER):
        for version in model.versions:
            settings = model.folder / str(version) / _LLM_API_FILE
            if settings.is_file():
                return (
                    f"{settings}: models of the LLM API (llmapi) are not served by this "
                    "version. Write token-level and text models with `trimaran init-repo`, and "
                    "give their tensorrt_llm the same checkpoint as engine_dir."
                )
    return (
        "the model repository holds no token-level model (tensorrt_llm). Write one with "
        "`trimaran init-repo`."
    )


def _text(repository: ModelRepository) -> str:
    for role in (Role.ENSEMBLE, Role.BLS):
        for model in repository.of_role(role):
            # An ensemble may consist of any models.
            if {"text_input", "max_tokens"} <= {tensor.name for tensor in model.config.input}:
                return model.name
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One replica, as config.pbtxt describes it."""

    number: int
    devices: tuple[str, ...] = ()
    """GPU numbers or MIG UUIDs, one a rank; empty means unnamed."""

    participants: tuple[int, ...] = ()
    """World ranks of the replica; empty means unnamed."""


def instances_of(
    model: RepositoryModel, *, needs_devices: bool = False
) -> tuple[Instance, ...]:
    """Every replica that ``instance_group``, ``gpu_device_ids`` and ``participant_ids``
    request. With ``needs_devices`` several replicas must name theirs.

    Raises:
        ConfigError: the three contradict each other, or request too many.
    """
    count = _count(model)
    devices = _devices(model, count)
    if needs_devices and count > 1 and not devices[0]:
        raise ConfigError(
            f"{model.config_path}: gpu_device_ids parameter required when instance count > 1. "
            f"Name GPUs for each of the {count} instances, as in 0;1."
        )
    participants = _participants(model, count)
    return tuple(
        Instance(number=n, devices=devices[n], participants=participants[n])
        for n in range(count)
    )


def _count(model: RepositoryModel) -> int:
    groups = model.config.instance_group
    # A group that names GPUs means this number of instances on each of them.
    count = sum(max(1, group.count) * max(1, len(group.gpus)) for group in groups) or 1
    if count > MAX_INSTANCES:
        raise ConfigError(
            f"{model.config_path}: instance_group asks for {count} instances, each a worker "
            f"group, but at most {MAX_INSTANCES} of one model are started. Lower the count."
        )
    return count


def _devices(model: RepositoryModel, count: int) -> list[tuple[str, ...]]:
    groups = model.config.instance_group
    named: list[tuple[str, ...]] = [
        (str(gpu),)
        for group in groups
        for gpu in group.gpus
        for _ in range(max(1, group.count))
    ]
    lists = [
        tuple(_device(model, word) for word in words)
        for words in _lists(model, "gpu_device_ids")
    ]
    if not named:
        return _one_each(model, "gpu_device_ids", lists, count)
    if lists:
        raise ConfigError(
            f"{model.config_path}: GPUs are named twice, by gpu_device_ids and by the gpus of "
            "instance_group. Leave out one of them."
        )
    if len(named) != count:
        raise ConfigError(
            f"{model.config_path}: instance_group names GPUs for {len(named)} of {count} "
            "instances. Name them for all, or use gpu_device_ids."
        )
    return named


def _device(model: RepositoryModel, word: str) -> str:
    if _GPU.fullmatch(word):
        return str(int(word))
    if word.startswith(MIG_PREFIX):
        return word
    raise ConfigError(
        f"{model.config_path}: gpu_device_ids holds {word!r} but must be GPU numbers with "
        f"commas between, as in 0,1, or one {MIG_PREFIX}UUID an instance; ';' goes between "
        "instances"
    )


def _participants(model: RepositoryModel, count: int) -> list[tuple[int, ...]]:
    lists = []
    for words in _lists(model, "participant_ids"):
        bad = next((word for word in words if not _is_rank(word)), None)
        if bad is not None:
            raise ConfigError(
                f"{model.config_path}: participant_ids holds {bad!r} but must be world ranks "
                f"of 1 or more, up to {MAX_RANKS}, with commas between, as in 1,2; rank 0 is "
                "the orchestrator's place, and ';' goes between instances"
            )
        lists.append(tuple(int(word) for word in words))
    return _one_each(model, "participant_ids", lists, count)


def _is_rank(word: str) -> bool:
    return _RANK.fullmatch(word) is not None and int(word) <= MAX_RANKS


def _lists(model: RepositoryModel, key: str) -> list[list[str]]:
    """The words of each ``;``-separated list."""
    text = model.parameters.get_str(key)
    if not text:
        return []
    return [[word.strip() for word in part.split(",")] for part in text.split(";")]


def _one_each(
    model: RepositoryModel, key: str, lists: list[tuple[_T, ...]], count: int
) -> list[tuple[_T, ...]]:
    """One list for every instance; empty lists if the key is not set."""
    if not lists:
        return [()] * count
    if len(lists) < count:
        raise ConfigError(
            f"{model.config_path}: {key} mismatch: instance {len(lists)} >= {len(lists)} "
            f"entries. instance_group asks for {count} instances: name a list for each, with "
            "';' between."
        )
    if len(lists) > count:
        raise ConfigError(
            f"{model.config_path}: {key} names {len(lists)} lists for {count} instance(s). "
            f"Set the count of instance_group to {len(lists)}, or leave out lists."
        )
    return lists

"""Which models of a repository a server starts with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.server.repository.model_repository import (
    ModelRepository,
    RepositoryModel,
    Role,
    load_model,
    model_folders,
)
from trimaran.server.repository.python_model_choice import PythonModels

_ALL = "*"
_LLM_API_FILE = "model.yaml"
"""Of a model of the LLM API, in its version folder."""


@dataclass(frozen=True, slots=True)
class StartModels:
    """What is loaded first."""

    token: tuple[RepositoryModel, ...]
    """Token-level models, whose groups start with the server."""

    text: str
    """The model that the example request names: an ensemble, else a BLS model, else none."""


def start_models(args: argparse.Namespace) -> StartModels:
    """The models that these flags start with. Others of the repository are not read.

    Raises:
        ConfigError: a model is unusable or not there, or there are more than a server runs.
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
        tuple(_token_models(args, repository, may_be_none=is_explicit)), _text(repository)
    )


def _check_names(root: Path, python: PythonModels) -> None:
    unknown = sorted(python.names - model_folders(root).keys())
    if unknown:
        raise ConfigError(
            f"--python-models {unknown[0]}: no model of that name. The repository holds "
            f"{', '.join(model_folders(root)) or 'none'}; give native, execute, or names."
        )


def _with_steps(root: Path, names: Sequence[str]) -> set[str]:
    """The named models with those that they run: loading one loads all."""
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
            # An ensemble may be of anything.
            if {"text_input", "max_tokens"} <= {tensor.name for tensor in model.config.input}:
                return model.name
    return ""

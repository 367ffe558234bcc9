"""Which models of a repository a server starts with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from trimaran.comm.errors import ConfigError
from trimaran.server.model_repository import ModelRepository, RepositoryModel, Role

_ALL = "*"


def token_models(
    args: argparse.Namespace, repository: ModelRepository
) -> list[RepositoryModel]:
    """The token-level models whose groups start with the server.

    Raises:
        ConfigError: none is left, one is not there, or there are more than a server runs.
    """
    found = {model.name: model for model in repository.of_role(Role.TOKEN)}
    is_explicit = args.model_control_mode == "explicit"
    if is_explicit and _ALL not in args.load_model:
        found = {name: found[name] for name in _steps(repository, args.load_model) & set(found)}
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
    if not found and not is_explicit:
        raise ConfigError(
            "the model repository holds no token-level model (tensorrt_llm). Write one with "
            "`trimaran init-repo`."
        )
    if not args.multi_model and len(chosen) > 1:
        where = "--tensorrt-llm-model-name names" if names else "the model repository holds"
        raise ConfigError(
            f"{where} {len(chosen)} token-level models ({', '.join(sorted(chosen))}) and a "
            "server runs one. Serve them all with --multi-model, or choose one with "
            "--tensorrt-llm-model-name."
        )
    return [found[name] for name in chosen]


def text_model(repository: ModelRepository) -> str:
    """The model that the example request names: an ensemble, else the BLS model."""
    for role in (Role.ENSEMBLE, Role.BLS):
        for model in repository.of_role(role):
            return model.name
    return ""


def _steps(repository: ModelRepository, names: Sequence[str]) -> set[str]:
    """The named models with the steps of their ensembles: loading one loads all."""
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in seen or name not in repository.models:
            continue
        seen.add(name)
        config = repository.models[name].config
        waiting += [step.model_name for step in config.ensemble_scheduling.step]
    return seen

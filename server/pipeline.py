"""From a model repository to the models that serve it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.server.engine_client import EngineClient
from trimaran.server.graph_model import GraphModel, GraphStep
from trimaran.server.inference import Model
from trimaran.server.metrics import Metrics
from trimaran.server.model_repository import ModelRepository, RepositoryModel, Role
from trimaran.server.postprocessing import PostprocessingModel
from trimaran.server.preprocessing import PreprocessingModel
from trimaran.server.text_models import BlsModel, EnsembleModel, ensemble_maps
from trimaran.server.text_pipeline import Steps
from trimaran.server.token_model import TokenModel
from trimaran.server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_STEPS = (Role.PREPROCESSING, Role.TOKEN, Role.POSTPROCESSING)


async def build_models(
    repository: ModelRepository,
    engines: EngineClient,
    metrics: Metrics,
    tokenizer_threads: int = 2,
) -> list[Model]:
    """Every model of the repository, each wrapped so that its requests are counted.

    Raises:
        ConfigError: a model cannot be served; the message names it and the remedy.
    """
    builder = _Builder(repository, engines, metrics, tokenizer_threads)
    return await asyncio.to_thread(builder.build)


class _Builder:
    """Builds step models first, then the text models over them."""

    def __init__(
        self,
        repository: ModelRepository,
        engines: EngineClient,
        metrics: Metrics,
        tokenizer_threads: int,
    ) -> None:
        self._repository = repository
        self._engines = engines
        self._metrics = metrics
        self._tokenizer_threads = tokenizer_threads
        self._tokenizers: dict[str, Tokenizer] = {}
        self._models: dict[str, Model] = {}
        self._unfinished: set[str] = set()
        self._plain: dict[str, PreprocessingModel | PostprocessingModel | TokenModel] = {}

    def build(self) -> list[Model]:
        models: list[Model] = []
        for role in (*_STEPS, Role.ENSEMBLE, Role.BLS, Role.OTHER):
            for model in self._repository.of_role(role):
                models.append(self._built(model))
        return models

    def _built(self, model: RepositoryModel) -> Model:
        """The model, built on the first call."""
        if model.name not in self._models:
            if model.name in self._unfinished:
                raise ConfigError(
                    f"{model.config_path}: the ensemble '{model.name}' is a step of itself"
                )
            self._unfinished.add(model.name)
            self._models[model.name] = self._metrics.measure(self._build_one(model))
        return self._models[model.name]

    def _build_one(self, model: RepositoryModel) -> Model:
        if len(model.versions) > 1:
            raise ConfigError(
                f"{model.folder} holds the versions {model.versions}, but one version of a "
                "model is served. Keep one."
            )
        makers: dict[Role, Callable[[RepositoryModel, int], Model]] = {
            Role.PREPROCESSING: self._preprocessing,
            Role.TOKEN: self._token,
            Role.POSTPROCESSING: self._postprocessing,
            Role.ENSEMBLE: self._ensemble,
            Role.BLS: self._bls,
            Role.OTHER: _refuse,
        }
        built = makers[model.role](model, model.versions[0])
        if isinstance(built, GraphModel):
            logger.info("Model '%s': %s, run step by step", model.name, model.role.value)
        elif (model.folder / str(model.versions[0]) / "model.py").exists():
            logger.info(
                "Model '%s': native %s; its model.py is not run", model.name, model.role.value
            )
        else:
            logger.info("Model '%s': native %s", model.name, model.role.value)
        return built

    def _preprocessing(self, model: RepositoryModel, version: int) -> Model:
        built = PreprocessingModel(model, version, self._tokenizer(model))
        self._plain[model.name] = built
        return built

    def _postprocessing(self, model: RepositoryModel, version: int) -> Model:
        built = PostprocessingModel(model, version, self._tokenizer(model))
        self._plain[model.name] = built
        return built

    def _token(self, model: RepositoryModel, version: int) -> Model:
        built = TokenModel(model, version, self._engines)
        self._plain[model.name] = built
        return built

    def _tokenizer(self, model: RepositoryModel) -> Tokenizer:
        folder = model.parameters.get_str("tokenizer_dir")
        if folder is None:
            raise ConfigError(
                f"{model.config_path}: tokenizer_dir is not set. Fill it: trimaran "
                f"fill-template -i {model.config_path} tokenizer_dir:FOLDER"
            )
        key = str(Path(folder).resolve())
        if key not in self._tokenizers:
            self._tokenizers[key] = Tokenizer(folder, self._tokenizer_threads)
        return self._tokenizers[key]

    def _ensemble(self, model: RepositoryModel, version: int) -> Model:
        steps = model.config.ensemble_scheduling.step
        names = {self._repository.models[s.model_name].role: s.model_name for s in steps}
        if len(steps) == len(_STEPS) and set(names) == set(_STEPS):
            maps = ensemble_maps(model, names)
            if maps is not None:
                return EnsembleModel(model, version, self._wired(names), maps)
        graph = [
            GraphStep(
                self._built(self._repository.models[step.model_name]),
                dict(step.input_map),
                dict(step.output_map),
            )
            for step in steps
        ]
        return GraphModel(model, version, graph)

    def _bls(self, model: RepositoryModel, version: int) -> Model:
        token = model.parameters.get_str("tensorrt_llm_model_name") or "tensorrt_llm"
        names = {
            Role.PREPROCESSING: "preprocessing",
            Role.TOKEN: token,
            Role.POSTPROCESSING: "postprocessing",
        }
        for role, name in names.items():
            found = self._repository.models.get(name)
            if found is None or found.role is not role:
                raise ConfigError(
                    f"{model.config_path}: needs the {role.value} '{name}', which "
                    f"{self._repository.path} does not hold"
                )
        return BlsModel(model, version, self._wired(names))

    def _wired(self, names: dict[Role, str]) -> Steps:
        models = {r: self._built(self._repository.models[n]) for r, n in names.items()}
        post = self._plain[names[Role.POSTPROCESSING]]
        token = self._plain[names[Role.TOKEN]]
        assert isinstance(post, PostprocessingModel)
        assert isinstance(token, TokenModel)
        return Steps(
            preprocessing=models[Role.PREPROCESSING],
            token=models[Role.TOKEN],
            postprocessing=models[Role.POSTPROCESSING],
            tokenizer=post.tokenizer,
            skip_special_tokens=post.skip_special_tokens,
            excludes_input=token.excludes_input,
        )


def _refuse(model: RepositoryModel, version: int) -> Model:
    raise ConfigError(
        f"{model.config_path}: model '{model.name}' has the inputs and outputs of none of the "
        f"roles {', '.join(r.value for r in Role if r is not Role.OTHER)}; models of your own "
        "are not served by this version. Remove the folder."
    )

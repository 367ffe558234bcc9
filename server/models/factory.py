"""Builds the object that serves a model from the model's configuration."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from weakref import WeakValueDictionary

from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import read_text, unreadable
from trimaran.comm.tokenizers.prepare import tokenizer_fault
from trimaran.server.config import FrontendConfig
from trimaran.server.engines.model_engines import ModelEngines
from trimaran.server.inference.request import Model
from trimaran.server.metrics.measured_model import MeasuredModel
from trimaran.server.models.draft_rounds import TokenStep
from trimaran.server.models.graph_model import GraphModel, GraphStep
from trimaran.server.models.postprocessing import PostprocessingModel
from trimaran.server.models.preprocessing import PreprocessingModel
from trimaran.server.models.text_models import BLS_MAPS, BlsModel, EnsembleModel, ensemble_maps
from trimaran.server.models.text_run import Steps
from trimaran.server.models.token_model import TokenModel
from trimaran.server.models.tokenizer import Tokenizer
from trimaran.server.models.tokenizer_pool import TokenizerPool
from trimaran.server.python_models.calls import ModelCalls
from trimaran.server.python_models.model import PythonModel
from trimaran.server.repository.ensemble_graph import check_ensemble, check_step_versions
from trimaran.server.repository.model_repository import (
    CODE_FILE,
    EXECUTABLE,
    RepositoryModel,
    Role,
)

_TOKEN_OUTPUTS = {"output_ids": "_output_ids", "sequence_length": "_sequence_length"}
_TEXT = "OUTPUT"


def bls_graph(model: RepositoryModel, version: int, steps: Mapping[Role, Model]) -> GraphModel:
    """A graph of the three steps. The postprocessing step decodes each response of the
    token-level model separately.

    Raises:
        ConfigError: accumulate_tokens is set, which only native postprocessing supports.
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
    # The graph completes its configuration, so it gets a copy of the model's.
    config = ModelConfig()
    config.CopyFrom(model.config)
    return GraphModel(replace(model, config=config), version, graph)


def _step(model: Model, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> GraphStep:
    """A step with the tensors of these that its model declares."""
    has_input = {tensor.name for tensor in model.config.input}
    has_output = {tensor.name for tensor in model.config.output}
    return GraphStep(
        model,
        {name: source for name, source in inputs.items() if name in has_input},
        {name: target for name, target in outputs.items() if name in has_output},
    )


logger = logging.getLogger(__name__)


def warn_of_surplus_ids(name: str, steps: Mapping[str, Model]) -> None:
    """Warn of a composed model whose tokenizer has ids outside the engine's vocabulary.

    The model is served: many tokenizers are published with special tokens that their models
    were not trained on, and most prompts do not use them.
    """
    readers = [step for step in steps.values() if isinstance(step, TokenModel)]
    writers = [step for step in steps.values() if isinstance(step, PreprocessingModel)]
    for writer in writers:
        for reader in readers:
            if reader.vocab_size is not None and writer.tokenizer.num_ids > reader.vocab_size:
                logger.warning(
                    "%s", " ".join(_sentences(name, writer, reader.name, reader.vocab_size))
                )


def _sentences(
    name: str, writer: PreprocessingModel, reader: str, vocab_size: int
) -> Iterable[str]:
    tokenizer = writer.tokenizer
    yield (
        f"Model '{name}': the tokenizer of '{writer.name}' has {tokenizer.num_ids} ids "
        f"({tokenizer.folder}), but the engine of '{reader}' has a vocabulary of "
        f"{vocab_size}: a prompt that holds one of the others is refused."
    )
    if tokenizer.end_id is not None and tokenizer.end_id >= vocab_size:
        yield f"The end token, {tokenizer.end_id}, is one: no output ends with it."
    yield "If prompts use those ids, name the model's own tokenizer in tokenizer_dir."


COMPOSED = (Role.ENSEMBLE, Role.BLS)
"""Roles that run other models."""

_STEPS = (Role.PREPROCESSING, Role.TOKEN, Role.POSTPROCESSING)


@dataclass(frozen=True, slots=True)
class Step:
    """A model that others may run."""

    source: RepositoryModel
    plain: Model
    """The model itself."""
    model: MeasuredModel
    """The same, counted."""
    older: tuple[MeasuredModel, ...] = field(default=(), kw_only=True)
    """Older versions that are served too."""

    def of_version(self, number: int) -> MeasuredModel:
        """A served version; the latest for -1 and 0."""
        numbered = {int(model.version): model for model in self.older}
        return numbered.get(number, self.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoryOptions:
    """The settings of the front end that models are made with."""

    tokenizer_workers: int = 1
    """Processes of all tokenizers."""

    max_text_bytes: int = 0
    """That of `TextLimits`."""

    clamps_ids: bool = False
    """Whether ids of prompts outside the vocabulary become its first or last id."""

    num_frontends: int = 1
    """Front ends that serve the same models, each with processes of its own."""

    @classmethod
    def of(cls, config: FrontendConfig) -> FactoryOptions:
        """The settings in a front end's configuration."""
        return cls(
            tokenizer_workers=config.tokenizer_workers,
            max_text_bytes=config.max_text_bytes,
            clamps_ids=config.clamps_ids,
            num_frontends=config.num_frontends,
        )


class ModelFactory:
    """Makes models. Tokenizers are shared by living models."""

    def __init__(self, calls: ModelCalls, options: FactoryOptions | None = None) -> None:
        """``calls`` is what the code of Python models may ask for."""
        self._calls = calls
        self._options = options or FactoryOptions()
        self._tokenizer_pool = TokenizerPool(self._options.tokenizer_workers)
        self._tokenizers: WeakValueDictionary[tuple[object, ...], Tokenizer] = (
            WeakValueDictionary()
        )

    def single(self, source: RepositoryModel, engines: ModelEngines | None = None) -> Model:
        """A model that runs by itself; a model of the token role has ``engines``. Reads files.

        Raises:
            ConfigError: the model cannot be served; the message names the model and the remedy.
        """
        model = _own_config(source)
        makers: dict[Role, Callable[[RepositoryModel, int], Model]] = {
            Role.PREPROCESSING: self._preprocessing,
            Role.POSTPROCESSING: self._postprocessing,
        }
        if model.role is Role.TOKEN:
            assert engines is not None
            version, clamps_ids = _only_version(model), self._options.clamps_ids
            built: Model = TokenModel(model, version, engines, clamps_ids=clamps_ids)
        elif model.role in makers:
            built = makers[model.role](model, _only_version(model))
        else:
            return self._python(model)
        _log_native(model)
        return built

    def composed(self, source: RepositoryModel, steps: Mapping[str, Step]) -> Model:
        """An ensemble or a BLS model over models of ``steps``, which may hold others too.

        Raises:
            ConfigError: a step is missing, or does not fit; the message names the remedy.
        """
        model = _own_config(source)
        version = _only_version(model)
        absent = [name for name in model.steps if name not in steps]
        if absent:
            raise ConfigError(
                f"{model.config_path}: its step '{absent[0]}' is not loaded. Load that "
                "model, or name one that the repository holds."
            )
        if model.role is Role.BLS:
            built = self._bls(model, version, steps)
        else:
            configs = {name: step.source.config for name, step in steps.items()}
            check_ensemble(model.config_path, model.config, configs)
            served = {name: step.source.versions for name, step in steps.items()}
            check_step_versions(model.config_path, model.config, served)
            built = self._ensemble(model, version, steps)
        parts = {name: steps[name].plain for name in model.steps if name in steps}
        warn_of_surplus_ids(model.name, parts)
        if isinstance(built, GraphModel):
            logger.info("Model '%s': %s, run step by step", model.name, model.role.value)
        else:
            _log_native(model)
        return built

    # ---- single models ------------------------------------------------------------------

    def _python(self, model: RepositoryModel) -> Model:
        for version in model.versions:
            if not model.has_code(version):
                raise _unserved(model)
            logger.info("Model '%s': runs its own %s/model.py", model.name, version)
        num_frontends = self._options.num_frontends
        if model.config.HasField("sequence_batching") and num_frontends > 1:
            raise ConfigError(
                f"{model.config_path}: sequence_batching needs all requests of a sequence in "
                f"one front end, but --frontend-processes is {num_frontends}. Set it to 1."
            )
        *rest, latest = model.versions
        older = [PythonModel(model, version, self._calls) for version in rest]
        return PythonModel(model, latest, self._calls, older)

    def _preprocessing(self, model: RepositoryModel, version: int) -> Model:
        return PreprocessingModel(model, version, self._tokenizer(model))

    def _postprocessing(self, model: RepositoryModel, version: int) -> Model:
        return PostprocessingModel(model, version, self._tokenizer(model))

    def _tokenizer(self, model: RepositoryModel) -> Tokenizer:
        folder = model.parameters.get_str("tokenizer_dir")
        if folder is None:
            raise ConfigError(
                f"{model.config_path}: tokenizer_dir is not set. Fill it: trimaran "
                f"fill-template -i {model.config_path} tokenizer_dir:FOLDER"
            )
        # Keyed by the files' times too: a load after a change must not find the old tokenizer.
        try:
            path = Path(folder).resolve()
            key = (str(path), *_file_times(path))
            tokenizer = self._tokenizers.get(key)
            if tokenizer is None:
                tokenizer = Tokenizer(
                    folder, self._tokenizer_pool, self._options.max_text_bytes
                )
                self._tokenizers[key] = tokenizer
            return tokenizer
        # A zero byte in the path, or a cycle of links.
        except (ConfigError, OSError, ValueError, RuntimeError) as error:
            raise tokenizer_fault(model.config_path, error) from error

    # ---- composed models ----------------------------------------------------------------

    def _ensemble(
        self, model: RepositoryModel, version: int, steps: Mapping[str, Step]
    ) -> Model:
        scheduled = model.config.ensemble_scheduling.step
        names = {_part(steps[s.model_name]): s.model_name for s in scheduled}
        if len(scheduled) == len(_STEPS) and set(names) == set(_STEPS):
            maps = ensemble_maps(model, names)
            if maps is not None:
                chosen = {s.model_name: _chosen(steps, s) for s in scheduled}
                return EnsembleModel(model, version, _wired(model.name, names, chosen), maps)
        graph = [
            GraphStep(
                _chosen(steps, step).model,
                dict(step.input_map),
                dict(step.output_map),
            )
            for step in scheduled
        ]
        return GraphModel(model, version, graph)

    def _bls(self, model: RepositoryModel, version: int, steps: Mapping[str, Step]) -> Model:
        names = dict(zip(_STEPS, model.steps, strict=False))
        draft = model.parameters.get_str("tensorrt_llm_draft_model_name")
        for role, name in names.items():
            _check_role(model, name, steps[name], role, Role.OTHER)
        if draft:
            _check_role(model, draft, steps[draft], Role.TOKEN)
        if any(_part(steps[name]) is not role for role, name in names.items()):
            if draft:
                raise ConfigError(
                    f"{model.config_path}: tensorrt_llm_draft_model_name is {draft!r}, but the "
                    "steps run code of their own, and drafts need native postprocessing. Leave "
                    "the draft model out, or postprocessing out of --python-models."
                )
            models = {role: steps[name].model for role, name in names.items()}
            return BlsModel(model, version, bls_graph(model, version, models))
        wired = _wired(model.name, names, steps)
        if draft:
            wired = replace(wired, draft=_token_step(steps[draft]))
        return BlsModel(model, version, wired)


def _chosen(steps: Mapping[str, Step], scheduled: Any) -> Step:
    """The step of an ensemble (``ModelEnsembling.Step``), in the version that it names."""
    step = steps[scheduled.model_name]
    return replace(step, model=step.of_version(scheduled.model_version))


def _check_role(model: RepositoryModel, name: str, step: Step, *allowed: Role) -> None:
    """Refuse a step of a BLS model that has another role; raises ConfigError."""
    found = step.source.role
    if found not in allowed:
        raise ConfigError(
            f"{model.config_path}: its step '{name}' is of the role '{found.value}' but must "
            f"be of '{allowed[0].value}'. Correct that model's configuration, or name another "
            "model."
        )


def _token_step(step: Step) -> TokenStep:
    assert isinstance(step.plain, TokenModel)
    return TokenStep(step.model, step.plain.facts)


def read_labels(model: RepositoryModel) -> dict[str, list[str]]:
    """The class labels of the outputs that have a label file.

    Raises:
        ConfigError: a file cannot be read, or lies outside the model's folder.
    """
    labels = {}
    for output in model.config.output:
        if not output.label_filename:
            continue
        what = f"{model.config_path}: label_filename of output '{output.name}'"
        if not _is_inside(output.label_filename):
            # A load request must not read other files of the server.
            raise ConfigError(
                f"{what} is {output.label_filename!r}, which names no file below the model's "
                "folder. Put the labels there, and name them from there."
            )
        path = model.folder / output.label_filename
        try:
            labels[output.name] = read_text(path).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise unreadable(f"{what}: {path}", error) from error
    return labels


def _is_inside(name: str) -> bool:
    """Whether a relative path stays below its folder; links of the operator inside are
    allowed.
    """
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _own_config(source: RepositoryModel) -> RepositoryModel:
    """A copy of the model with its own configuration, which can be completed."""
    config = ModelConfig()
    config.CopyFrom(source.config)
    return replace(source, config=config)


def _only_version(model: RepositoryModel) -> int:
    if len(model.versions) > 1:
        raise ConfigError(
            f"{model.config_path}: version_policy chooses the versions "
            f"{', '.join(map(str, model.versions))}, but only models that run their own "
            "model.py have several. Choose one."
        )
    return model.versions[0]


def _file_times(folder: Path) -> list[tuple[str, int, int]]:
    if folder.is_file():
        stat = folder.stat()
        return [(folder.name, stat.st_mtime_ns, stat.st_size)]
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        stats = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    return sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


def _part(step: Step) -> Role:
    """The role of a step in a native pipeline. Preprocessing may be user code; postprocessing
    must be native, because it takes part in streaming.
    """
    role = step.source.role
    return Role.PREPROCESSING if role is Role.OTHER else role


def _wired(name: str, names: Mapping[Role, str], steps: Mapping[str, Step]) -> Steps:
    """The steps of the text model ``name``; logs which ids end its outputs."""
    post = steps[names[Role.POSTPROCESSING]].plain
    token = steps[names[Role.TOKEN]].plain
    assert isinstance(post, PostprocessingModel)
    assert isinstance(token, TokenModel)
    wired = Steps(
        preprocessing=steps[names[Role.PREPROCESSING]].model,
        token=steps[names[Role.TOKEN]].model,
        postprocessing=steps[names[Role.POSTPROCESSING]].model,
        tokenizer=post.tokenizer,
        arrivals=token.arrivals,
        max_input_len=partial(getattr, token, "max_input_len"),
        facts=token.facts,
        unread_logits=token.unread_logits,
        adapter_folder=token.adapter_folder,
        skip_special_tokens=post.skip_special_tokens,
        excludes_input=token.excludes_input,
        has_own_preprocessing=steps[names[Role.PREPROCESSING]].source.role is Role.OTHER,
        normalises_log_probs=token.normalises_log_probs,
    )
    if not wired.has_own_preprocessing:
        ends = wired.tokenizer.named(wired.end_ids) or "no id"
        logger.info("Model '%s': %s ends an output, unless a request names end_id", name, ends)
    return wired


def _log_native(model: RepositoryModel) -> None:
    note = ""
    # An unreadable model.py is not run either.
    if os.path.exists(model.folder / str(model.versions[0]) / CODE_FILE):
        note = "; its model.py is not run"
        if model.role in EXECUTABLE:
            note += " (--python-models execute would)"
    logger.info("Model '%s': native %s%s", model.name, model.role.value, note)


def _unserved(model: RepositoryModel) -> ConfigError:
    return ConfigError(
        f"{model.config_path}: model '{model.name}' has the inputs and outputs of none of the "
        f"roles {', '.join(r.value for r in Role if r is not Role.OTHER)}, and it is no Python "
        f"model: its backend is {model.config.backend!r} and not 'python', or the version's "
        "folder has no model.py. Add them, or remove the folder."
    )

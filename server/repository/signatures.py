"""The tensors of the five roles: detection of a model's role from its tensors, and types."""

from __future__ import annotations

import functools
import logging
import re
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from trimaran.comm.errors import ConfigError

logger = logging.getLogger(__name__)


class Role(Enum):
    """The role of a model in a text pipeline. OTHER runs user code."""

    PREPROCESSING = "preprocessing"
    TOKEN = "token model"
    POSTPROCESSING = "postprocessing"
    ENSEMBLE = "ensemble"
    BLS = "bls"
    OTHER = "other"


_TEMPLATES = {
    Role.PREPROCESSING: "preprocessing",
    Role.TOKEN: "tensorrt_llm",
    Role.POSTPROCESSING: "postprocessing",
    Role.ENSEMBLE: "ensemble",
    Role.BLS: "tensorrt_llm_bls",
}
# Combinations of inputs and outputs that only a model of the role has. Models of
# version 0.5 have no sequence lengths.
_SIGNATURES: tuple[tuple[Role, frozenset[str], frozenset[str]], ...] = (
    (
        Role.PREPROCESSING,
        frozenset({"QUERY", "REQUEST_OUTPUT_LEN"}),
        frozenset({"INPUT_ID", "REQUEST_INPUT_LEN"}),
    ),
    (
        Role.POSTPROCESSING,
        frozenset({"TOKENS_BATCH"}),
        frozenset({"OUTPUT"}),
    ),
    (
        Role.TOKEN,
        frozenset({"input_ids", "input_lengths", "request_output_len"}),
        frozenset({"output_ids"}),
    ),
    (Role.BLS, frozenset({"text_input", "max_tokens"}), frozenset({"text_output"})),
)
_BATCH_INPUT, _BATCH_OUTPUTS = "output_log_probs", ("log_probs", "cum_log_probs")
_NEWEST = 18
# Samples of requests as the backend's token model in Python names them.
_REPORTED_ACTIVE, _REPORTED_WAITING = '"request_type": "active"', '"request_type": "waiting"'
# A tensor of the token model that each version brought, from the newest version on.
_FIRST_OF = (
    (_NEWEST, "retention_token_range_starts"),
    (16, "return_kv_cache_reuse_stats"),
    (15, "encoder_input_features"),
    (14, "num_return_sequences"),
    (13, "prompt_table_extra_ids"),
    (12, "batch_index"),
    (11, "decoder_input_ids"),
    (10, "runtime_top_p_min"),
    (9, "lora_task_id"),
    (8, "frequency_penalty"),
    (7, "draft_input_ids"),
    (6, "embedding_bias"),
)
PASSED_ON = frozenset(
    {
        "CUM_LOG_PROBS", "OUTPUT_LOG_PROBS", "CONTEXT_LOGITS", "GENERATION_LOGITS",
        "BATCH_INDEX", "SEQUENCE_INDEX",
    }
)  # fmt: skip
"""Inputs of older postprocessing models, which are returned unchanged as OUT_ and the name."""

_COUNTS = (
    "REQUEST_OUTPUT_LEN", "request_output_len", "max_tokens", "end_id", "pad_id", "beam_width",
    "runtime_top_k", "top_k", "min_length", "prompt_vocab_size",
)  # fmt: skip
"""Integers that repositories of versions 0.5 and 0.6 declare without a sign."""

_HALVES_AND_FLOATS = ("TYPE_FP32", "TYPE_FP16", "TYPE_BF16")
# Tensors whose type depends on the engine or the version; all others have the template's type.
_CHOICES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_COUNTS, ("TYPE_INT32", "TYPE_UINT32")),
    "context_logits": ("TYPE_FP32", "TYPE_FP16"),
    "generation_logits": ("TYPE_FP32", "TYPE_FP16"),
    "draft_logits": ("TYPE_FP32", "TYPE_FP16"),
    "encoder_input_features": _HALVES_AND_FLOATS,
    "prompt_embedding_table": _HALVES_AND_FLOATS,
    "lora_weights": _HALVES_AND_FLOATS,
    "image_input": _HALVES_AND_FLOATS,
    "PIXEL_VALUES": _HALVES_AND_FLOATS,
}


def role_of(path: Path, config: ModelConfig, *, has_code: bool = False) -> Role:
    """The role, by platform and tensors, independent of the name.

    Raises:
        ConfigError: name or backend imply a role, but tensors of the role are missing,
            and there is no user code to run instead.
    """
    if config.platform == "ensemble" or config.HasField("ensemble_scheduling"):
        return Role.ENSEMBLE
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    for role, needed_inputs, needed_outputs in _SIGNATURES:
        if needed_inputs <= inputs and needed_outputs <= outputs:
            return role
    if not has_code:
        _refuse_near_miss(path, config, inputs, outputs)
    return Role.OTHER


def _refuse_near_miss(
    path: Path, config: ModelConfig, inputs: set[str], outputs: set[str]
) -> None:
    names = {name: role for role, name in _TEMPLATES.items()}
    is_engine = config.backend == "tensorrtllm"
    meant = Role.TOKEN if is_engine else names.get(config.name)
    for role, needed_inputs, needed_outputs in _SIGNATURES:
        if role is meant:
            lacking = sorted(needed_inputs - inputs) or sorted(needed_outputs - outputs)
            side = "input" if needed_inputs - inputs else "output"
            raise ConfigError(
                f"{path}: a {role.value} has the {side} '{lacking[0]}', which is not declared. "
                f"A complete one: trimaran init-repo FOLDER --models {_TEMPLATES[role]}"
            )


def answers_batches(config: ModelConfig) -> bool:
    """Whether a token model is from the repository ``gpt``, without in-flight batching: a
    single response answers all samples of a request. The input that requests
    log-probabilities has the name of another model's output.
    """
    return any(tensor.name == _BATCH_INPUT for tensor in config.input)


def precedes_sequences(config: ModelConfig) -> bool:
    """Whether a model is from a version up to 0.13, whose models have no sequence index."""
    return all(output.name != "sequence_index" for output in config.output)


def returns_every_beam(config: ModelConfig) -> bool:
    """Whether a model is from version 0.14, in which ``num_return_sequences`` counts searches
    and each search returns all of its beams. Version 0.15 brought features of encoders.
    """
    names = {tensor.name for tensor in config.input}
    return "num_return_sequences" in names and "encoder_input_features" not in names


def adds_special_tokens(config: ModelConfig) -> bool:
    """Whether a preprocessing model that leaves ``add_special_tokens`` open adds them. Those of
    versions 0.9 and 0.10, which have the key and no decoder's text, do not.
    """
    names = {tensor.name for tensor in config.input}
    return "DECODER_QUERY" in names or "add_special_tokens" not in config.parameters


def pads_with_end(config: ModelConfig) -> bool:
    """Whether a preprocessing model is from a version up to 0.10, whose padding is the end id
    even where the tokenizer has an id for padding. Version 0.11 brought a decoder's text.
    """
    return all(tensor.name != "DECODER_QUERY" for tensor in config.input)


def backend_minor(config: ModelConfig, version_folder: Path) -> int:
    """The second number of the version of Triton's TensorRT-LLM backend that a token model
    is from. The tensors show the version up to 0.16. The tensors of versions from 0.17 on are
    equal: a model in Python in ``version_folder`` that reports no waiting requests is from
    0.17. Other tensors, and those that show no version, count as the newest version's.
    """
    names = {tensor.name for tensor in (*config.input, *config.output)}
    minor = next((minor for minor, name in _FIRST_OF if name in names), _NEWEST)
    if minor < _NEWEST:
        return minor
    script = version_folder / "model.py"
    text = script.read_text("utf-8", "replace") if script.is_file() else ""
    reports = _REPORTED_ACTIVE in text and _REPORTED_WAITING not in text
    return _NEWEST - 1 if reports else _NEWEST


def check_tensors(path: Path, config: ModelConfig, role: Role) -> None:
    """Check the types of the role's tensors and warn of tensors that the role ignores.

    An ensemble may have any tensors: its steps determine their meaning.

    Raises:
        ConfigError: a tensor has another type than the role supports.
    """
    if role not in _TEMPLATES:
        return
    known_inputs, known_outputs = map(dict, _known(role))
    if role is Role.TOKEN and answers_batches(config):
        known_inputs[_BATCH_INPUT] = "TYPE_BOOL"
        known_outputs.update(dict.fromkeys(_BATCH_OUTPUTS, "TYPE_FP32"))
    sides = (("input", config.input, known_inputs), ("output", config.output, known_outputs))
    for side, tensors, known in sides:
        for tensor in tensors:
            if tensor.name in known:
                _check_type(path, side, tensor, known[tensor.name])
            elif role is not Role.ENSEMBLE and not _is_passed_on(role, tensor.name):
                logger.warning(
                    "%s: the %s '%s' is not one of a %s and is ignored",
                    path, side, tensor.name, role.value,
                )  # fmt: skip


def _is_passed_on(role: Role, name: str) -> bool:
    return role is Role.POSTPROCESSING and name.removeprefix("OUT_") in PASSED_ON


def _check_type(path: Path, side: str, tensor: Any, type_name: str) -> None:
    allowed = _CHOICES.get(tensor.name, (type_name,))
    actual = DataType.Name(tensor.data_type)
    if actual not in allowed:
        raise ConfigError(
            f"{path}: the {side} '{tensor.name}' has data_type {actual} but must have "
            f"{' or '.join(allowed)}"
        )


@functools.cache
def _known(role: Role) -> tuple[dict[str, str], dict[str, str]]:
    """Names and types of a role's inputs and outputs, as in the role's template."""
    folder = resources.files("trimaran.server.repository") / "templates" / _TEMPLATES[role]
    text = (folder / "config.pbtxt").read_text(encoding="utf-8")
    text = re.sub(r"(data_type: )\$\{\w+\}", r"\1TYPE_FP32", text)
    text = re.sub(r"(decoupled: )\$\{\w+\}", r"\1true", text)
    config = text_format.Parse(re.sub(r"\$\{\w+\}", "1", text), ModelConfig())
    return (
        {tensor.name: DataType.Name(tensor.data_type) for tensor in config.input},
        {tensor.name: DataType.Name(tensor.data_type) for tensor in config.output},
    )

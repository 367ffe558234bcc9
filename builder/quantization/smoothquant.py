"""Folders of INT8 weights for INT8 inputs, smoothed by the inputs of a text."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimaran.builder.journal import JOURNAL_FILE, stamp
from trimaran.builder.progress import ProgressBar
from trimaran.builder.quantization.byte_form import ByteForm
from trimaran.builder.quantization.calibration_text import (
    calibration_model,
    calibration_sequences,
    check_calibration,
)
from trimaran.builder.quantization.channel_folds import norm_folds
from trimaran.builder.quantization.observed_inputs import input_peaks
from trimaran.builder.quantization.quantized_folder import QuantizedFolder
from trimaran.builder.quantization.smoothing import Smoothing, smoothing
from trimaran.comm.errors import ConfigError
from trimaran.kernels.integer_reference import LARGEST_INPUT
from trimaran.worker.config.engine_folder import EngineFolder, FolderKind
from trimaran.worker.config.quantization import ANY_LINEAR, QuantizationConfig, SchemeRule
from trimaran.worker.config.schemes import Activations, IntegerScheme
from trimaran.worker.layers.linear import ParallelLinear
from trimaran.worker.models.interfaces import CausalLM, StageRange
from trimaran.worker.models.registry import build_model, dtype_by_name
from trimaran.worker.models.weights.checkpoint import find_tensors
from trimaran.worker.models.weights.parts import parts_of
from trimaran.worker.parallel.tensor_parallel import ShardPosition

_LEAST_SCALE = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothQuant:
    """How weights and inputs become INT8."""

    strength: float
    """The part of the sizes of inputs' channels that moves into weights, above 0, at most 1."""

    has_row_scales: bool = True
    """Whether each row of a weight has a scale; otherwise a whole weight has one."""

    has_token_scales: bool = True
    """Whether each token has a scale; otherwise the text gives all inputs of a product one."""


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A text whose inputs are measured, and the flag that names it."""

    flag: str
    file: str
    max_sequences: int | None = None


def smoothed_folder(
    source: EngineFolder, how: SmoothQuant, text: CalibrationText
) -> QuantizedFolder:
    """The quantized folder of a Hugging Face folder of floats, which reads a text first.

    Raises:
        ConfigError: the weights are quantized or cut for ranks already, the model's layers are
            not known, the file cannot be read as text, or some inputs are not finite.
    """
    _check(source, text)
    changes = _smoothing(source, how, text)
    scales = {
        name: max(peak / LARGEST_INPUT, _LEAST_SCALE) for name, peak in changes.peaks.items()
    }
    folder = _unsmoothed(source, how, scales)
    folder.use_floats(changes.floats)
    return folder


def write_smoothed(
    source: EngineFolder, how: SmoothQuant, text: CalibrationText, output: Path
) -> EngineFolder:
    """Write a `smoothed_folder`, and read its configuration."""
    smoothed_folder(source, how, text).write(output)
    return EngineFolder.load(output)


def kept_smoothed(
    source: EngineFolder, how: SmoothQuant, text: CalibrationText, folder: Path
) -> EngineFolder:
    """The folder of `write_smoothed` inside ``folder``, which may hold it from an interrupted
    build with equal settings.

    Raises:
        ConfigError: as `write_smoothed`.
    """
    output, journal = folder / "weights", folder / JOURNAL_FILE
    identity = json.dumps(_identity(source, how, text), sort_keys=True)
    if journal.is_file() and journal.read_text(encoding="utf-8") == identity:
        return EngineFolder.load(output)
    shutil.rmtree(folder, ignore_errors=True)
    made = write_smoothed(source, how, text, output)
    # Last, and whole: an interrupted build leaves the folder without it.
    written = journal.with_suffix(".new")
    written.write_text(identity, encoding="utf-8")
    written.replace(journal)
    return made


def _identity(source: EngineFolder, how: SmoothQuant, text: CalibrationText) -> dict[str, Any]:
    """All values that the smoothed weights depend on."""
    files = sorted(path.resolve() for path in source.path.iterdir() if path.is_file())
    stamps = [[str(path), *stamp(path)] for path in files]
    return {
        "smoothquant": asdict(how),
        "text": hashlib.sha256(Path(text.file).read_bytes()).hexdigest(),
        "max_sequences": text.max_sequences,
        "config": source.config.to_dict(),
        "files": stamps,
    }


def write_outline(
    source: EngineFolder, how: SmoothQuant, text: CalibrationText, output: Path
) -> EngineFolder:
    """The folder of `write_smoothed` with holes in place of all tensors. The model reads no
    text.

    Raises:
        ConfigError: as `smoothed_folder`, unless the inputs of the text are the reason.
    """
    _check(source, text)
    _unsmoothed(source, how, {}).write_outline(output)
    return EngineFolder.load(output)


def _unsmoothed(
    source: EngineFolder, how: SmoothQuant, scales: Mapping[str, float]
) -> QuantizedFolder:
    """A folder in the right format; ``scales`` are the static ones of inputs."""
    form = ByteForm(
        has_row_scales=how.has_row_scales,
        input_scales=None if how.has_token_scales else scales,
    )
    return QuantizedFolder(_quantized(source, how), form)


def _check(source: EngineFolder, text: CalibrationText) -> None:
    _check_floats(source)
    check_calibration(text.flag, text.file, source)
    # A model without memory tells what is refused before another one is loaded.
    norm_folds(_model_of(source))


def _check_floats(source: EngineFolder) -> None:
    if source.kind is not FolderKind.HUGGINGFACE or not source.path.is_dir():
        raise ConfigError(
            f"{source.path}: SmoothQuant changes the floats of a Hugging Face folder, which "
            "this is not. Name the Hugging Face folder."
        )
    quantization = source.config.quantization
    if quantization is not None:
        raise ConfigError(
            f"{source.path}: SmoothQuant changes floats, but config.json describes quantized "
            f"weights or a quantized KV cache ({quantization.method}). Name the folder of the "
            "model in bfloat16, float16 or float32."
        )


def _quantized(source: EngineFolder, how: SmoothQuant) -> EngineFolder:
    activations = Activations.TOKEN if how.has_token_scales else Activations.STATIC
    scheme = IntegerScheme(bits=8, group_size=None, activations=activations)
    rule = SchemeRule(targets=(ANY_LINEAR,), scheme=scheme)
    quantization = QuantizationConfig(method="trimaran", rules=(rule,), quantizes_at_load=True)
    return replace(source, config=replace(source.config, quantization=quantization))


def _model_of(source: EngineFolder) -> CausalLM:
    config = source.config
    return build_model(
        config,
        StageRange.of(config.num_hidden_layers, 0, 1),
        ShardPosition(),
        dtype=dtype_by_name(config.dtype),
        device=torch.device("meta"),
    )


def _smoothing(source: EngineFolder, how: SmoothQuant, text: CalibrationText) -> Smoothing:
    model = _model_of(source)
    return smoothing(
        model,
        parts_of(model, find_tensors(model, source.weight_files)),
        _peaks(source, text),
        how.strength,
        through_products=how.has_row_scales,
    )


def _peaks(source: EngineFolder, text: CalibrationText) -> dict[str, Tensor]:
    sequences = calibration_sequences(text.flag, text.file, source, text.max_sequences)
    model = calibration_model(source, source.config.dtype, "none")
    layers = [
        path for path, module in model.named_modules() if isinstance(module, ParallelLinear)
    ]
    num_tokens, done = sum(map(len, sequences)), 0
    with ProgressBar(num_tokens) as progress:

        def tell(count: int) -> None:
            nonlocal done
            done += count
            progress.show(done, f"{done} of {num_tokens} tokens read for SmoothQuant")

        peaks = input_peaks(model, layers, sequences, tell)
    for path, peaks_D in peaks.items():
        if not bool(peaks_D.isfinite().all()):
            raise ConfigError(
                f"{text.flag} {text.file}: some inputs of {path} are not finite. Check the "
                "checkpoint's weights."
            )
    return peaks

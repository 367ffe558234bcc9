"""Loads a rank's weights: from a whole checkpoint, from its shard file, or random."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from trimaran.comm.errors import ConfigError
from trimaran.kernels.quantized import FP8
from trimaran.worker.config.shard_file import read_tensor_entries
from trimaran.worker.layers.linear import WeightShapeError
from trimaran.worker.models.interfaces import CausalLM, LoadsWeight, WeightTarget
from trimaran.worker.models.quantized_layers import Fp8Method, IntegerMethod
from trimaran.worker.models.weights.checkpoint import (
    DTYPE_WORDS,
    FLOAT_WORDS,
    CheckpointTensors,
    StoredTensor,
    find_tensors,
    is_safetensors,
    mapped_file,
    refuse_differences,
)
from trimaran.worker.models.weights.parts import (
    Conversion,
    Part,
    QuantizedFloats,
    parts_of,
)
from trimaran.worker.models.weights.tensor_reader import TensorReader
from trimaran.worker.models.weights.verification import BackgroundVerification, ShardVerifier
from trimaran.worker.quantization.fp8_linear import INPUT_SCALE, WEIGHT_SCALE
from trimaran.worker.quantization.integer_formats import WEIGHT, WEIGHT_ZERO, kind_of

logger = logging.getLogger(__name__)

_RANDOM_STD = 0.02
_MAX_NAMES = 3
_SCALES = (WEIGHT_SCALE, INPUT_SCALE)
_KEPT_DTYPES = (FP8, torch.uint8, torch.int8, torch.int16, torch.int32)
"""Dtypes of the parameters of quantized layers, whatever the model's dtype."""

_WIDER = (torch.bfloat16, torch.float32, torch.float64)
"""Dtypes whose values may exceed the range of float16."""

_WHOLE = ("embed_positions.", ".router.", ".attention.down_proj.", "projection.")
"""Parts of names of weights that every rank holds whole."""


def load_checkpoint(model: CausalLM, files: Sequence[Path]) -> None:
    """Fill a rank's model from the files of a Hugging Face checkpoint.

    On the CPU files are memory-mapped, and only this rank's shards are copied. On a GPU several
    threads read the tensors that this rank needs. Raises `ConfigError` that names every tensor
    that is missing, unexpected or of another shape.
    """
    parameters = dict(model.named_parameters())
    wanted: dict[Path, dict[str, list[Part]]] = {path: {} for path in files}
    for part in parts_of(model, find_tensors(model, files)):
        wanted[part.stored.path].setdefault(part.stored.name, []).append(part)
    _log_dequantized(
        [part for names in wanted.values() for of in names.values() for part in of]
    )
    with _Files(model.device) as reader, CheckpointTensors() as scales:
        for path, names in wanted.items():
            for name, tensor in reader.tensors(path, list(names)):
                quantized: QuantizedFloats = {}
                for part in names[name]:
                    parameter = parameters[part.target.parameter]
                    matrix = part.target.of(tensor)
                    refuse_overflow(matrix, parameter.dtype, part.stored)
                    whole = part.whole(
                        tensor, lambda stored: scales.read(stored).to(model.device),
                        parameter.dtype, quantized,
                    )  # fmt: skip
                    load_weight(model, parameter, part.target, whole, part.stored)


def _log_dequantized(parts: Sequence[Part]) -> None:
    kinds = (Conversion.DEQUANTIZED, Conversion.DEQUANTIZED_INTEGERS)
    names = [part.stored.name for part in parts if part.conversion in kinds]
    if names:
        logger.info("%d weights are dequantized: %s", len(names), ", ".join(names[:_MAX_NAMES]))


def load_shard(model: CausalLM, path: Path, *, is_verified: bool = True) -> None:
    """Fill a rank's model from its own file of an engine folder.

    On the CPU, weights whose dtype is the model's stay memory-mapped: ranks that load the
    same file share its pages. With ``is_verified`` the file is compared with the checksums of
    its build while it is read, or by threads beside.

    Raises:
        ConfigError: the file differs from its build, or does not fit the configuration.
    """
    verifier = _verifier(path) if is_verified else None
    with _Files(model.device, verifier) as files:
        _fill_from_shard(model, path, files)


def _verifier(path: Path) -> ShardVerifier | None:
    verifier = ShardVerifier(path)
    if verifier.has_checksums:
        return verifier
    logger.warning(
        "%s carries no checksums, so its weights are not compared: an earlier version built "
        "it. Build the folder again to have some.",
        path,
    )
    return None


def _fill_from_shard(model: CausalLM, path: Path, files: _Files) -> None:
    parameters = dict(model.named_parameters())
    entries = read_tensor_entries(path)
    known = [name for name in entries if name in parameters]
    for name in known:
        if entries[name].shape != tuple(parameters[name].shape):
            raise ConfigError(
                f"{path}: the tensor {name!r} has shape {list(entries[name].shape)}, but "
                f"config.json implies {list(parameters[name].shape)}. Build the folder again."
            )
        dtype = parameters[name].dtype
        is_kept = dtype in _KEPT_DTYPES
        if (
            entries[name].dtype != DTYPE_WORDS[dtype]
            if is_kept
            else entries[name].dtype not in FLOAT_WORDS
        ):
            implied = DTYPE_WORDS[dtype] if is_kept else "floats"
            raise ConfigError(
                f"{path}: the tensor {name!r} holds {entries[name].dtype}, but config.json "
                f"implies {implied}. Build the folder again."
            )
    for name, tensor in files.tensors(path, known):
        parameter = parameters[name]
        if tensor.dtype == parameter.dtype and parameter.device.type == "cpu":
            parameter.data = tensor
        else:
            parameter.data.copy_(tensor)
    missing = sorted(parameters.keys() - entries.keys())
    refuse_differences(path, missing, [name for name in entries if name not in parameters])


def fill_random(model: CausalLM, seed: int = 0) -> None:
    """Fill weights on the model's device: small normal matrices, unit norms, zero biases.

    The same seed gives the same weights on the same device and shard.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.zero_()
        elif parameter.dtype in (torch.uint8, torch.int16, torch.int32):
            _fill_integers(name, parameter, _generator_of(model, name, parameter.device, seed))
        elif name.endswith(_SCALES):
            # Random values of FP8 weights have a deviation of 1.
            parameter.data.fill_(_RANDOM_STD)
        elif parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            generator = _generator_of(model, name, parameter.device, seed)
            if parameter.dtype == FP8:
                values = torch.empty(parameter.shape, dtype=model.dtype, device=model.device)
                parameter.data.copy_(values.normal_(generator=generator))
            else:
                parameter.data.normal_(0.0, _RANDOM_STD, generator=generator)


def _generator_of(
    model: CausalLM, name: str, device: torch.device, seed: int
) -> torch.Generator:
    # Every rank holds these weights whole, so their values must agree.
    is_whole = any(whole in name for whole in _WHOLE)
    context = model.context
    ranks = context.expert_ranks if ".experts." in name else context.tp
    shard = "" if is_whole else f"@{ranks.rank}"
    generator = torch.Generator(device=device)
    return generator.manual_seed(_seed_of(f"{seed}:{name}{shard}"))


def _fill_integers(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    """Integers of the whole range; zero points in the middle of 4 bits, one group for all, and
    exponents of small scales."""
    kind = kind_of(name)
    if kind == WEIGHT:
        parameter.data.random_(0, 256, generator=generator)
    else:
        parameter.data.fill_({WEIGHT_ZERO: 8, WEIGHT_SCALE: 127 - 7}.get(kind, 0))


class _Files:
    """Reads a rank's tensors: memory-mapped on the CPU, into its memory on a GPU.

    A verifier compares what goes to a GPU as it is read. Where that cannot be, its file is
    read once more in the background; the end of the context waits for the result.
    """

    def __init__(self, device: torch.device, verifier: ShardVerifier | None = None) -> None:
        self._reader = TensorReader(device) if device.type == "cuda" else None
        self._verifier, self._background = verifier, None
        if verifier is not None and not (self._reader is not None and verifier.has_chunks):
            self._verifier, self._background = None, BackgroundVerification(verifier)

    def tensors(self, path: Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors of a file."""
        if self._reader is not None and is_safetensors(path):
            return self._reader.read(path, names, self._verifier)
        return _mapped(path, names)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._background is not None and exception[0] is None:
            self._background.finish()
        elif self._background is not None:
            self._background.close()


def _mapped(path: Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    with mapped_file(path) as tensor_of:
        for name in names:
            yield name, tensor_of(name)


def load_weight(
    model: CausalLM,
    parameter: nn.Parameter,
    target: WeightTarget,
    tensor: Tensor,
    stored: StoredTensor,
) -> None:
    """Copy this rank's shard of a checkpoint's whole tensor into ``parameter``.

    ``parameter`` is the parameter of ``target``, or another one of its shape.

    Raises:
        ConfigError: the tensor has another shape than the configuration implies.
    """
    path, _, name = target.parameter.rpartition(".")
    module = model.get_submodule(path)
    whole = tensor.t() if target.is_transposed and tensor.dim() == 2 else tensor
    try:
        method = getattr(module, "method", None)
        if isinstance(method, IntegerMethod) and name != "bias":
            method.load_part(module, parameter, whole, (name, target.shard))
        elif name.endswith(_SCALES):
            method = cast(Fp8Method, module.method)
            method.load_scale(module, parameter, whole, (name, target.shard))
        else:
            cast(LoadsWeight, module).weight_loader(parameter, whole, target.shard)
    except WeightShapeError as error:
        remedy = "belong to different models; download the folder again."
        is_vocabulary = target.parameter.split(".")[0] in ("embed_tokens", "lm_head")
        if is_vocabulary and stored.entry.shape:
            rows = stored.entry.shape[0]
            remedy = (
                f"have other vocabularies: set vocab_size to {rows} if the weights are right."
            )
        raise ConfigError(
            f"{stored.path}: the tensor {stored.name!r} {error}. The weights and config.json "
            f"{remedy}"
        ) from None


def refuse_overflow(tensor: Tensor, dtype: torch.dtype, stored: StoredTensor) -> None:
    """Refuse weights that would become infinite in float16, whose range is small.

    Raises:
        ConfigError: names the tensor and its largest value.
    """
    if dtype != torch.float16 or tensor.dtype not in _WIDER or not tensor.numel():
        return
    peak = max(abs(bound.item()) for bound in tensor.aminmax())
    if torch.tensor(peak).to(dtype).isinf():
        raise ConfigError(
            f"{stored.path}: the tensor {stored.name!r} holds {peak:g} but float16 ends at "
            f"{torch.finfo(dtype).max:g}, so that it would become infinite. Choose --dtype "
            "bfloat16 or float32."
        )


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

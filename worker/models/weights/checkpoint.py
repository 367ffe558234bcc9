"""The files of a checkpoint, memory-mapped, and the parameter of each tensor."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import require_file
from trimaran.worker.config.gguf_file import is_gguf
from trimaran.worker.config.pretrained_families import FAMILIES
from trimaran.worker.config.shard_file import TensorEntry, read_tensor_entries
from trimaran.worker.models.interfaces import CausalLM, WeightTarget
from trimaran.worker.models.weights.gguf_tensors import gguf_entries, gguf_reader

_DAMAGED = (
    OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError,
    AttributeError, AssertionError,
)  # fmt: skip
"""Errors of reading a file that is incomplete, or whose list of tensors is damaged."""

DTYPE_WORDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def is_safetensors(path: Path) -> bool:
    """Whether a file is safetensors, whose header gives the position of each tensor."""
    return path.suffix == ".safetensors"


def file_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by name; only those of safetensors have positions.

    Raises:
        ConfigError: the file is incomplete, or of another format.
    """
    if is_safetensors(path):
        return read_tensor_entries(path)
    if is_gguf(path):
        return gguf_entries(path)
    return {
        name: TensorEntry(
            DTYPE_WORDS.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
            tuple(tensor.shape),
            start=0,
            num_bytes=tensor.nbytes,
        )
        for name, tensor in _unpickled(path).items()
    }


@contextmanager
def mapped_file(path: Path) -> Iterator[Callable[[str], Tensor]]:
    """A function from names to tensors, whose data is read at first use while this is open.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not is_safetensors(path):
        yield gguf_reader(path) if is_gguf(path) else _unpickled(path).__getitem__
        return
    try:
        with safe_open(path, framework="pt") as file:
            yield file.get_tensor
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read as safetensors: {error}.") from None


def _unpickled(path: Path) -> dict[str, Tensor]:
    """A file of `torch.save`, mapped; its pickled code is not executed."""
    try:
        require_file(path)
        values = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except _DAMAGED as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        remedy = "Download it again, or save"
        if "use_new_zipfile_serialization" in reason:
            reason, remedy = "it is from before torch 1.6 and would be read whole", "Save"
        raise ConfigError(
            f"{path}: cannot be read as torch's weights: {reason}. {remedy} the weights with "
            "transformers (model.save_pretrained)."
        ) from None
    if not isinstance(values, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in values.items()
    ):
        raise ConfigError(
            f"{path}: holds more than tensors by name, as checkpoints of training do. Save "
            "the weights alone with transformers (model.save_pretrained)."
        )
    for name, tensor in values.items():
        if tensor.is_meta or tensor.layout != torch.strided:
            raise ConfigError(
                f"{path}: the tensor {name!r} is {'empty' if tensor.is_meta else 'sparse'}. "
                "Save the weights with all of their numbers."
            )
    return values


_MAX_NAMES = 5
_TABLES = (
    ".inv_freq", ".original_inv_freq", ".cos_cached", ".sin_cached", ".cos_sin_cache",
    ".position_ids",
)  # fmt: skip
"""Endings of the names of tables that the configuration determines."""

_MASKS = ("attn.bias", "attention.bias", "attn.mask", "attention.mask", ".causal_mask")
"""Endings of the names of causal masks, square in their last two dimensions."""

_HEAD = "lm_head.weight"
_ROWS = 4096
"""Rows of a matrix that are compared in one call."""

FLOAT_WORDS = ("F64", "F32", "F16", "BF16")
FP8_WORD = "F8_E4M3"
POWER_WORD = "F8_E8M0"
"""Powers of two in a byte: scales of weights in FP8."""

INTEGER_WORDS = ("I8", "I16", "I32", "I64", "U8")
_QUANTIZED_PARTS = {
    ".qweight": ".weight",
    ".weight_packed": ".weight",
    ".scales": ".weight_scale",
    ".qzeros": ".weight_zero",
    ".weight_zero_point": ".weight_zero",
    ".g_idx": ".weight_group",
    ".weight_g_idx": ".weight_group",
    ".weight_scale_inv": ".weight_scale",
    ".weight_scale": ".weight_scale",
    ".weight_scale_2": ".weight_global",
    ".weight_global_scale": ".weight_global",
    ".activation_scale": ".input_scale",
    ".input_scale": ".input_scale",
}
"""Endings of the names of the parts of quantized weights, and those that `find_tensors` gives
them. All scales are factors of the values, also those called inverse."""

_STACKED_PARTS = {"_blocks": "", "_scales": "weight_scale"}
"""Endings of the names of MXFP4 matrices of all experts, and the kinds of these."""

_UNUSED_SCALES = (
    ".input_scale_ub", ".input_global_scale", ".k_scale", ".v_scale", ".q_scale", ".kv_scale",
    ".prob_output_scale", "k_proj.output_scale", "v_proj.output_scale", ".weight_shape",
)  # fmt: skip
"""Endings of the names of tensors that hold no weights: bounds and shapes that config.json has,
scales of attention, which has the model's dtype, and those that `kv_scales.py` reads."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor and its position in a file."""

    path: Path
    name: str
    entry: TensorEntry


class CheckpointTensors:
    """A checkpoint's files, memory-mapped at first use and closed together."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._files: dict[Path, Callable[[str], Tensor]] = {}

    def read(self, stored: StoredTensor) -> Tensor:
        """A whole tensor, whose data is read at first use."""
        if stored.path not in self._files:
            self._files[stored.path] = self._stack.enter_context(mapped_file(stored.path))
        return self._files[stored.path](stored.name)

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.clear()
        self._stack.close()


def part_key(key: str, name: str) -> str:
    """The name that `find_tensors` gives a part of the quantized weight ``key``: that of a
    layer (``x.weight``), or of the stacked matrices of experts (``x``)."""
    layer = key.removesuffix(".weight")
    return f"{layer}.{name}"


def find_tensors(model: CausalLM, files: Sequence[Path]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by their names in ``model.checkpoint_weights()``.

    The scales of a quantized weight ``x.weight`` are ``x.weight_scale`` and ``x.input_scale``,
    zero points ``x.weight_zero``, and the groups of inputs ``x.weight_group``. Matrices of all
    experts in one tensor are ``x`` without an ending.
    Reads no tensor except a tied head that is stored beside its embedding, and biases that the
    model lacks. The result is the same for every rank's model.

    Raises:
        ConfigError: tensors are missing or unexpected (the error names all), are in two files,
            or hold integers; or a tied head differs from the embedding.
    """
    wanted = model.checkpoint_weights()
    found: dict[str, StoredTensor] = {}
    unexpected: list[str] = []
    tied_head: StoredTensor | None = None
    for path in files:
        for name, entry in file_entries(path).items():
            key = name.removeprefix(model.outer_prefix).removeprefix(model.name_prefix)
            weight, key = _weight_of_part(model, key)
            if key not in wanted and weight not in wanted:
                if _is_tied_head(model, key):
                    tied_head = StoredTensor(path, name, entry)
                elif not (
                    _is_buffer(key, entry)
                    or _carries_no_weight(model, weight)
                    or _is_bias_of_zeros(model, key, StoredTensor(path, name, entry))
                ):
                    unexpected.append(name)
                continue
            if key in found:
                raise ConfigError(
                    f"{path}: the tensor {name!r} was in {found[key].path.name} too. Keep the "
                    "files of one download alone, or download the folder again."
                )
            _check_numbers(model, path, name, entry)
            found[key] = StoredTensor(path, name, entry)
    first = files[0] if files else Path()
    place = first if is_gguf(first) else first.parent
    refuse_differences(place, [key for key in wanted if key not in found], unexpected)
    if tied_head is not None:
        _refuse_other_head(tied_head, found[_embedding_of(wanted)])
    return found


def refuse_differences(path: Path, missing: list[str], unexpected: list[str]) -> None:
    """Raise `ConfigError` with these names of tensors, if there are any."""
    if not missing and not unexpected:
        return
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing ({_some(missing)})")
    if unexpected:
        parts.append(f"{len(unexpected)} unexpected ({_some(unexpected)})")
    what = "its metadata" if is_gguf(path) else "config.json"
    raise ConfigError(
        f"{path}: the tensors do not match {what}: {', '.join(parts)}. Use the weights "
        "and the configuration of one model."
    )


def _is_tied_head(model: CausalLM, key: str) -> bool:
    # In a decoder of a larger model, `tied` may be only a default: refuse a separate head.
    return key == _HEAD and model.config.tie_word_embeddings and not model.outer_prefix


def _is_buffer(key: str, entry: TensorEntry) -> bool:
    """Whether a tensor is a table or a mask that older versions of models stored with their
    weights, whatever the family."""
    if key.endswith(_TABLES):
        return True
    if key.endswith(".masked_bias"):
        return math.prod(entry.shape) == 1
    # A bias of the same name has one dimension.
    return key.endswith(_MASKS) and len(entry.shape) > 1 and len(set(entry.shape[-2:])) == 1


def _carries_no_weight(model: CausalLM, key: str) -> bool:
    is_elsewhere = key.startswith(FAMILIES[model.config.architecture].ignored_parts)
    is_quantized = model.context.quantization or model.config.kv_cache_quant_algo
    is_scale = bool(is_quantized) and key.endswith(_UNUSED_SCALES)
    return is_elsewhere or is_scale or model.is_unused(key)


def _is_bias_of_zeros(model: CausalLM, key: str, stored: StoredTensor) -> bool:
    """Whether a tensor is a bias that changes nothing, as AutoGPTQ stored for each layer."""
    layer, _, ending = key.rpartition(".")
    is_known = f"{layer}.weight" in model.checkpoint_weights()
    if model.context.quantization is None or ending != "bias" or not is_known:
        return False
    with mapped_file(stored.path) as tensor_of:
        return not bool(tensor_of(stored.name).any())


def _embedding_of(wanted: Mapping[str, Sequence[WeightTarget]]) -> str:
    return next(
        key
        for key, targets in wanted.items()
        if any(target.parameter == "embed_tokens.weight" for target in targets)
    )


def _refuse_other_head(head: StoredTensor, embedding: StoredTensor) -> None:
    """Refuse a separate head, which transformers uses whatever ``tie_word_embeddings`` says."""
    first, second = head.entry, embedding.entry
    if (first.dtype, first.shape) == (second.dtype, second.shape):
        with mapped_file(head.path) as of_head, mapped_file(embedding.path) as of_embedding:
            heads, rows = of_head(head.name), of_embedding(embedding.name)
            pieces = [slice(at, at + _ROWS) for at in range(0, first.shape[0], _ROWS)]
            if all(torch.equal(heads[each], rows[each]) for each in pieces):
                return
    raise ConfigError(
        f"{head.path}: the tensor {head.name!r} is not that of {embedding.name!r}, though "
        "tie_word_embeddings is true. Set it to false in config.json if the head is right, or "
        "take the tensor out if the embedding is."
    )


def _weight_of_part(model: CausalLM, key: str) -> tuple[str, str]:
    """The weight that a part of a quantized weight belongs to, and the part's usual name;
    twice ``key`` for other tensors."""
    if model.context.quantization is None:
        return key, key
    for ending, known in _STACKED_PARTS.items():
        if key.endswith(ending):
            stacked = key.removesuffix(ending)
            return stacked, part_key(stacked, known) if known else stacked
    layer, dot, ending = key.rpartition(".")
    named = _QUANTIZED_PARTS.get(dot + ending)
    return (key, key) if named is None else (f"{layer}.weight", layer + named)


def _check_numbers(model: CausalLM, path: Path, name: str, entry: TensorEntry) -> None:
    quantization = model.context.quantization
    if entry.dtype in (FP8_WORD, POWER_WORD) and quantization is not None:
        return
    if entry.dtype in INTEGER_WORDS and quantization is not None and quantization.has_integers:
        return
    if entry.dtype not in FLOAT_WORDS:
        raise ConfigError(
            f"{path}: the tensor {name!r} holds {entry.dtype}, so the weights are quantized, "
            "which is not served. Name the checkpoint in bfloat16, float16 or float32."
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown}, ..."

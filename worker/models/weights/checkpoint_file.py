"""One weight file of a checkpoint, memory-mapped: safetensors, or torch's own format."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import require_file
from trimaran.worker.config.shard_file import TensorEntry, read_tensor_entries

_DAMAGED = (
    OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError,
    AttributeError, AssertionError,
)  # fmt: skip
"""What reading raises where a file is not whole, or bytes of its list of tensors are wrong."""

_WORDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def is_safetensors(path: Path) -> bool:
    """Whether a file is safetensors, so that its header tells where each tensor lies."""
    return path.suffix == ".safetensors"


def file_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by name; where they lie is told of safetensors alone.

    Raises:
        ConfigError: the file is not whole, or of another format.
    """
    if is_safetensors(path):
        return read_tensor_entries(path)
    return {
        name: TensorEntry(
            _WORDS.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
            tuple(tensor.shape),
            start=0,
            num_bytes=tensor.nbytes,
        )
        for name, tensor in _unpickled(path).items()
    }


@contextmanager
def mapped_file(path: Path) -> Iterator[Callable[[str], Tensor]]:
    """A function from names to tensors that are read when they are used, while this lasts.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not is_safetensors(path):
        yield _unpickled(path).__getitem__
        return
    try:
        with safe_open(path, framework="pt") as file:
            yield file.get_tensor
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read as safetensors: {error}.") from None


def _unpickled(path: Path) -> dict[str, Tensor]:
    """A file of `torch.save`; nothing in it is executed, and tensors are not read yet."""
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

"""Which tensor of which file of a Hugging Face checkpoint is which weight of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.pretrained_families import FAMILIES
from trimaran.worker.config.shard_file import TensorEntry
from trimaran.worker.models.interfaces import CausalLM, WeightTarget
from trimaran.worker.models.weights.checkpoint_file import file_entries, mapped_file

_MAX_NAMES = 5
_HEAD = "lm_head.weight"
_ROWS = 4096
"""Of a matrix that are compared at once."""

_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor and where it lies."""

    path: Path
    name: str
    entry: TensorEntry


def find_tensors(model: CausalLM, files: Sequence[Path]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by their names in ``model.checkpoint_weights()``.

    Reads no tensor but a tied head that is stored beside its embedding. The result is the
    same for every rank's model.

    Raises:
        ConfigError: tensors are missing or unexpected (all of them are named), or in two
            files, or hold numbers that are not floats, or a tied head is another tensor than
            the embedding.
    """
    wanted = model.checkpoint_weights()
    found: dict[str, StoredTensor] = {}
    unexpected: list[str] = []
    tied_head: StoredTensor | None = None
    for path in files:
        for name, entry in file_entries(path).items():
            key = name.removeprefix(model.outer_prefix).removeprefix(model.name_prefix)
            if key not in wanted:
                if _is_tied_head(model, key):
                    tied_head = StoredTensor(path, name, entry)
                elif not _carries_no_weight(model, key):
                    unexpected.append(name)
                continue
            if key in found:
                raise ConfigError(
                    f"{path}: the tensor {name!r} was in {found[key].path.name} too. Keep the "
                    "files of one download alone, or download the folder again."
                )
            _check_floats(path, name, entry)
            found[key] = StoredTensor(path, name, entry)
    folder = files[0].parent if files else Path()
    refuse_differences(folder, [key for key in wanted if key not in found], unexpected)
    if tied_head is not None:
        _refuse_other_head(tied_head, found[_embedding_of(wanted)])
    return found


def refuse_differences(path: Path, missing: list[str], unexpected: list[str]) -> None:
    """Raise `ConfigError` with the names of tensors, if there are any."""
    if not missing and not unexpected:
        return
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing ({_some(missing)})")
    if unexpected:
        parts.append(f"{len(unexpected)} unexpected ({_some(unexpected)})")
    raise ConfigError(
        f"{path}: the tensors do not match config.json: {', '.join(parts)}. Use the weights "
        "and the configuration of one model."
    )


def _is_tied_head(model: CausalLM, key: str) -> bool:
    # Around a decoder `tied` may be no more than a default: a head of its own is refused.
    return key == _HEAD and model.config.tie_word_embeddings and not model.outer_prefix


def _carries_no_weight(model: CausalLM, key: str) -> bool:
    is_elsewhere = key.startswith(FAMILIES[model.config.architecture].ignored_parts)
    return is_elsewhere or key.endswith(model.ignored_weights)


def _embedding_of(wanted: Mapping[str, Sequence[WeightTarget]]) -> str:
    return next(
        key
        for key, targets in wanted.items()
        if any(target.parameter == "embed_tokens.weight" for target in targets)
    )


def _refuse_other_head(head: StoredTensor, embedding: StoredTensor) -> None:
    """Transformers takes such a head for what it is, whatever ``tie_word_embeddings`` says."""
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


def _check_floats(path: Path, name: str, entry: TensorEntry) -> None:
    if entry.dtype not in _FLOATS:
        raise ConfigError(
            f"{path}: the tensor {name!r} holds {entry.dtype}, so the weights are quantized, "
            "which is not served. Name the checkpoint in bfloat16, float16 or float32."
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown}, ..."

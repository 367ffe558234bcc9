"""Which tensor of which file of a Hugging Face checkpoint is which weight of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.worker.models.checkpoint_file import file_entries
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.pretrained_families import FAMILIES
from trimaran.worker.shard_file import TensorEntry

_MAX_NAMES = 5
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor and where it lies."""

    path: Path
    name: str
    entry: TensorEntry


def find_tensors(model: CausalLM, files: Sequence[Path]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by their names in ``model.checkpoint_weights()``.

    Reads no tensor. The result is the same for every rank's model.

    Raises:
        ConfigError: tensors are missing or unexpected (all of them are named), or in two
            files, or hold numbers that are not floats.
    """
    wanted = model.checkpoint_weights()
    found: dict[str, StoredTensor] = {}
    unexpected: list[str] = []
    for path in files:
        for name, entry in file_entries(path).items():
            key = name.removeprefix(model.outer_prefix).removeprefix(model.name_prefix)
            if key not in wanted:
                if not _carries_no_weight(model, key):
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


def _carries_no_weight(model: CausalLM, key: str) -> bool:
    # Around a decoder `tied` may be no more than a default: a head of its own is refused.
    is_tied = model.config.tie_word_embeddings and not model.outer_prefix
    is_tied_head = key == "lm_head.weight" and is_tied
    is_elsewhere = key.startswith(FAMILIES[model.config.architecture].ignored_parts)
    return is_tied_head or is_elsewhere or key.endswith(model.ignored_weights)


def _check_floats(path: Path, name: str, entry: TensorEntry) -> None:
    if entry.dtype not in _FLOATS:
        raise ConfigError(
            f"{path}: the tensor {name!r} holds {entry.dtype}, so the weights are quantized, "
            "which is not served. Name the checkpoint in bfloat16, float16 or float32."
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown}, ..."

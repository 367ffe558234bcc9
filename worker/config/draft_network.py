"""The configuration of a network that drafts, from its checkpoint folder, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import parse_json, read_text
from trimaran.worker.config.pretrained_config import PretrainedConfig

EAGLE, MEDUSA, REDRAFTER = "eagle", "medusa", "redrafter"
MTP, DRAFT_MODEL = "mtp", "draft_model"
NETWORKS = (EAGLE, MEDUSA, REDRAFTER, MTP, DRAFT_MODEL)
"""Drafters that are networks in the ranks."""

DRAFT_FOLDER = "draft_head"
"""The folder of a head inside an engine folder."""

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Names of the weights of Medusa heads."""

REDRAFTER_FILE = "model.pt"
"""The weights of ReDrafter's head, unless they are in model.safetensors."""

CONFIG_FILE = "config.json"
_LARGEST_HEADS = 64

_UNSERVED_FLAGS = ("norm_before_fc", "norm_output", "fc_norm", "parallel_drafting")
"""Keys of variants of EAGLE-3 heads whose computation differs and is not served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """An EAGLE head: the sizes of its layer, and its inputs from the target."""

    layer: PretrainedConfig
    """The head as a model of one layer, of the head's own vocabulary."""

    taps: tuple[int, ...] | None
    """The target's layers whose inputs an EAGLE-3 head takes; None for a default, which the
    target's number of layers sets. Without meaning for EAGLE-1."""

    target_hidden_size: int
    """Width of the target's hidden states."""

    norm_before_residual: bool
    """Whether the layer's residual is the normalised hidden state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Medusa heads, each of which drafts the token at one position."""

    num_heads: int
    num_layers: int
    """Residual blocks of a head."""

    num_draft_ids: int
    """Ids that the heads draft, which ``token_map`` names; 0 for all ids of the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedrafterConfig:
    """The recurrent head of ReDrafter."""

    exit_size: int
    """Width of the residual blocks."""

    num_layers: int
    """Residual blocks."""

    is_recurrent: bool
    """Whether the state is a recurrent network's, and not the sum of embeddings."""


def read_draft_config(folder: Path) -> dict[str, Any]:
    """The values of a folder's ``config.json``.

    Raises:
        ConfigError: the file is missing or no JSON object.
    """
    path = folder / CONFIG_FILE
    try:
        values = parse_json(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {error}. Name the folder of a checkpoint that drafts, "
            "with its config.json."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}. Download it again.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds a {type(values).__name__}, not an object.")
    return values


def eagle_config(folder: Path, target: PretrainedConfig) -> EagleConfig:
    """The configuration of an EAGLE head in the format of its authors, of SpecForge or of
    ``speculators``.

    Raises:
        ConfigError: a value is missing, of the wrong kind, or asks for what is not served.
    """
    values = read_draft_config(folder)
    source = str(folder / CONFIG_FILE)
    _refuse_unserved(values, source)
    inner = values.get("transformer_layer_config")
    is_speculators = isinstance(inner, Mapping)
    sizes: dict[str, Any] = {**values, **(inner if isinstance(inner, Mapping) else {})}
    sizes["architectures"], sizes["model_type"] = ["LlamaForCausalLM"], "llama"
    # The target's dtype serves the head too, and its positions must reach as far.
    sizes.update(dtype=target.dtype, torch_dtype=None, tie_word_embeddings=False)
    sizes["vocab_size"] = sizes.get("vocab_size") or target.vocab_size
    layer = PretrainedConfig.from_huggingface(sizes, source)
    if layer.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{source}: vocab_size is {layer.vocab_size}, but that of the target is "
            f"{target.vocab_size}: the head belongs to another model."
        )
    if layer.num_hidden_layers != 1:
        raise ConfigError(
            f"{source}: num_hidden_layers is {layer.num_hidden_layers}, but heads of one layer "
            "are served."
        )
    own = _integer(values, "draft_vocab_size", target.vocab_size, source)
    width = _integer(values, "target_hidden_size", target.hidden_size, source)
    if width != target.hidden_size:
        raise ConfigError(
            f"{source}: target_hidden_size is {width}, but the target's hidden size is "
            f"{target.hidden_size}: the head belongs to another model."
        )
    return EagleConfig(
        layer=replace(
            layer,
            vocab_size=own,
            max_position_embeddings=target.max_position_embeddings,
        ),
        taps=_taps(values, target, source),
        target_hidden_size=width,
        norm_before_residual=bool(values.get("norm_before_residual", is_speculators)),
    )


def medusa_config(folder: Path) -> MedusaConfig:
    """The configuration of Medusa heads.

    Raises:
        ConfigError: a number is missing or out of range.
    """
    values = read_draft_config(folder)
    source = str(folder / CONFIG_FILE)
    num_heads = _integer(values, "medusa_num_heads", 0, source)
    num_layers = _integer(values, "medusa_num_layers", 1, source)
    if not 1 <= num_heads <= _LARGEST_HEADS:
        raise ConfigError(
            f"{source}: medusa_num_heads is {num_heads} but must be 1 to {_LARGEST_HEADS}. "
            "Name a folder of Medusa heads."
        )
    return MedusaConfig(
        num_heads=num_heads,
        num_layers=num_layers,
        num_draft_ids=_integer(values, "truncated_vocab_size", 0, source),
    )


def redrafter_config(folder: Path, target: PretrainedConfig) -> RedrafterConfig:
    """The configuration of ReDrafter's head.

    Raises:
        ConfigError: a number is missing, out of range or of another model.
    """
    values = read_draft_config(folder)
    source = str(folder / CONFIG_FILE)
    width = _integer(values, "hidden_size", 0, source)
    if width != target.hidden_size:
        raise ConfigError(
            f"{source}: hidden_size is {width}, but the target's is {target.hidden_size}: the "
            "head belongs to another model, or is not ReDrafter's."
        )
    inner = _integer(values, "exit_dim", 2 * width, source)
    num_layers = _integer(values, "num_draft_layers", 0, source)
    if not inner or not num_layers:
        raise ConfigError(
            f"{source}: exit_dim is {inner} and num_draft_layers {num_layers}, but both must "
            "be 1 or more. Name a folder of ReDrafter."
        )
    return RedrafterConfig(
        exit_size=inner, num_layers=num_layers, is_recurrent=bool(values.get("rnn", False))
    )


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs an EAGLE-3 head takes unless its folder names others:
    the third, the middle one and the third last."""
    return 2, num_layers // 2, num_layers - 3


def _taps(
    values: Mapping[str, Any], target: PretrainedConfig, source: str
) -> tuple[int, ...] | None:
    name = "eagle_aux_hidden_state_layer_ids"
    named, offset = values.get(name), 0
    nested = values.get("eagle_config")
    if not named and isinstance(nested, Mapping):
        # SpecForge counts layers by their outputs, speculators by their inputs.
        named, offset = nested.get(name), 1
    if not named:
        return None
    most = target.num_hidden_layers
    is_valid = isinstance(named, list) and all(
        type(each) is int and 0 <= each + offset < most for each in named
    )
    if not is_valid:
        raise ConfigError(
            f"{source}: {name} is {json.dumps(named)} but must be a list of layers of the "
            f"target, which has {most}."
        )
    return tuple(each + offset for each in named)


def _refuse_unserved(values: Mapping[str, Any], source: str) -> None:
    for name in _UNSERVED_FLAGS:
        if values.get(name):
            raise ConfigError(
                f"{source}: {name} is {values[name]!r}, a variant of EAGLE-3 that is not "
                "served. Name a head without it."
            )


def _integer(values: Mapping[str, Any], name: str, default: int, source: str) -> int:
    value = values.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 0:
        raise ConfigError(f"{source}: {name} is {value!r} but must be a whole number.")
    return value

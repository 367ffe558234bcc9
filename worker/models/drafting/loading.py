"""Makes the network that an engine drafts with, from a checkpoint folder, and fills it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.checkpoint_folder import find_weight_files
from trimaran.worker.config.draft_network import (
    EAGLE,
    MEDUSA,
    MEDUSA_FILES,
    REDRAFTER,
    REDRAFTER_FILE,
    eagle_config,
    medusa_config,
    redrafter_config,
)
from trimaran.worker.config.shard_file import TensorEntry
from trimaran.worker.layers.linear import WeightShapeError
from trimaran.worker.models.drafting.eagle import EagleHead
from trimaran.worker.models.drafting.interfaces import DraftNetwork
from trimaran.worker.models.drafting.medusa import MedusaHeads
from trimaran.worker.models.drafting.redrafter import RecurrentHead
from trimaran.worker.models.interfaces import CausalLM, LoadsWeight
from trimaran.worker.models.weights.checkpoint import file_entries, mapped_file

logger = logging.getLogger(__name__)

_NameMap = dict[str, tuple[str, str]]
"""(parameter, part of a fused weight) by checkpoint name."""

_EAGLE_LAYER = (
    ("self_attn.q_proj", "attention.qkv_proj", "q"),
    ("self_attn.k_proj", "attention.qkv_proj", "k"),
    ("self_attn.v_proj", "attention.qkv_proj", "v"),
    ("self_attn.o_proj", "attention.o_proj", ""),
    ("mlp.gate_proj", "mlp.gate_up_proj", "gate"),
    ("mlp.up_proj", "mlp.gate_up_proj", "up"),
    ("mlp.down_proj", "mlp.down_proj", ""),
    ("input_layernorm", "attention_norm", ""),
    ("hidden_norm", "hidden_norm", ""),
    ("post_attention_layernorm", "mlp_norm", ""),
)
_UNUSED = ("t2d", "verifier_norm.", "verifier_lm_head.", "rotary_emb.inv_freq")
"""Parts of names of tensors that training needs alone."""

_TOKEN_MAP = "token_map"
"""The target's ids that Medusa heads of a truncated vocabulary draft."""

_MAX_NAMES = 4


class _Checkpoint:
    """The tensors of a folder's files, by name."""

    def __init__(self, folder: Path, files: tuple[Path, ...]) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self.entries: dict[str, TensorEntry] = {}
        for path in files:
            for name, entry in file_entries(path).items():
                if not any(part in name for part in _UNUSED):
                    self._file_of[name], self.entries[name] = path, entry

    def read(self, name: str) -> Tensor:
        """A copy of one tensor, on the host."""
        with mapped_file(self._file_of[name]) as tensor_of:
            return tensor_of(name).clone()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape; empty if there is no such tensor."""
        entry = self.entries.get(name)
        return () if entry is None else tuple(entry.shape)


def load_head(kind: str, folder: Path, target: CausalLM) -> DraftNetwork:
    """This rank's part of the head in ``folder``, of the kind ``eagle``, ``medusa`` or
    ``redrafter``.

    Raises:
        ConfigError: the folder holds another kind of head, or one of another model.
    """
    head: EagleHead | MedusaHeads | RecurrentHead
    if kind == EAGLE:
        head, name_map, found = _eagle(folder, target)
    elif kind == MEDUSA:
        head, name_map, found = _medusa(folder, target)
    else:
        assert kind == REDRAFTER, kind
        head, name_map, found = _redrafter(folder, target)
    _fill(head, name_map, found)
    num_bytes = sum(each.nbytes for each in head.parameters())
    logger.info("%s head of %s: %.2f MiB a rank", kind, folder, num_bytes / 2**20)
    return head.eval()


def random_head(kind: str, folder: Path, target: CausalLM) -> DraftNetwork:
    """A head of random weights and of the sizes in ``folder``; for measurements.

    Raises:
        ConfigError: ``kind`` is no EAGLE head.
    """
    if kind != EAGLE:
        raise ConfigError(
            f"--load-format random makes no {kind} heads. Use --load-format auto, or an EAGLE "
            "head."
        )
    head = EagleHead(
        eagle_config(folder, target.config),
        target,
        is_third=True,
        has_embedding=False,
        has_head=True,
    )
    for name, parameter in head.named_parameters():
        if name == "d2t":
            continue
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02)
    return head.eval()


def _eagle(folder: Path, target: CausalLM) -> tuple[EagleHead, _NameMap, _Checkpoint]:
    found = _Checkpoint(folder, find_weight_files(folder))
    names = {_eagle_name(name): name for name in found.entries}
    if "fc.weight" not in names:
        raise ConfigError(
            f"{folder}: has no tensor fc.weight, so it holds no EAGLE head. Name the folder of "
            "a head."
        )
    is_third = "layer.hidden_norm.weight" in names
    head = EagleHead(
        eagle_config(folder, target.config),
        target,
        is_third=is_third,
        has_embedding="embed_tokens.weight" in names,
        has_head="lm_head.weight" in names,
        has_bias="fc.bias" in names,
    )
    if "lm_head.weight" not in names and head.num_draft_ids != target.config.vocab_size:
        raise ConfigError(
            f"{folder}: has a vocabulary of {head.num_draft_ids} ids, but no lm_head.weight. "
            "Download it again."
        )
    if "embed_tokens.weight" not in names:
        width = head.layer.mlp_norm.weight.shape[0]
        if width != target.config.hidden_size:
            raise ConfigError(
                f"{folder}: has no embedding, and the target's has {target.config.hidden_size} "
                f"dims, not the {width} of the head. Download it again."
            )
    return head, {name: _eagle_target(own) for own, name in names.items()}, found


def _eagle_name(name: str) -> str:
    """The name without prefixes, with the layer as ``layer``."""
    name = name.removeprefix("model.")
    for prefix in ("midlayer.", "layers.0."):
        if name.startswith(prefix):
            return "layer." + name.removeprefix(prefix)
    return "d2t" if name == "draft_id_to_target_id" else name


def _eagle_target(name: str) -> tuple[str, str]:
    for own, target, shard in _EAGLE_LAYER:
        prefix = f"layer.{own}."
        if name.startswith(prefix):
            return f"layer.{target}.{name.removeprefix(prefix)}", shard
    return name, ""


def _medusa(folder: Path, target: CausalLM) -> tuple[MedusaHeads, _NameMap, _Checkpoint]:
    config = medusa_config(folder)
    own = tuple(folder / name for name in MEDUSA_FILES if (folder / name).is_file())
    found = _Checkpoint(folder, own[:1] or find_weight_files(folder))
    heads = MedusaHeads(config, target)
    if config.num_draft_ids and _TOKEN_MAP not in found.entries:
        raise ConfigError(
            f"{folder}: truncated_vocab_size is {config.num_draft_ids}, but there is no tensor "
            f"{_TOKEN_MAP} that names these ids. Download it again."
        )
    name_map: _NameMap = {}
    for name in found.entries:
        if name == _TOKEN_MAP:
            name_map[name] = "d2t", ""
            continue
        number, _, rest = name.removeprefix("medusa_head.").partition(".")
        block, _, kind = rest.partition(".")
        if block == str(config.num_layers):
            name_map[name] = f"heads.{number}.lm_head.{kind}", ""
        else:
            kind = kind.removeprefix("linear.")
            name_map[name] = f"heads.{number}.blocks.{block}.{kind}", ""
    return heads, name_map, found


def _redrafter(folder: Path, target: CausalLM) -> tuple[RecurrentHead, _NameMap, _Checkpoint]:
    config = redrafter_config(folder, target.config)
    own = folder / REDRAFTER_FILE
    files = (own,) if own.is_file() else find_weight_files(folder)
    found = _Checkpoint(folder, files)
    name_map = {name: (_redrafter_name(name, config.num_layers), "") for name in found.entries}
    return RecurrentHead(config, target), name_map, found


def _redrafter_name(name: str, num_layers: int) -> str:
    """The parameter of a tensor, whose name has one of three spellings."""
    part, _, rest = name.partition(".")
    if part in ("input_proj", "input_projs"):
        return f"input_proj.{rest}"
    if part not in ("lm_head", "lm_heads", "0"):
        return name
    layer, _, kind = rest.partition(".")
    if layer == str(num_layers):
        return f"lm_head.{kind}"
    return f"blocks.{layer}.{kind.removeprefix('linear.')}"


def _fill(head: nn.Module, name_map: _NameMap, found: _Checkpoint) -> None:
    """Copy this rank's parts of all tensors.

    Raises:
        ConfigError: a tensor is missing, unexpected or of another shape.
    """
    parameters = dict(head.named_parameters())
    wanted = set(parameters) - {"d2t"}
    unexpected = sorted(name for name, (to, _) in name_map.items() if to not in parameters)
    missing = sorted(wanted - {to for to, _ in name_map.values()})
    for what, names in (("lacks", missing), ("holds the unexpected", unexpected)):
        if names:
            more = ", ..." if len(names) > _MAX_NAMES else ""
            listed = ", ".join(names[:_MAX_NAMES])
            raise ConfigError(
                f"{found.folder}: {what} {listed}{more}: its weights and its config.json "
                "belong to different heads, or the head is of a kind that is not served."
            )
    for name, (path, shard) in name_map.items():
        _fill_one(head, parameters, (path, shard), name, found)


def _fill_one(
    head: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    entry: tuple[str, str],
    name: str,
    found: _Checkpoint,
) -> None:
    path, shard = entry
    parameter, tensor = parameters[path], found.read(name)
    try:
        if path == "d2t":
            if name == _TOKEN_MAP:
                tensor = tensor - torch.arange(len(tensor))
            _check_ids(head, tensor, found.folder)
            parameter.data.copy_(tensor)
            return
        module: Any = head.get_submodule(path.rpartition(".")[0])
        cast(LoadsWeight, module).weight_loader(parameter, tensor.to(parameter.dtype), shard)
    except WeightShapeError as error:
        raise ConfigError(
            f"{found.folder}: the tensor {name!r} {error}. The head belongs to another model, "
            "or its config.json to another head."
        ) from None


def _check_ids(head: nn.Module, offsets: Tensor, folder: Path) -> None:
    """Refuse a table of ids that leads outside of the target's vocabulary."""
    assert isinstance(head, (EagleHead, MedusaHeads)) and head.d2t is not None
    expected = head.d2t.shape
    if offsets.shape != expected:
        raise WeightShapeError(tuple(offsets.shape), tuple(expected))
    ids = torch.arange(len(offsets)) + offsets.long()
    most = head.num_target_ids
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < most:
        raise ConfigError(
            f"{folder}: drafts ids from {int(ids.min())} to {int(ids.max())}, but the target "
            f"has {most}: the head belongs to another model."
        )

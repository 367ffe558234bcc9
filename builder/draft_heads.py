"""Flags of heads that draft, and their copy in the engine folder."""

from __future__ import annotations

import argparse
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from trimaran.builder.foreign_flags import FlagSink
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.flag_values import positive
from trimaran.worker.config.checkpoint_folder import find_weight_files
from trimaran.worker.config.draft_network import (
    CONFIG_FILE,
    DRAFT_FOLDER,
    EAGLE,
    MEDUSA,
    MEDUSA_FILES,
    MTP,
    REDRAFTER,
    REDRAFTER_FILE,
    medusa_config,
)
from trimaran.worker.config.draft_tree import (
    MC_SIM_7B_63,
    DraftTree,
    DynamicTreeLimits,
    beam_limits,
    dynamic_limits,
    read_choices,
)
from trimaran.worker.config.engine_folder import BuildConfig, RankMapping
from trimaran.worker.config.pretrained_config import PretrainedConfig

_EXPLICIT = "explicit_draft_tokens"
_OWN_FOLDER_MODES = (EAGLE, MEDUSA, _EXPLICIT)
HEAD_MODES = (*_OWN_FOLDER_MODES, MTP)
"""Values of ``--speculative_decoding_mode`` for heads. Those of MTP are in the target's own
checkpoint."""

_LAYER_FILE = "model.safetensors"
_REDRAFTER_LENGTH = 5
"""Tokens of a ReDrafter draft, as in TensorRT-LLM, unless a flag names a number."""

_TOP_K, _DEPTH = 10, 5
"""Sizes of a dynamic tree, unless flags name other numbers: the top-k of EAGLE-2's authors, and
the usual length of a chain."""

_KIND_OF_MODE = {EAGLE: EAGLE, MEDUSA: MEDUSA, _EXPLICIT: REDRAFTER}
_OWN_FILES = {MEDUSA: MEDUSA_FILES, REDRAFTER: (REDRAFTER_FILE,)}
_FOLDER_FLAG = {
    EAGLE: "eagle_model_dir", MEDUSA: "medusa_model_dir", _EXPLICIT: "drafter_model_dir",
}  # fmt: skip
_LENGTH_FLAG = {
    EAGLE: "num_eagle_layers", MEDUSA: "num_medusa_heads",
    _EXPLICIT: "redrafter_draft_len_per_beam",
}  # fmt: skip


_CHOICES_FLAG = {EAGLE: "eagle_choices", MEDUSA: "medusa_choices"}


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A head's kind and its checkpoint folder."""

    kind: str
    folder: Path


def add_head_flags(parser: FlagSink) -> None:
    """Declare the flags of heads that draft."""
    parser.add_argument("--eagle_model_dir", type=Path, metavar="DIR",
                        help="checkpoint of an EAGLE head, with mode eagle")  # fmt: skip
    parser.add_argument("--num_eagle_layers", type=positive, metavar="N",
                        help="tokens of an EAGLE draft (--max_draft_len)")  # fmt: skip
    parser.add_argument("--medusa_model_dir", type=Path, metavar="DIR",
                        help="checkpoint of Medusa heads, with mode medusa")  # fmt: skip
    parser.add_argument("--num_medusa_heads", type=positive, metavar="N",
                        help="Medusa heads that draft (the checkpoint's)")  # fmt: skip
    parser.add_argument("--drafter_model_dir", type=Path, metavar="DIR",
                        help="checkpoint of ReDrafter, with its mode")  # fmt: skip
    parser.add_argument("--redrafter_draft_len_per_beam", type=positive, metavar="N",
                        help="tokens of a ReDrafter draft (--max_draft_len)")  # fmt: skip
    parser.add_argument("--redrafter_num_beams", type=positive, metavar="N",
                        help="beams of ReDrafter, whose tree is verified (1)")  # fmt: skip
    for kind, name in _CHOICES_FLAG.items():
        default = "mc_sim_7b_63" if kind == MEDUSA else "a chain"
        parser.add_argument(f"--{name}", metavar="TREE",
                            help=f"tree of drafts, as in '{{0}}, {{0, 0}}, {{1}}' "
                            f"({default})")  # fmt: skip
    parser.add_argument("--eagle_use_dynamic_tree", action="store_true",
                        help="trees by the probabilities of drafts (EAGLE-2), of "
                        "--max_draft_len nodes")  # fmt: skip
    parser.add_argument("--eagle_dynamic_tree_max_top_k", type=positive, metavar="K",
                        help="nodes that such a tree expands at each depth "
                        f"({_TOP_K})")  # fmt: skip
    parser.hide(*_LENGTH_FLAG.values(), "redrafter_num_beams")


def chain_length(args: argparse.Namespace, mode: str, most: int | None) -> int | None:
    """Draft tokens of an engine whose heads draft chains: the smaller of ``--max_draft_len``
    and the number of a head's steps; None for no number at all."""
    if mode not in HEAD_MODES:
        return most
    if mode == MTP:
        # The layer is trained for one token.
        return 1 if most is None else most
    numbers = [most, _num_steps(args, mode)]
    default = _REDRAFTER_LENGTH if mode == _EXPLICIT else None
    return min((number for number in numbers if number), default=default)


def tree_of_flags(args: argparse.Namespace, mode: str, most: int | None) -> DraftTree | None:
    """The tree that an engine with heads drafts; None for a chain.

    ``most``, of ``--max_draft_len``, counts the nodes of a tree. Medusa heads draft a tree
    unless ``most`` is a chain's length, which is at most the number of heads.

    Raises:
        ConfigError: the flags name a tree for another mode, or one that exceeds their limits.
    """
    for kind, name in _CHOICES_FLAG.items():
        if getattr(args, name) is not None and kind != mode:
            raise ConfigError(
                f"--{name} is {getattr(args, name)!r}, but --speculative_decoding_mode is "
                f"{mode}. Name {kind}, or leave the flag out."
            )
    if mode not in _CHOICES_FLAG:
        return None
    name, steps = _CHOICES_FLAG[mode], _num_steps(args, mode)
    given = getattr(args, name)
    if given is None:
        is_chain = most is not None and steps is not None and most <= steps
        if mode != MEDUSA or steps is None or is_chain:
            return None
        default = tuple(path for path in MC_SIM_7B_63 if len(path) <= steps)
        return DraftTree(default[:most])
    tree = DraftTree(read_choices(given, f"--{name}"))
    if most is not None and tree.num_nodes > most:
        raise ConfigError(
            f"--{name} has {tree.num_nodes} nodes, but --max_draft_len is {most}. Raise it to "
            f"{tree.num_nodes}, or name fewer choices."
        )
    if steps is not None and tree.depth > steps:
        raise ConfigError(
            f"--{name} has a path of {tree.depth} tokens, but the head drafts {steps} one "
            f"behind another (--{_LENGTH_FLAG[mode]}, or the heads of the checkpoint). Shorten "
            "the path."
        )
    return tree


def dynamic_limits_of_flags(
    args: argparse.Namespace, mode: str, most: int | None
) -> DynamicTreeLimits | None:
    """The limits of the dynamic trees that an engine with an EAGLE head grows, or of the beams
    of ReDrafter, of ``most`` nodes; None for other drafts.

    Raises:
        ConfigError: the flags name such trees for another mode or together with choices, or
            numbers that no tree has.
    """
    top_k, beams = args.eagle_dynamic_tree_max_top_k, args.redrafter_num_beams
    if beams is not None and beams > 1 and mode == _EXPLICIT:
        length = args.redrafter_draft_len_per_beam or _REDRAFTER_LENGTH
        return beam_limits(beams, length, beams * length if most is None else most)
    if not args.eagle_use_dynamic_tree:
        if top_k is not None:
            raise ConfigError(
                f"--eagle_dynamic_tree_max_top_k is {top_k}, but --eagle_use_dynamic_tree is "
                "not set. Set it, or leave the number out."
            )
        return None
    if mode != EAGLE or args.eagle_choices is not None:
        what = f"--speculative_decoding_mode {mode}" if mode != EAGLE else "--eagle_choices"
        raise ConfigError(
            f"--eagle_use_dynamic_tree is set together with {what}: a dynamic tree is that of "
            "an EAGLE head, and has no choices. Leave one out."
        )
    if not most or most < 0:
        # `build_config` refuses the length.
        return None
    return dynamic_limits(top_k or _TOP_K, args.num_eagle_layers or _DEPTH, most)


def _num_steps(args: argparse.Namespace, mode: str) -> int | None:
    """Tokens of a head's longest path; None if nothing limits them."""
    numbers = [getattr(args, _LENGTH_FLAG[mode])]
    if mode == MEDUSA and args.medusa_model_dir is not None:
        numbers.append(medusa_config(args.medusa_model_dir).num_heads)
    return min((number for number in numbers if number), default=None)


def draft_head(args: argparse.Namespace, limits: BuildConfig) -> DraftHead | None:
    """The head that the flags name; None if the engine drafts with none.

    Raises:
        ConfigError: a flag of heads without its mode, or a mode without its folder.
    """
    mode = limits.speculative_decoding_mode
    for kind in _OWN_FOLDER_MODES:
        for name in (_FOLDER_FLAG[kind], _LENGTH_FLAG[kind]):
            value = getattr(args, name)
            if value is not None and kind != mode:
                raise ConfigError(
                    f"--{name} is {value}, but --speculative_decoding_mode is {mode}. Name "
                    f"{kind}, or leave the flag out."
                )
    beams = args.redrafter_num_beams
    if beams is not None and mode != _EXPLICIT:
        raise ConfigError(
            f"--redrafter_num_beams is {beams}, but --speculative_decoding_mode is {mode}. "
            f"Name {_EXPLICIT}, or leave the flag out."
        )
    if mode not in HEAD_MODES:
        return None
    if mode == MTP:
        return DraftHead(mode, args.checkpoint)
    folder = getattr(args, _FOLDER_FLAG[mode])
    if folder is None:
        raise ConfigError(
            f"--speculative_decoding_mode is {mode}, but --{_FOLDER_FLAG[mode]} is not set. "
            "Name the folder of the checkpoint."
        )
    return DraftHead(_KIND_OF_MODE[mode], folder)


def check_head(head: DraftHead | None, config: PretrainedConfig, mapping: RankMapping) -> None:
    """Check a head's tensors against the target's configuration.

    Raises:
        ConfigError: the head cannot draft for this target.
    """
    if head is None:
        return
    # These import torch.
    from trimaran.builder.build_plan import RankPlan, model_on_meta
    from trimaran.worker.models.drafting.loading import load_head
    from trimaran.worker.models.drafting.mtp import layer_files, prediction_layer
    from trimaran.worker.models.weights.checkpoint import find_tensors

    target = model_on_meta(0, config, _one_stage(mapping))
    if head.kind != MTP:
        load_head(head.kind, head.folder, target)
        return
    layer = prediction_layer(target)
    found = find_tensors(layer, list(layer_files(layer, head.folder)))
    RankPlan(layer, found, {}).check_shapes(set())


def _one_stage(mapping: RankMapping) -> RankMapping:
    """The mapping with all layers in one stage: heads belong to no stage's shard."""
    world_size = mapping.world_size // mapping.pp_size
    return replace(mapping, world_size=world_size, pp_size=1, pp_partition=())


def write_head(
    head: DraftHead | None, output: Path, config: PretrainedConfig, mapping: RankMapping
) -> None:
    """Copy a head's configuration and weights into an engine folder of this target."""
    if head is None:
        return
    folder = output / DRAFT_FOLDER
    # What a build that was stopped left.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if head.kind == MTP:
        _write_layer(head.folder, folder, config, mapping)
        return
    names = _OWN_FILES.get(head.kind, ())
    own = [head.folder / name for name in names if (head.folder / name).is_file()]
    files = own[:1] or list(find_weight_files(head.folder))
    for path in (head.folder / CONFIG_FILE, *files):
        shutil.copyfile(path, folder / path.name)


def _write_layer(
    checkpoint: Path, folder: Path, config: PretrainedConfig, mapping: RankMapping
) -> None:
    """Write the tensors of a layer for multi-token prediction, as the checkpoint has them."""
    # These import torch.
    from safetensors.torch import save_file

    from trimaran.builder.build_plan import model_on_meta
    from trimaran.worker.models.drafting.mtp import layer_files, prediction_layer
    from trimaran.worker.models.weights.checkpoint import mapped_file

    layer = prediction_layer(model_on_meta(0, config, _one_stage(mapping)))
    with ExitStack() as stack:
        tensors = {}
        for path, names in layer_files(layer, checkpoint).items():
            tensor_of = stack.enter_context(mapped_file(path))
            tensors.update({name: tensor_of(name).contiguous() for name in names})
        save_file(tensors, folder / _LAYER_FILE)
    shutil.copyfile(checkpoint / CONFIG_FILE, folder / CONFIG_FILE)

"""From a model's folder, its config.pbtxt and the flags to a `SpeculationConfig`."""

from __future__ import annotations

import os

from trimaran.comm.errors import ConfigError
from trimaran.launcher.resolution.engine_flags import EngineFlags
from trimaran.server.repository.model_repository import RepositoryModel
from trimaran.worker.config.draft_network import DRAFT_FOLDER, EAGLE, MEDUSA, MTP, REDRAFTER
from trimaran.worker.config.draft_tree import Choices, read_choices
from trimaran.worker.config.engine_folder import EngineFolder, FolderKind
from trimaran.worker.config.speculation_config import (
    LOOKAHEAD,
    MAX_DRAFT_TOKENS,
    LookaheadSizes,
    SpeculationConfig,
)

_MAX_DRAFT_TOKENS = SpeculationConfig().max_draft_tokens
_DRAFTER_OF_MODE = {
    "draft_tokens_external": "draft_tokens", "lookahead_decoding": LOOKAHEAD, EAGLE: EAGLE,
    MEDUSA: MEDUSA, MTP: MTP, "explicit_draft_tokens": REDRAFTER,
}  # fmt: skip
"""The drafter of an engine that was built for it, by the build's mode."""


def speculation_config(
    model: RepositoryModel, folder: EngineFolder, flags: EngineFlags
) -> SpeculationConfig:
    """The flags' drafter, or the drafter that the folder was built for."""
    built = _DRAFTER_OF_MODE.get(folder.build.speculative_decoding_mode, "none")
    drafter = flags.speculative_decoding or built
    mode = model.parameters.get_str("decoding_mode")
    if mode in (EAGLE, MEDUSA, LOOKAHEAD, REDRAFTER) and mode != drafter:
        raise ConfigError(
            f"{model.config_path}: decoding_mode is {mode} but the drafter is {drafter}. Build "
            f"the engine with --speculative_decoding_mode {_mode_of(mode)}, or set "
            "decoding_mode to auto."
        )
    sizes = _lookahead_sizes(model, drafter, mode)
    if drafter == "none":
        others: dict[str, object] = {"--max-draft-tokens": flags.max_draft_tokens}
        others["--draft-model"] = flags.draft_model
        others["--verify-all-drafts"] = flags.verifies_all_drafts
        for flag in (name for name, is_set in others.items() if is_set):
            raise ConfigError(
                f"{flag} is set but no draft tokens are verified. Add --speculative-decoding "
                "ngram or draft_tokens, or leave the flag out."
            )
        return SpeculationConfig()
    if flags.verifies_all_drafts and drafter == "draft_tokens":
        raise ConfigError(
            f"--verify-all-drafts is about drafts of ngram or of a network, but the drafter is "
            f"{drafter}, of which all drafts are verified. Leave the flag out."
        )
    draft_dir = flags.draft_model or ""
    if not draft_dir and drafter == built and drafter in (EAGLE, MEDUSA, MTP, REDRAFTER):
        draft_dir = str(folder.path / DRAFT_FOLDER)
    elif not draft_dir and drafter == MTP and folder.kind is FolderKind.HUGGINGFACE:
        draft_dir = str(folder.path)
    most = flags.max_draft_tokens or folder.build.max_draft_len
    tree = _tree(model, folder, drafter, built)
    if not most:
        most = MAX_DRAFT_TOKENS if tree else _MAX_DRAFT_TOKENS
    is_dynamic = drafter == built and not tree
    return SpeculationConfig(
        drafter=drafter,
        lookahead=sizes,
        draft_dir=os.path.abspath(draft_dir) if draft_dir else "",
        max_draft_tokens=most,
        tree=tree,
        tree_width=folder.build.draft_width if is_dynamic else 0,
        tree_depth=folder.build.draft_depth if is_dynamic else 0,
        is_adaptive=not flags.verifies_all_drafts,
    )


def _mode_of(drafter: str) -> str:
    """The build's mode of a drafter."""
    return next(mode for mode, each in _DRAFTER_OF_MODE.items() if each == drafter)


_CHOICES = {MEDUSA: "medusa_choices", EAGLE: "eagle_choices"}


def _tree(model: RepositoryModel, folder: EngineFolder, drafter: str, built: str) -> Choices:
    """The tree of config.pbtxt, or else that of the build; empty for a chain."""
    for kind, name in _CHOICES.items():
        given = model.parameters.get_str(name)
        if not given:
            continue
        if kind != drafter:
            raise ConfigError(
                f"{model.config_path}: {name} is {given!r} but the drafter is {drafter}. Build "
                f"the engine with --speculative_decoding_mode {_mode_of(kind)}, or leave the "
                "choices out."
            )
        return read_choices(given, f"{model.config_path}: {name}")
    if drafter != built or not folder.build.draft_choices:
        return ()
    source = f"{folder.path}: build_config.draft_choices"
    return read_choices(folder.build.draft_choices, source)


_LOOKAHEAD_SIZES = (
    "lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size",
)  # fmt: skip


def _lookahead_sizes(model: RepositoryModel, drafter: str, mode: str | None) -> LookaheadSizes:
    """The sizes of config.pbtxt, or else the defaults."""
    sizes = [model.parameters.get_int(name) for name in _LOOKAHEAD_SIZES]
    names = ", ".join(_LOOKAHEAD_SIZES)
    given = [size for size in sizes if size is not None]
    if given and drafter != LOOKAHEAD:
        raise ConfigError(
            f"{model.config_path}: {names} are set but the drafter is {drafter}. Build the "
            "engine with --speculative_decoding_mode lookahead_decoding, or leave them out."
        )
    if len(given) == len(sizes):
        return LookaheadSizes(*given)
    if given or mode == LOOKAHEAD:
        raise ConfigError(
            f"{model.config_path}: lookahead decoding needs all of {names}, but not all are "
            "set."
        )
    return LookaheadSizes()

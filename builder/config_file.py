"""The values of the ``config.json`` that a build writes."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trimaran.worker.config.engine_folder import (
    CONFIG_FILE,
    FORMAT_VERSION,
    BuildConfig,
    RankMapping,
)
from trimaran.worker.config.pretrained_config import PretrainedConfig

ShardTable = list[dict[str, str | int]]
"""Each rank file's name, size in bytes, and checksum of its header."""


def engine_values(
    config: PretrainedConfig, mapping: RankMapping, limits: BuildConfig, shards: ShardTable
) -> dict[str, Any]:
    """The ``config.json`` of an engine folder."""
    build = {
        **limits.to_dict(),
        "kv_cache_type": "paged",
        "lora_config": {"max_lora_rank": limits.max_lora_rank},
    }
    pretrained = _pretrained_values(config, mapping)
    return {**_head(), "pretrained_config": pretrained, "build_config": build, "shards": shards}


def checkpoint_values(
    config: PretrainedConfig, mapping: RankMapping, shards: ShardTable
) -> dict[str, Any]:
    """The ``config.json`` of a checkpoint folder, the result of ``trimaran convert``."""
    return {**_head(), **_pretrained_values(config, mapping), "shards": shards}


def write_config(folder: Path, values: dict[str, Any]) -> None:
    """Write ``config.json``."""
    text = json.dumps(values, indent=2) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def _head() -> dict[str, Any]:
    return {"format_version": FORMAT_VERSION, "version": version("trimaran")}


def _pretrained_values(config: PretrainedConfig, mapping: RankMapping) -> dict[str, Any]:
    sizes = {**asdict(mapping), "cp_size": 1}
    return {**config.to_dict(), "mapping": sizes}

"""Labels that a model's configuration gives its metrics (``metric_tags``)."""

from __future__ import annotations

import re
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ConfigError

_NAME = re.compile(r"\w+", re.ASCII)


def check_tags(path: Path, config: ModelConfig) -> None:
    """Refuse names that no label can have.

    Raises:
        ConfigError: names the file and the tag.
    """
    for name in config.metric_tags:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{path}: metric_tags names {name!r}, which cannot name a label. Use letters, "
                "digits and underscores."
            )


def tag_labels(config: ModelConfig) -> dict[str, str]:
    """The labels, which Triton too tells from its own by an underscore before them."""
    return {f"_{name}": value for name, value in sorted(config.metric_tags.items())}

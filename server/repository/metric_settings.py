"""Histogram buckets and metric labels that a model's configuration sets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
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
    """The labels. Triton too prefixes them with an underscore, apart from its own labels."""
    return {f"_{name}": value for name, value in sorted(config.metric_tags.items())}


FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
_BUCKETS = (100.0, 500.0, 2000.0, 5000.0)


def check_buckets(path: Path, config: ModelConfig) -> None:
    """Refuse buckets that no histogram can have.

    Raises:
        ConfigError: names the file and the buckets.
    """
    for bounds in _given(config):
        rises = all(a < b for a, b in pairwise(bounds))
        if not rises or not all(map(math.isfinite, bounds)):
            shown = ", ".join(f"{bound:g}" for bound in bounds)
            raise ConfigError(
                f"{path}: the buckets of {FIRST_RESPONSE} in model_metrics are {shown} but "
                "must be numbers that rise; one for all above the last is added"
            )


def first_response_buckets(config: ModelConfig) -> tuple[float, ...]:
    """The upper bounds of the buckets of the time to the first response, in milliseconds."""
    found: tuple[float, ...] = _BUCKETS
    for bounds in _given(config):
        found = bounds or found
    return found


def _given(config: ModelConfig) -> Iterator[tuple[float, ...]]:
    for control in config.model_metrics.metric_control:
        if control.metric_identifier.family == FIRST_RESPONSE:
            yield tuple(control.histogram_options.buckets)

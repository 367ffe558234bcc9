"""The number of layers of each pipeline stage, even or listed; free of torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trimaran.comm.errors import ConfigError

_NUM_LAYERS = re.compile(r"0*[1-9][0-9]{0,8}")


def stage_sizes(num_layers: int, pp_size: int, partition: Sequence[int] = ()) -> list[int]:
    """Layers of each stage: ``partition``, or an even split.

    In an uneven split each of the first stages has one layer more.

    Raises:
        ConfigError: a stage would be empty, or ``partition`` has a wrong number of stages or of
            layers.
    """
    if partition:
        _check_partition(num_layers, pp_size, partition)
        return list(partition)
    if pp_size > num_layers:
        raise ConfigError(
            f"pp_size ({pp_size}) is above num_hidden_layers ({num_layers}), so a stage would "
            "be empty. Choose a smaller --pp-size."
        )
    each, rest = divmod(num_layers, pp_size)
    return [each + (stage < rest) for stage in range(pp_size)]


def parse_partition(text: str) -> tuple[int, ...]:
    """Parse ``14,12,14``.

    Raises:
        ConfigError: ``text`` is not a list of whole numbers of 1 or more.
    """
    words = [word.strip() for word in text.split(",")] if "," in text else text.split()
    if not words or not all(map(_NUM_LAYERS.fullmatch, words)):
        raise ConfigError(
            f"--pp-partition is {text!r} but must name each stage's layers, as in 14,12,14."
        )
    return tuple(int(word) for word in words)


def _check_partition(num_layers: int, pp_size: int, partition: Sequence[int]) -> None:
    shown = ",".join(map(str, partition))
    if len(partition) != pp_size:
        raise ConfigError(
            f"pp_partition ({shown}) has {len(partition)} stages but pp_size is {pp_size}. "
            f"Name {pp_size} numbers of layers, or set --pp-size to {len(partition)}."
        )
    if min(partition) < 1:
        raise ConfigError(
            f"pp_partition ({shown}) has an empty stage. Each stage must have a layer or more."
        )
    if sum(partition) != num_layers:
        raise ConfigError(
            f"pp_partition ({shown}) has {sum(partition)} layers but num_hidden_layers is "
            f"{num_layers}. Correct --pp-partition so that its numbers add up to that."
        )

"""The instances of a token-level model: its data-parallel replicas and their devices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

from trimaran.comm.errors import ConfigError
from trimaran.comm.topology import MAX_RANKS
from trimaran.server.repository.model_repository import RepositoryModel

MIG_PREFIX = "MIG-"
_GPU = re.compile(r"0*[0-9]{1,9}")
_RANK = re.compile(r"0*[1-9][0-9]{0,8}")
_T = TypeVar("_T")

MAX_INSTANCES = 1024
"""Of one model: each is a worker group. A slip of a count is not to exhaust the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One replica, as config.pbtxt describes it."""

    number: int
    devices: tuple[str, ...] = ()
    """GPU numbers or MIG UUIDs, one a rank; empty means that none are named."""

    participants: tuple[int, ...] = ()
    """World ranks that are to run it; empty means that none are named."""


def instances_of(
    model: RepositoryModel, *, needs_devices: bool = False
) -> tuple[Instance, ...]:
    """Every replica that ``instance_group``, ``gpu_device_ids`` and ``participant_ids`` ask
    for. With ``needs_devices`` several replicas must name theirs.

    Raises:
        ConfigError: the three do not go together, or it is too many.
    """
    count = _count(model)
    devices = _devices(model, count)
    if needs_devices and count > 1 and not devices[0]:
        raise ConfigError(
            f"{model.config_path}: gpu_device_ids parameter required when instance count > 1. "
            f"Name GPUs for each of the {count} instances, as in 0;1."
        )
    participants = _participants(model, count)
    return tuple(
        Instance(number=n, devices=devices[n], participants=participants[n])
        for n in range(count)
    )


def _count(model: RepositoryModel) -> int:
    groups = model.config.instance_group
    # A group that names GPUs means so many instances on each of them.
    count = sum(max(1, group.count) * max(1, len(group.gpus)) for group in groups) or 1
    if count > MAX_INSTANCES:
        raise ConfigError(
            f"{model.config_path}: instance_group asks for {count} instances, each a worker "
            f"group, but at most {MAX_INSTANCES} of one model are started. Lower the count."
        )
    return count


def _devices(model: RepositoryModel, count: int) -> list[tuple[str, ...]]:
    groups = model.config.instance_group
    named: list[tuple[str, ...]] = [
        (str(gpu),)
        for group in groups
        for gpu in group.gpus
        for _ in range(max(1, group.count))
    ]
    lists = [
        tuple(_device(model, word) for word in words)
        for words in _lists(model, "gpu_device_ids")
    ]
    if not named:
        return _one_each(model, "gpu_device_ids", lists, count)
    if lists:
        raise ConfigError(
            f"{model.config_path}: GPUs are named twice, by gpu_device_ids and by the gpus of "
            "instance_group. Leave out one of them."
        )
    if len(named) != count:
        raise ConfigError(
            f"{model.config_path}: instance_group names GPUs for {len(named)} of {count} "
            "instances. Name them for all, or use gpu_device_ids."
        )
    return named


def _device(model: RepositoryModel, word: str) -> str:
    if _GPU.fullmatch(word):
        return str(int(word))
    if word.startswith(MIG_PREFIX):
        return word
    raise ConfigError(
        f"{model.config_path}: gpu_device_ids holds {word!r} but must be GPU numbers with "
        f"commas between, as in 0,1, or one {MIG_PREFIX}UUID an instance; ';' goes between "
        "instances"
    )


def _participants(model: RepositoryModel, count: int) -> list[tuple[int, ...]]:
    lists = []
    for words in _lists(model, "participant_ids"):
        bad = next((word for word in words if not _is_rank(word)), None)
        if bad is not None:
            raise ConfigError(
                f"{model.config_path}: participant_ids holds {bad!r} but must be world ranks "
                f"of 1 or more, up to {MAX_RANKS}, with commas between, as in 1,2; rank 0 is "
                "the orchestrator's place, and ';' goes between instances"
            )
        lists.append(tuple(int(word) for word in words))
    return _one_each(model, "participant_ids", lists, count)


def _is_rank(word: str) -> bool:
    return _RANK.fullmatch(word) is not None and int(word) <= MAX_RANKS


def _lists(model: RepositoryModel, key: str) -> list[list[str]]:
    """The words of each ``;``-separated list."""
    text = model.parameters.get_str(key)
    if not text:
        return []
    return [[word.strip() for word in part.split(",")] for part in text.split(";")]


def _one_each(
    model: RepositoryModel, key: str, lists: list[tuple[_T, ...]], count: int
) -> list[tuple[_T, ...]]:
    """One list for every instance; empty ones where none is given."""
    if not lists:
        return [()] * count
    if len(lists) < count:
        raise ConfigError(
            f"{model.config_path}: {key} mismatch: instance {len(lists)} >= {len(lists)} "
            f"entries. instance_group asks for {count} instances: name a list for each, with "
            "';' between."
        )
    if len(lists) > count:
        raise ConfigError(
            f"{model.config_path}: {key} names {len(lists)} lists for {count} instance(s). "
            f"Set the count of instance_group to {len(lists)}, or leave out lists."
        )
    return lists

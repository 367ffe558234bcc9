"""Worker groups on hosts and devices: chosen here, or named by `participant_ids`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from trimaran.comm.errors import ConfigError
from trimaran.launcher.config import GroupConfig, HostSlots
from trimaran.launcher.placement.hosts import LOCAL
from trimaran.launcher.placement.placement import (
    Host,
    PlacementError,
    PlacementRequest,
    RankPlacement,
    picture,
    place,
)

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class PlacementConflict(ConfigError):
    """There is no room beside the running groups, but there is once ``groups`` have ended."""

    def __init__(self, text: str, groups: tuple[str, ...]) -> None:
        super().__init__(text)
        self.groups = groups


@dataclasses.dataclass(frozen=True, slots=True)
class PendingGroup:
    """A group whose ranks have no hosts and devices yet."""

    group: GroupConfig
    devices: tuple[str, ...] = ()
    """The devices that config.pbtxt names."""

    num_nodes: int = 1

    @property
    def request(self) -> PlacementRequest:
        """The request of this group to the placement."""
        return PlacementRequest(
            name=self.group.name,
            num_ranks=self.group.world_size,
            devices=self.devices,
            needs_gpus=self.group.engine.device == "cuda",
            num_nodes=self.num_nodes,
            num_together=self.group.engine.parallel.tp_size,
        )


def place_groups(
    pending: Sequence[PendingGroup], hosts: Sequence[Host], running: Sequence[GroupConfig]
) -> list[GroupConfig]:
    """The pending groups with hosts and devices, beside the ``running`` ones.

    Raises:
        PlacementConflict: they would fit without some of the running groups.
        ConfigError: they do not fit on these hosts.
    """
    requests = [entry.request for entry in pending]
    try:
        placements = place(requests, hosts, placements_of(running))
    except PlacementError as error:
        in_the_way = _in_the_way(pending, hosts, running)
        if in_the_way:
            raise PlacementConflict(str(error), in_the_way) from None
        raise
    return [_placed(entry, placements) for entry in pending]


def placements_of(groups: Iterable[GroupConfig]) -> list[RankPlacement]:
    """The host and the device of every rank of placed groups."""
    placements = []
    for group in groups:
        hosts = [entry.host for entry in group.hosts for _ in range(entry.num_ranks)]
        devices = [str(gpu) for gpu in group.engine.gpu_device_ids]
        if _VISIBLE in group.env:
            devices = [group.env[_VISIBLE]]
        placements += [
            RankPlacement(
                group=group.name,
                rank=rank,
                host=hosts[rank] if hosts else LOCAL,
                device=devices[rank] if devices else "",
            )
            for rank in range(group.world_size)
        ]
    return placements


def show(hosts: Sequence[Host], groups: Iterable[GroupConfig]) -> str:
    """The placement of these groups, as lines of text."""
    return picture(hosts, placements_of(groups))


def with_devices(group: GroupConfig, devices: Sequence[str]) -> GroupConfig:
    """The group on these devices, one a rank; ranks see only their MIG slices.

    Raises:
        ConfigError: a MIG slice for one of several ranks.
    """
    named = [device for device in devices if device]
    if not any(not device.isdigit() for device in named):
        engine = dataclasses.replace(
            group.engine, gpu_device_ids=tuple(int(device) for device in named)
        )
        return dataclasses.replace(group, engine=engine)
    if len(named) > 1:
        raise ConfigError(
            f"group '{group.name}' has {group.world_size} ranks, but MIG slices cannot talk to "
            f"each other ({','.join(named)}): serve an engine built for one rank on each"
        )
    return dataclasses.replace(group, env={**group.env, _VISIBLE: named[0]})


def _placed(entry: PendingGroup, placements: Iterable[RankPlacement]) -> GroupConfig:
    own = [each for each in placements if each.group == entry.group.name]
    group = with_devices(entry.group, [each.device for each in own])
    counts: dict[str, int] = {}
    for each in own:
        counts[each.host] = counts.get(each.host, 0) + 1
    if list(counts) == [LOCAL]:
        return group
    hosts = tuple(HostSlots(host, count) for host, count in counts.items())
    return dataclasses.replace(group, hosts=hosts)


def _in_the_way(
    pending: Sequence[PendingGroup], hosts: Sequence[Host], running: Sequence[GroupConfig]
) -> tuple[str, ...]:
    """Running groups that must end to make room: preferably of the same models."""
    models = {entry.group.model for entry in pending}
    others = [group for group in running if group.model not in models]
    requests = [entry.request for entry in pending]
    try:
        place(requests, hosts, placements_of(others))
        return tuple(group.name for group in running if group.model in models)
    except PlacementError:
        pass
    try:
        wanted = place(requests, hosts)
    except PlacementError:
        return ()
    slots = {(each.host, each.device) for each in wanted}
    held = {each.group for each in placements_of(running) if (each.host, each.device) in slots}
    return tuple(group.name for group in running if group.name in held)


def needed_world_size(pending: Sequence[PendingGroup]) -> int:
    """Ranks of the smallest job that holds all participants, rank 0 among them."""
    return 1 + max((rank for entry in pending for rank in entry.group.participants), default=0)


def world_hosts(world_size: int, hosts: Sequence[Host]) -> tuple[HostSlots, ...]:
    """mpirun's distribution of a job over ``hosts``: each is filled before the next.

    Raises:
        ConfigError: they have too few slots.
    """
    left, found = world_size, []
    for host in hosts:
        count = left if host.num_slots is None else min(left, host.num_slots)
        if count:
            found.append(HostSlots(host.name, count))
        left -= count
    if left and hosts:
        raise ConfigError(
            f"--world-size {world_size} is more than the {world_size - left} slots of --hosts. "
            "Name more slots (NAME:SLOTS) or fewer ranks."
        )
    return tuple(found)


def place_participants(
    pending: Sequence[PendingGroup],
    world_size: int,
    hosts: Sequence[Host],
    *,
    is_one_host: bool,
) -> list[GroupConfig]:
    """The pending groups with their devices, on the ranks that they name.

    ``hosts`` are the hosts of the job's ranks, if known: with ``is_one_host`` the only host,
    else those of `world_hosts`, or none.

    Raises:
        ConfigError: ranks or devices are missing, doubled or out of range.
    """
    owners: dict[int, str] = {}
    for entry in pending:
        _check_participants(entry.group, world_size)
        _check_devices(entry)
        for rank in entry.group.participants:
            holder = owners.setdefault(rank, entry.group.name)
            if holder != entry.group.name:
                raise ConfigError(
                    f"participant_ids of groups '{holder}' and '{entry.group.name}' both name "
                    f"rank {rank}. Give each group ranks of its own:\n"
                    f"{show_ranks([entry.group for entry in pending], world_size)}"
                )
    if is_one_host:
        return _placed_here(pending, hosts[0])
    for entry in pending:
        if entry.request.needs_gpus and not entry.devices:
            raise ConfigError(
                f"group '{entry.group.name}' names no GPUs, and which host its ranks are on is "
                "not known before they start. Set gpu_device_ids in config.pbtxt."
            )
    return [with_devices(entry.group, entry.devices) for entry in pending]


def show_ranks(groups: Sequence[GroupConfig], world_size: int) -> str:
    """Every rank of the job and its engine, as lines of text."""
    lines = ["Placement:", f"  one MPI job of {world_size} ranks"]
    lines.append("    rank 0   the orchestrator's place, no engine")
    for rank in range(1, world_size):
        users = [
            f"{group.name} rank {group.participants.index(rank)}{_device(group, rank)}"
            for group in groups
            if rank in group.participants
        ]
        lines.append(f"    rank {rank:<3} {', '.join(users) or 'idle'}")
    return "\n".join(lines)


def _device(group: GroupConfig, rank: int) -> str:
    gpus = group.engine.gpu_device_ids
    return f" on GPU {gpus[group.participants.index(rank)]}" if gpus else ""


def _check_participants(group: GroupConfig, world_size: int) -> None:
    ranks = group.participants
    where = f"group '{group.name}': participant_ids is {','.join(map(str, ranks))!r}"
    if not ranks:
        raise ConfigError(
            "Spawning of processes was disabled in orchestrator mode, but participant IDs is "
            f"missing. Set participant_ids in the config.pbtxt of '{group.model}', as in 1,2."
        )
    if len(set(ranks)) != len(ranks):
        raise ConfigError(f"{where}, which names a rank twice. Name each once.")
    if len(ranks) != group.world_size:
        raise ConfigError(
            f"{where}: {len(ranks)} ranks for a world size of {group.world_size}. Name one for "
            "each rank of the engine."
        )
    if max(ranks) >= world_size:
        raise ConfigError(
            f"{where}, but the job has ranks 1 to {world_size - 1} beside the orchestrator's. "
            f"Start it with --world-size {max(ranks) + 1}, or correct the list."
        )


def _check_devices(entry: PendingGroup) -> None:
    slices = [device for device in entry.devices if not device.isdigit()]
    if slices:
        raise ConfigError(
            f"group '{entry.group.name}': gpu_device_ids names {slices[0]}, but a MIG slice is "
            "given to a rank by its environment, which the ranks of one job share. Leave out "
            "--disable-spawn-processes."
        )


def _placed_here(pending: Sequence[PendingGroup], host: Host) -> list[GroupConfig]:
    requests: list[PlacementRequest] = [
        dataclasses.replace(entry.request, num_nodes=1) for entry in pending
    ]
    placements = place(requests, [dataclasses.replace(host, name=LOCAL)])
    return [
        with_devices(
            entry.group, [each.device for each in placements if each.group == entry.group.name]
        )
        for entry in pending
    ]

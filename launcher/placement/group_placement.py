"""Worker groups and their seats: what each asks of the placement, and what it is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from trimaran.comm.errors import ConfigError
from trimaran.launcher.config import GroupConfig, HostSlots
from trimaran.launcher.placement.hosts import LOCAL
from trimaran.orchestrator.placement import GroupNeed, Host, NoPlaceError, Seat, picture, place

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class PlacementConflict(ConfigError):
    """There is no room beside running groups; there would be if ``groups`` ended first."""

    def __init__(self, text: str, groups: tuple[str, ...]) -> None:
        super().__init__(text)
        self.groups = groups


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """A group that has no seats yet."""

    group: GroupConfig
    devices: tuple[str, ...] = ()
    """The devices that config.pbtxt names."""

    num_nodes: int = 1

    @property
    def need(self) -> GroupNeed:
        """What the placement is asked for."""
        return GroupNeed(
            name=self.group.name,
            num_ranks=self.group.world_size,
            devices=self.devices,
            needs_gpus=self.group.engine.device == "cuda",
            num_nodes=self.num_nodes,
            num_together=self.group.engine.parallel.tp_size,
        )


def seat(
    drafts: Sequence[Draft], hosts: Sequence[Host], running: Sequence[GroupConfig]
) -> list[GroupConfig]:
    """The drafts as groups with hosts and devices, beside the ``running`` ones.

    Raises:
        PlacementConflict: they would fit without some of the running groups.
        ConfigError: they do not fit on these hosts.
    """
    needs = [draft.need for draft in drafts]
    try:
        seats = place(needs, hosts, seats_of(running))
    except NoPlaceError as error:
        in_the_way = _in_the_way(drafts, hosts, running)
        if in_the_way:
            raise PlacementConflict(str(error), in_the_way) from None
        raise
    return [_seated(draft, seats) for draft in drafts]


def seats_of(groups: Iterable[GroupConfig]) -> list[Seat]:
    """Where the ranks of placed groups sit."""
    seats = []
    for group in groups:
        hosts = [entry.host for entry in group.hosts for _ in range(entry.num_ranks)]
        devices = [str(gpu) for gpu in group.engine.gpu_device_ids]
        if _VISIBLE in group.env:
            devices = [group.env[_VISIBLE]]
        seats += [
            Seat(
                group=group.name,
                rank=rank,
                host=hosts[rank] if hosts else LOCAL,
                device=devices[rank] if devices else "",
            )
            for rank in range(group.world_size)
        ]
    return seats


def show(hosts: Sequence[Host], groups: Iterable[GroupConfig]) -> str:
    """The picture of who sits where."""
    return picture(hosts, seats_of(groups))


def with_devices(group: GroupConfig, devices: Sequence[str]) -> GroupConfig:
    """The group on these devices, one a rank; MIG slices are all that their ranks see.

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


def _seated(draft: Draft, seats: Iterable[Seat]) -> GroupConfig:
    own = [each for each in seats if each.group == draft.group.name]
    group = with_devices(draft.group, [each.device for each in own])
    counts: dict[str, int] = {}
    for each in own:
        counts[each.host] = counts.get(each.host, 0) + 1
    if list(counts) == [LOCAL]:
        return group
    hosts = tuple(HostSlots(host, count) for host, count in counts.items())
    return dataclasses.replace(group, hosts=hosts)


def _in_the_way(
    drafts: Sequence[Draft], hosts: Sequence[Host], running: Sequence[GroupConfig]
) -> tuple[str, ...]:
    """Running groups without which there is room: the same models' if that is enough."""
    models = {draft.group.model for draft in drafts}
    others = [group for group in running if group.model not in models]
    needs = [draft.need for draft in drafts]
    try:
        place(needs, hosts, seats_of(others))
        return tuple(group.name for group in running if group.model in models)
    except NoPlaceError:
        pass
    try:
        wanted = place(needs, hosts)
    except NoPlaceError:
        return ()
    places = {(each.host, each.device) for each in wanted}
    held = {each.group for each in seats_of(running) if (each.host, each.device) in places}
    return tuple(group.name for group in running if group.name in held)


def needed_world_size(drafts: Sequence[Draft]) -> int:
    """Ranks of the smallest job that holds all participants, rank 0 among them."""
    return 1 + max((rank for draft in drafts for rank in draft.group.participants), default=0)


def world_hosts(world_size: int, hosts: Sequence[Host]) -> tuple[HostSlots, ...]:
    """How mpirun spreads a job over ``hosts``: each is filled before the next.

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


def seat_participants(
    drafts: Sequence[Draft], world_size: int, hosts: Sequence[Host], *, is_one_host: bool
) -> list[GroupConfig]:
    """The drafts with their devices, on the ranks that they name.

    ``hosts`` is where the job's ranks are, as far as that is known: with ``is_one_host``
    the only host, else those of `world_hosts`, or none.

    Raises:
        ConfigError: ranks or devices are missing, doubled or not there.
    """
    owners: dict[int, str] = {}
    for draft in drafts:
        _check_participants(draft.group, world_size)
        _check_devices(draft)
        for rank in draft.group.participants:
            holder = owners.setdefault(rank, draft.group.name)
            if holder != draft.group.name:
                raise ConfigError(
                    f"participant_ids of groups '{holder}' and '{draft.group.name}' both name "
                    f"rank {rank}. Give each group ranks of its own:\n"
                    f"{show_ranks([d.group for d in drafts], world_size)}"
                )
    if is_one_host:
        return _seated_here(drafts, hosts[0])
    for draft in drafts:
        if draft.need.needs_gpus and not draft.devices:
            raise ConfigError(
                f"group '{draft.group.name}' names no GPUs, and which host its ranks are on is "
                "not known before they start. Set gpu_device_ids in config.pbtxt."
            )
    return [with_devices(draft.group, draft.devices) for draft in drafts]


def show_ranks(groups: Sequence[GroupConfig], world_size: int) -> str:
    """Every rank of the job and what it runs, as lines of text."""
    lines = ["Who sits where:", f"  one MPI job of {world_size} ranks"]
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


def _check_devices(draft: Draft) -> None:
    slices = [device for device in draft.devices if not device.isdigit()]
    if slices:
        raise ConfigError(
            f"group '{draft.group.name}': gpu_device_ids names {slices[0]}, but a MIG slice is "
            "given to a rank by its environment, which the ranks of one job share. Leave out "
            "--disable-spawn-processes."
        )


def _seated_here(drafts: Sequence[Draft], host: Host) -> list[GroupConfig]:
    needs: list[GroupNeed] = [dataclasses.replace(draft.need, num_nodes=1) for draft in drafts]
    seats = place(needs, [dataclasses.replace(host, name=LOCAL)])
    return [
        with_devices(
            draft.group, [each.device for each in seats if each.group == draft.group.name]
        )
        for draft in drafts
    ]

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

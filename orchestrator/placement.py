"""Who sits where: places worker groups on hosts and devices, or says why they do not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trimaran.comm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine that ranks can run on."""

    name: str
    num_slots: int | None = None
    """Ranks at most; None means as many as wanted."""

    num_gpus: int | None = None
    """GPUs that ranks see there; None means that they are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNeed:
    """What one group asks for."""

    name: str
    num_ranks: int
    devices: tuple[str, ...] = ()
    """GPUs by name, one a rank; empty means that any will do."""

    needs_gpus: bool = False
    """Every rank needs a GPU; those not named are chosen."""

    num_nodes: int = 1
    """Hosts that the ranks are spread over evenly; 0: as many as it takes, in order."""

    num_together: int = 1
    """Ranks of a tensor group: neighbours that are kept on one host if there is a way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of one rank."""

    group: str
    rank: int
    host: str
    device: str = ""
    """GPU number or MIG UUID; empty without one."""


class NoPlaceError(ConfigError):
    """A group does not fit beside the others; ``group`` names it."""

    def __init__(self, group: str, text: str) -> None:
        super().__init__(text)
        self.group = group


def place(
    needs: Sequence[GroupNeed], hosts: Sequence[Host], taken: Iterable[Seat] = ()
) -> list[Seat]:
    """A seat for every rank, beside those ``taken``. Groups that name devices choose first.

    Raises:
        NoPlaceError: says what is missing, and shows who sits where.
    """
    seats = list(taken)
    num_taken = len(seats)
    # The largest first: small groups fit into what is left, not the other way round.
    for need in sorted(needs, key=lambda need: (not need.devices, -need.num_ranks)):
        found = _seats_for(need, hosts, seats)
        if found is None and need.num_together > 1:
            found = _seats_for(replace(need, num_together=1), hosts, seats)
        if found is None:
            text = f"{_why_not(need, hosts, seats)}\n{picture(hosts, seats, [need])}"
            raise NoPlaceError(need.name, text)
        seats += found
    order = {need.name: number for number, need in enumerate(needs)}
    return sorted(seats[num_taken:], key=lambda seat: (order[seat.group], seat.rank))


def _seats_for(
    need: GroupNeed, hosts: Sequence[Host], seats: Sequence[Seat]
) -> list[Seat] | None:
    """Seats on the first hosts that have room; None if too few have."""
    if need.num_nodes > len(hosts) or (need.num_nodes and need.num_ranks % need.num_nodes):
        return None
    found: list[Seat] = []
    share = need.num_ranks // need.num_nodes if need.num_nodes else 0
    for host in hosts:
        left = need.num_ranks - len(found)
        room = _room(need, host, seats, len(found))
        count = min(left, room) if not share else share if room >= share else 0
        if not share:
            count -= count % need.num_together
        named = need.devices[len(found) : len(found) + count]
        devices = named or _free_devices(need, host, seats, count)
        found += [
            Seat(group=need.name, rank=len(found) + n, host=host.name, device=devices[n])
            for n in range(count)
        ]
        if len(found) >= need.num_ranks:
            return found
    return None


def _room(need: GroupNeed, host: Host, seats: Sequence[Seat], start: int) -> int:
    """How many of the need's ranks from ``start`` on the host can seat."""
    used = [seat for seat in seats if seat.host == host.name]
    slots = need.num_ranks if host.num_slots is None else host.num_slots - len(used)
    if need.devices:
        blocked = {seat.device for seat in used}
        devices = 0
        for device in need.devices[start:]:
            if device in blocked or not _exists(device, host, need):
                break
            blocked.add(device)
            devices += 1
        return min(slots, devices)
    if need.needs_gpus:
        return min(slots, len(_free_devices(need, host, seats, need.num_ranks)))
    return max(0, slots)


def _exists(device: str, host: Host, need: GroupNeed) -> bool:
    # The number of GPUs says nothing of MIG slices, nor of GPUs that a CPU does not use.
    if not device.isdigit() or not need.needs_gpus or host.num_gpus is None:
        return True
    return int(device) < host.num_gpus


def _free_devices(need: GroupNeed, host: Host, seats: Sequence[Seat], count: int) -> list[str]:
    """Up to ``count`` GPUs that nobody has; empty names for ranks that need none."""
    if not need.needs_gpus:
        return [""] * count
    used = {seat.device for seat in seats if seat.host == host.name}
    free = [str(gpu) for gpu in range(host.num_gpus or 0) if str(gpu) not in used]
    return free[:count]


def _why_not(need: GroupNeed, hosts: Sequence[Host], seats: Sequence[Seat]) -> str:
    if need.num_nodes > 1 and need.num_ranks % need.num_nodes:
        return (
            f"group '{need.name}' has {need.num_ranks} ranks, which num_nodes "
            f"{need.num_nodes} does not divide. Choose a num_nodes that does."
        )
    if need.num_nodes > len(hosts):
        return (
            f"group '{need.name}' asks for num_nodes {need.num_nodes}, but there is/are "
            f"{len(hosts)} host(s). Name more with --hosts, or lower num_nodes."
        )
    return (
        _missing_device(need, hosts)
        or _doubled_device(need, seats)
        or _too_few(need, hosts, seats)
    )


def _missing_device(need: GroupNeed, hosts: Sequence[Host]) -> str:
    for device in need.devices:
        if not any(_exists(device, host, need) for host in hosts):
            most = max(host.num_gpus or 0 for host in hosts)
            return (
                f"group '{need.name}': gpu_device_ids names GPU {device} but {most} are "
                "visible here (CUDA_VISIBLE_DEVICES counts). Correct the list in config.pbtxt."
            )
    twice = [device for device, count in Counter(need.devices).items() if count > 1]
    if twice and need.num_nodes == 1:
        return (
            f"group '{need.name}': gpu_device_ids names GPU {twice[0]} twice. Give each rank "
            "a GPU of its own."
        )
    return ""


def _doubled_device(need: GroupNeed, seats: Sequence[Seat]) -> str:
    holders = {seat.device: seat.group for seat in seats if seat.device}
    for device in need.devices:
        if device in holders:
            return (
                f"group '{need.name}' asks for GPU {device}, which group '{holders[device]}' "
                "has. Give each group GPUs of its own (gpu_device_ids in config.pbtxt), or "
                "unload a model."
            )
    return ""


def _too_few(need: GroupNeed, hosts: Sequence[Host], seats: Sequence[Seat]) -> str:
    what = "GPU(s)" if need.needs_gpus else "slot(s)"
    rooms = [_room_of_any(need, host, seats) for host in hosts]
    free = max(rooms) if need.num_nodes else sum(rooms)
    where = {0: "", 1: " on one host"}.get(
        need.num_nodes, f" on each of {need.num_nodes} hosts"
    )
    per_host = need.num_ranks // max(1, need.num_nodes)
    remedy = (
        "Serve an engine built for fewer ranks, unload a model, or serve on the CPU with "
        "--device cpu."
        if need.needs_gpus
        else "Give the hosts more slots (--hosts NAME:SLOTS), or set num_nodes in config.pbtxt."
    )
    return (
        f"group '{need.name}' needs {per_host} {what}{where} but at most {free} are free. "
        + remedy
    )


def _room_of_any(need: GroupNeed, host: Host, seats: Sequence[Seat]) -> int:
    anything = GroupNeed(
        name=need.name, num_ranks=len(seats) + 4096, needs_gpus=need.needs_gpus
    )
    return max(0, _room(anything, host, seats, 0))


def picture(
    hosts: Sequence[Host], seats: Iterable[Seat], unplaced: Sequence[GroupNeed] = ()
) -> str:
    """The hosts, their devices and who sits there, as lines of text."""
    every = list(seats)
    lines = ["Who sits where:"]
    for host in hosts:
        here = [seat for seat in every if seat.host == host.name]
        lines.append(f"  {host.name}{_capacity(host)}")
        lines += [f"    {line}" for line in _device_lines(host, here)]
        lines += [f"    {line}" for line in _rank_lines(here)]
        if not here and not host.num_gpus:
            lines.append("    nobody")
    for need in unplaced:
        asked = f", GPUs {','.join(need.devices)}" if need.devices else ""
        lines.append(f"  no place: {need.name} ({need.num_ranks} rank(s){asked})")
    return "\n".join(lines)


def _capacity(host: Host) -> str:
    facts = []
    if host.num_gpus is not None:
        facts.append(f"{host.num_gpus} GPU(s)")
    if host.num_slots is not None:
        facts.append(f"{host.num_slots} slot(s)")
    return f" ({', '.join(facts)})" if facts else ""


def _device_lines(host: Host, seats: Sequence[Seat]) -> list[str]:
    named = {seat.device for seat in seats if seat.device}
    gpus = {str(gpu) for gpu in range(host.num_gpus or 0)}
    lines = []
    for device in sorted(named | gpus, key=lambda d: (not d.isdigit(), len(d), d)):
        holders = [f"{s.group} rank {s.rank}" for s in seats if s.device == device]
        title = f"GPU {device}" if device.isdigit() else device
        lines.append(f"{title:<8} {', '.join(holders) or 'free'}")
    return lines


def _rank_lines(seats: Sequence[Seat]) -> list[str]:
    """One line for the ranks of each group that have no device."""
    ranks: dict[str, list[int]] = {}
    for seat in seats:
        if not seat.device:
            ranks.setdefault(seat.group, []).append(seat.rank)
    return [
        f"CPU      {group} rank {numbers[0]}"
        + (f" to {numbers[-1]}" if len(numbers) > 1 else "")
        for group, numbers in ranks.items()
    ]

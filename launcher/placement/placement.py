"""The placement algorithm: a host and a device for every rank of all groups, or an error."""

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
    """Most ranks; None means no limit."""

    num_gpus: int | None = None
    """GPUs visible to ranks there; None means that GPUs are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """The request of one group."""

    name: str
    num_ranks: int
    devices: tuple[str, ...] = ()
    """GPUs by name, one a rank; empty means any."""

    needs_gpus: bool = False
    """Every rank needs a GPU; unnamed GPUs are chosen."""

    num_nodes: int = 1
    """Hosts over which the ranks are evenly distributed; 0: as many as needed, in order."""

    num_together: int = 1
    """Ranks of a tensor group: neighbours that are kept on one host if possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """The host and the device of one rank."""

    group: str
    rank: int
    host: str
    device: str = ""
    """GPU number or MIG UUID; empty without a device."""


class PlacementError(ConfigError):
    """A group does not fit beside the others; ``group`` names it."""

    def __init__(self, group: str, text: str) -> None:
        super().__init__(text)
        self.group = group


def place(
    requests: Sequence[PlacementRequest],
    hosts: Sequence[Host],
    taken: Iterable[RankPlacement] = (),
) -> list[RankPlacement]:
    """A placement of every rank, beside those ``taken``. Groups that name devices go first.

    Raises:
        PlacementError: names the missing resource, and shows all placements.
    """
    placements = list(taken)
    num_taken = len(placements)
    # The largest first: small groups fit into the remaining room.
    for request in sorted(
        requests, key=lambda request: (not request.devices, -request.num_ranks)
    ):
        found = _placements_for(request, hosts, placements)
        if found is None and request.num_together > 1:
            found = _placements_for(replace(request, num_together=1), hosts, placements)
        if found is None:
            reason = _why_not(request, hosts, placements)
            text = f"{reason}\n{picture(hosts, placements, [request])}"
            raise PlacementError(request.name, text)
        placements += found
    order = {request.name: number for number, request in enumerate(requests)}
    return sorted(placements[num_taken:], key=lambda placed: (order[placed.group], placed.rank))


def _placements_for(
    request: PlacementRequest, hosts: Sequence[Host], placements: Sequence[RankPlacement]
) -> list[RankPlacement] | None:
    """Placements on the first hosts that have room; None if too few have."""
    if request.num_nodes > len(hosts) or (
        request.num_nodes and request.num_ranks % request.num_nodes
    ):
        return None
    found: list[RankPlacement] = []
    per_node = request.num_ranks // request.num_nodes if request.num_nodes else 0
    for host in hosts:
        left = request.num_ranks - len(found)
        room = _room(request, host, placements, len(found))
        count = min(left, room) if not per_node else per_node if room >= per_node else 0
        if not per_node:
            count -= count % request.num_together
        named = request.devices[len(found) : len(found) + count]
        devices = named or _free_devices(request, host, placements, count)
        found += [
            RankPlacement(
                group=request.name, rank=len(found) + n, host=host.name, device=devices[n]
            )
            for n in range(count)
        ]
        if len(found) >= request.num_ranks:
            return found
    return None


def _room(
    request: PlacementRequest, host: Host, placements: Sequence[RankPlacement], start: int
) -> int:
    """The number of requested ranks, from ``start`` on, that fit on the host."""
    used = [placed for placed in placements if placed.host == host.name]
    slots = request.num_ranks if host.num_slots is None else host.num_slots - len(used)
    if request.devices:
        blocked = {placed.device for placed in used}
        devices = 0
        for device in request.devices[start:]:
            if device in blocked or not _exists(device, host, request):
                break
            blocked.add(device)
            devices += 1
        return min(slots, devices)
    if request.needs_gpus:
        return min(slots, len(_free_devices(request, host, placements, request.num_ranks)))
    return max(0, slots)


def _exists(device: str, host: Host, request: PlacementRequest) -> bool:
    # GPU numbers do not count MIG slices, nor GPUs of a host that serves on the CPU.
    if not device.isdigit() or not request.needs_gpus or host.num_gpus is None:
        return True
    return int(device) < host.num_gpus


def _free_devices(
    request: PlacementRequest, host: Host, placements: Sequence[RankPlacement], count: int
) -> list[str]:
    """Up to ``count`` free GPUs; empty names for ranks that need none."""
    if not request.needs_gpus:
        return [""] * count
    used = {placed.device for placed in placements if placed.host == host.name}
    free = [str(gpu) for gpu in range(host.num_gpus or 0) if str(gpu) not in used]
    return free[:count]


def _why_not(
    request: PlacementRequest, hosts: Sequence[Host], placements: Sequence[RankPlacement]
) -> str:
    if request.num_nodes > 1 and request.num_ranks % request.num_nodes:
        return (
            f"group '{request.name}' has {request.num_ranks} ranks, which num_nodes "
            f"{request.num_nodes} does not divide. Choose a num_nodes that does."
        )
    if request.num_nodes > len(hosts):
        return (
            f"group '{request.name}' asks for num_nodes {request.num_nodes}, but there is/are "
            f"{len(hosts)} host(s). Name more with --hosts, or lower num_nodes."
        )
    return (
        _missing_device(request, hosts)
        or _doubled_device(request, placements)
        or _too_few(request, hosts, placements)
    )


def _missing_device(request: PlacementRequest, hosts: Sequence[Host]) -> str:
    for device in request.devices:
        if not any(_exists(device, host, request) for host in hosts):
            most = max(host.num_gpus or 0 for host in hosts)
            return (
                f"group '{request.name}': gpu_device_ids names GPU {device} but {most} are "
                "visible here (CUDA_VISIBLE_DEVICES counts). Correct the list in config.pbtxt."
            )
    twice = [device for device, count in Counter(request.devices).items() if count > 1]
    if twice and request.num_nodes == 1:
        return (
            f"group '{request.name}': gpu_device_ids names GPU {twice[0]} twice. Give each "
            "rank a GPU of its own."
        )
    return ""


def _doubled_device(request: PlacementRequest, placements: Sequence[RankPlacement]) -> str:
    holders = {placed.device: placed.group for placed in placements if placed.device}
    for device in request.devices:
        if device in holders:
            return (
                f"group '{request.name}' asks for GPU {device}, which group "
                f"'{holders[device]}' has. Give each group GPUs of its own "
                "(gpu_device_ids in config.pbtxt), or unload a model."
            )
    return ""


def _too_few(
    request: PlacementRequest, hosts: Sequence[Host], placements: Sequence[RankPlacement]
) -> str:
    what = "GPU(s)" if request.needs_gpus else "slot(s)"
    rooms = [_room_of_any(request, host, placements) for host in hosts]
    free = max(rooms) if request.num_nodes else sum(rooms)
    where = {0: "", 1: " on one host"}.get(
        request.num_nodes, f" on each of {request.num_nodes} hosts"
    )
    per_host = request.num_ranks // max(1, request.num_nodes)
    remedy = (
        "Serve an engine built for fewer ranks, unload a model, or serve on the CPU with "
        "--device cpu."
        if request.needs_gpus
        else "Give the hosts more slots (--hosts NAME:SLOTS), or set num_nodes in config.pbtxt."
    )
    return (
        f"group '{request.name}' needs {per_host} {what}{where} but at most {free} are free. "
        + remedy
    )


def _room_of_any(
    request: PlacementRequest, host: Host, placements: Sequence[RankPlacement]
) -> int:
    anything = PlacementRequest(
        name=request.name, num_ranks=len(placements) + 4096, needs_gpus=request.needs_gpus
    )
    return max(0, _room(anything, host, placements, 0))


def picture(
    hosts: Sequence[Host],
    placements: Iterable[RankPlacement],
    unplaced: Sequence[PlacementRequest] = (),
) -> str:
    """The hosts, their devices and the ranks there, as lines of text."""
    every = list(placements)
    lines = ["Placement:"]
    for host in hosts:
        here = [placed for placed in every if placed.host == host.name]
        lines.append(f"  {host.name}{_capacity(host)}")
        lines += [f"    {line}" for line in _device_lines(host, here)]
        lines += [f"    {line}" for line in _rank_lines(here)]
        if not here and not host.num_gpus:
            lines.append("    no ranks")
    for request in unplaced:
        asked = f", GPUs {','.join(request.devices)}" if request.devices else ""
        lines.append(f"  not placed: {request.name} ({request.num_ranks} rank(s){asked})")
    return "\n".join(lines)


def _capacity(host: Host) -> str:
    facts = []
    if host.num_gpus is not None:
        facts.append(f"{host.num_gpus} GPU(s)")
    if host.num_slots is not None:
        facts.append(f"{host.num_slots} slot(s)")
    return f" ({', '.join(facts)})" if facts else ""


def _device_lines(host: Host, placements: Sequence[RankPlacement]) -> list[str]:
    named = {placed.device for placed in placements if placed.device}
    gpus = {str(gpu) for gpu in range(host.num_gpus or 0)}
    lines = []
    for device in sorted(named | gpus, key=lambda d: (not d.isdigit(), len(d), d)):
        holders = [f"{s.group} rank {s.rank}" for s in placements if s.device == device]
        title = f"GPU {device}" if device.isdigit() else device
        lines.append(f"{title:<8} {', '.join(holders) or 'free'}")
    return lines


def _rank_lines(placements: Sequence[RankPlacement]) -> list[str]:
    """One line for the ranks of each group that have no device."""
    ranks: dict[str, list[int]] = {}
    for placed in placements:
        if not placed.device:
            ranks.setdefault(placed.group, []).append(placed.rank)
    return [
        f"CPU      {group} rank {numbers[0]}"
        + (f" to {numbers[-1]}" if len(numbers) > 1 else "")
        for group, numbers in ranks.items()
    ]

"""The resources of a running server, and its leftovers after the end."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from chaos_server import ChaosServer

LONG_LIVED = ("supervisor", "front end", "orchestrator")
_FD_SLACK = 3
"""Descriptors of a metrics or readiness request that is just being answered."""


@dataclass(frozen=True)
class Holdings:
    """Resources of an idle server."""

    processes: dict[str, int]
    """Processes by role."""
    fds: dict[str, int]
    """Open descriptors of each long-lived process."""
    threads: dict[str, int]
    rss_mb: dict[str, float]
    shm_files: int
    temporary_files: int
    used_blocks: float
    """KV blocks in use by all models."""

    def growth(self, before: Holdings) -> list[str]:
        """The resources held now and not before. Memory is reported for human judgement."""
        grown = []
        if self.processes != before.processes:
            grown.append(f"processes {before.processes} -> {self.processes}")
        for role, count in self.fds.items():
            if count > before.fds.get(role, 0) + _FD_SLACK:
                grown.append(f"descriptors of the {role}: {before.fds.get(role)} -> {count}")
        for what in ("shm_files", "temporary_files", "used_blocks"):
            now, then = getattr(self, what), getattr(before, what)
            if now > then:
                grown.append(f"{what.replace('_', ' ')}: {then:g} -> {now:g}")
        return grown

    def to_dict(self) -> dict[str, object]:
        """The text of the report."""
        return asdict(self)


def holdings(server: ChaosServer) -> Holdings:
    """The resources that the server holds at this moment."""
    members = server.members()
    fds, threads, rss_mb = {}, {}, {}
    for member in members:
        if member.role in LONG_LIVED:
            fds[member.role] = member.process.num_fds()
            threads[member.role] = member.process.num_threads()
            rss_mb[member.role] = round(member.process.memory_info().rss / 2**20, 1)
    used = server.samples("nv_trt_llm_kv_cache_block_metrics")
    return Holdings(
        processes=dict(sorted(Counter(m.role for m in members).items())),
        fds=fds,
        threads=threads,
        rss_mb=rss_mb,
        shm_files=len(server.shm_files()),
        temporary_files=_count_files(server.tmp),
        used_blocks=sum(v for labels, v in used if labels["kv_cache_block_type"] == "used"),
    )


def idle_cpu(server: ChaosServer, seconds: float) -> dict[str, float]:
    """Processor time of an idle server, in percent of one core: by role, and of all."""
    before = _cpu_times(server)
    time.sleep(seconds)
    used: Counter[str] = Counter()
    for pid, (role, spent_s) in _cpu_times(server).items():
        if pid in before:
            used[role] += spent_s - before[pid][1]
    percents = {role: round(spent_s / seconds * 100, 2) for role, spent_s in used.items()}
    return {**percents, "all": round(sum(percents.values()), 2)}


def _cpu_times(server: ChaosServer) -> dict[int, tuple[str, float]]:
    times = {}
    for member in server.members():
        with contextlib.suppress(psutil.Error):
            spent = member.process.cpu_times()
            times[member.pid] = member.role, spent.user + spent.system
    return times


def settled(
    server: ChaosServer, is_settled: Callable[[Holdings], bool], timeout_s: float = 30.0
) -> Holdings:
    """The resources once they are as wanted, or as they are after the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        now = holdings(server)
        if is_settled(now) or time.monotonic() > deadline:
            return now
        time.sleep(0.5)


def left_over(server: ChaosServer) -> list[str]:
    """Leftovers of an ended server: processes, shared memory, files, open ports."""
    found = [f"process {m.pid} ({m.role}, {m.group})" for m in server.members()]
    found += [f"/dev/shm/{name}" for name in server.shm_files()]
    found += [f"temporary {path}" for path in server.temporary_files()]
    for port in (server.http_port, server.grpc_port, server.metrics_port):
        with contextlib.suppress(ConnectionRefusedError), socket.socket() as sock:
            sock.connect(("127.0.0.1", port))
            found.append(f"port {port} is open")
    return found


def _count_files(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))

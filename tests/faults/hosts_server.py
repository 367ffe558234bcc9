"""A server on one host of a lab whose worker groups run on others."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass

import psutil
from chaos_server import MARK, ChaosServer, Member, member_of
from hosts_lab import HostsLab
from served import BIN, command_env, free_ports


@dataclass
class HostsServer(ChaosServer):
    """`trimaran serve` on the host ``home`` with its groups on all hosts of the lab."""

    lab: HostsLab | None = None
    home: str = "one"
    slots: int = 2
    has_host_file: bool = False
    has_hosts: bool = True
    """Whether its ranks are on all hosts; else ``flags`` say where."""

    def start(self) -> None:
        """Start the supervisor on its host."""
        assert self.lab is not None
        self.log_path = self.folder / "serve.log"
        self.address = self.lab.hosts[self.home].address
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        ranks = (
            ["--multi-model"] if self.multi_model else ["--world-size", str(self.world_size)]
        )
        words = [
            str(BIN / "trimaran"), "serve", *ranks, "--model-repo",
            str(self.repository), *self.host_flags(), "--rsh-agent", str(self.lab.agent),
            "--advertise-address", self.address, "--http-port", str(self.http_port),
            "--grpc-port", str(self.grpc_port), "--metrics-port", str(self.metrics_port),
            *self.flags,
        ]  # fmt: skip
        env = {**command_env(), MARK: self.mark}
        env.pop("XDG_RUNTIME_DIR", None)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.lab.command(self.home, words),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=env,
                cwd="/",
            )

    def host_flags(self) -> list[str]:
        """The way in which the launch line names the hosts: in a file of mpirun's form, or
        inline."""
        assert self.lab is not None
        if not self.has_hosts:
            return []
        if not self.has_host_file:
            return ["--hosts", ",".join(f"{name}:{self.slots}" for name in self.lab.hosts)]
        path = self.folder / "hosts.txt"
        path.write_text("".join(f"{name} slots={self.slots}\n" for name in self.lab.hosts))
        return ["--hostfile", str(path)]

    def end(self, timeout_s: float = 60) -> int:
        """SIGTERM to the supervisor process: signals do not pass into a host's namespaces."""
        for member in self.find("supervisor"):
            member.process.terminate()
        return self.process.wait(timeout_s)

    def members(self) -> list[Member]:
        """Every process on any host: they run nothing else."""
        assert self.lab is not None
        return [m for name in self.lab.hosts for m in self.on_host(name)]

    def on_host(self, name: str, role: str = "") -> list[Member]:
        """The processes of one host, all or by role, including processes started by ssh."""
        assert self.lab is not None
        found = []
        for pid in self.lab.pids(name):
            with contextlib.suppress(psutil.Error, OSError):
                found.append(member_of(psutil.Process(pid)))
        return [member for member in found if role in ("", member.role)]

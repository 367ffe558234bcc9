"""Hosts on one machine: each with its own network, processes, name, /dev/shm, /tmp and sshd."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_TMP = "/var/tmp"
_START_TIMEOUT_S = 20.0
_BOOT = """
set -e
hostname {name}
mkdir -p {cache} {folder}/cache
mount --bind {cache} {folder}/cache
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs {tmp}
mkdir -p {cache}
mount --bind {folder}/cache {cache}
mount -t tmpfs tmpfs /run
mkdir /run/sshd
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/resolv.conf /etc/resolv.conf
exec {sshd} -D -e -f {folder}/sshd_config
"""
_SSHD_CONFIG = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PidFile none
MaxStartups 100
SetEnv TMPDIR={tmp}
"""
_SSH_CONFIG = """
Host *
  IdentityFile {folder}/key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  ConnectTimeout 3
  ServerAliveInterval 2
  ServerAliveCountMax 3
"""


@dataclass
class LabHost:
    """One host: its first process, its address, and the bridge's end of its network cable."""

    name: str
    address: str
    cable: str
    power: subprocess.Popen[bytes]
    init_pid: int = 0


@dataclass
class HostsLab:
    """Hosts ``one``, ``two``, ... that reach each other by ssh. Needs root and openssh-server.

    They share the file system except /var/tmp and /dev/shm, and of /var/tmp the tests' cache:
    no host compiles kernels anew. A process of one host sees no process
    of another, so features that need a single machine fail here. A context manager: all hosts
    end with the block.
    """

    num_hosts: int = 2
    hosts: dict[str, LabHost] = field(default_factory=dict)

    def __enter__(self) -> HostsLab:
        tag = secrets.token_hex(3)
        self.folder = Path(tempfile.mkdtemp(prefix=f"lab-{tag}-"))
        self._bridge = f"lab{tag}"
        self._net = _free_network()
        try:
            self._write_files()
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self._net}.1/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for number, name in enumerate(self._names(), 1):
                self.hosts[name] = self._boot(name, number)
            self._await_ssh()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.power.kill()
            host.power.wait()
            # It vanishes with its namespace, but not at once.
            subprocess.run(["ip", "link", "del", host.cable], stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", self._bridge], stderr=subprocess.DEVNULL)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def agent(self) -> Path:
        """The program that mpirun runs in place of ssh."""
        return self.folder / "ssh"

    def command(self, name: str, words: Sequence[str]) -> list[str]:
        """The command line that runs ``words`` on a host. Signals do not pass through it."""
        return [
            "nsenter", f"--target={self.hosts[name].init_pid}", "--net", "--uts", "--mount",
            "--pid", "--", "env", f"TMPDIR={_TMP}", *words,
        ]  # fmt: skip

    def cut(self, name: str) -> None:
        """Take the host's link down: packets are dropped without an error."""
        _ip("link", "set", self.hosts[name].cable, "down")

    def mend(self, name: str) -> None:
        """Take the link up again."""
        _ip("link", "set", self.hosts[name].cable, "up")

    def part(self, one: str, other: str) -> None:
        """Drop all packets between two hosts that still reach all other hosts."""
        for name, lost in ((one, other), (other, one)):
            inside = ("nsenter", f"--target={self.hosts[name].init_pid}", "--net", "ip")
            _run(*inside, "route", "add", "blackhole", f"{self.hosts[lost].address}/32")

    def power_off(self, name: str) -> None:
        """End a host and all its processes at once; its peers are not informed."""
        self.cut(name)
        self.hosts[name].power.kill()
        self.hosts[name].power.wait()

    def power_on(self, name: str) -> None:
        """Start the host again, with the same name and address and nothing running."""
        number = self._names().index(name) + 1
        subprocess.run(["ip", "link", "del", self.hosts[name].cable], stderr=subprocess.DEVNULL)
        self.hosts[name] = self._boot(name, number)
        self._await_ssh()

    def pids(self, name: str) -> list[int]:
        """Every process of a host except its sshd; empty while the host is off."""
        init = self.hosts[name].init_pid
        try:
            namespace = os.readlink(f"/proc/{init}/ns/pid")
        except FileNotFoundError:
            return []
        found = []
        for process in psutil.process_iter(["name"]):
            try:
                is_inside = os.readlink(f"/proc/{process.pid}/ns/pid") == namespace
            except OSError:
                continue
            if is_inside and process.info["name"] not in ("sshd", "unshare"):
                found.append(process.pid)
        return found

    def shm_files(self, name: str) -> list[str]:
        """Names in a host's /dev/shm."""
        return sorted(os.listdir(f"/proc/{self.hosts[name].init_pid}/root/dev/shm"))

    def temporary_files(self, name: str) -> list[str]:
        """Names in a host's temporary folder, without the tests' cache."""
        names = os.listdir(f"/proc/{self.hosts[name].init_pid}/root{_TMP}")
        return sorted(name for name in names if not name.startswith("trimaran-tests-"))

    def _names(self) -> tuple[str, ...]:
        return ("one", "two", "three", "four")[: self.num_hosts]

    def _write_files(self) -> None:
        names = enumerate(self._names(), 11)
        lines = ["127.0.0.1 localhost", *(f"{self._net}.{n} {name}" for n, name in names)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        # Without this entry, each reverse look-up waits 10 s for an absent name server.
        (self.folder / "resolv.conf").write_text("options timeout:1 attempts:1\n")
        for name, text in (("sshd_config", _SSHD_CONFIG), ("ssh_config", _SSH_CONFIG)):
            (self.folder / name).write_text(text.format(folder=self.folder, tmp=_TMP))
        self.agent.write_text(f'#!/bin/sh\nexec ssh -F {self.folder}/ssh_config "$@"\n')
        self.agent.chmod(0o755)
        for key in ("key", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))

    def _boot(self, name: str, number: int) -> LabHost:
        sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
        assert sshd is not None, "no sshd: apt-get install openssh-server"
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        script = _BOOT.format(name=name, tmp=_TMP, folder=self.folder, sshd=sshd, cache=cache)
        log = (self.folder / f"sshd-{name}.log").open("wb")
        with log:
            power = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc",
                 "--kill-child", "sh", "-c", script],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        host = LabHost(name, f"{self._net}.{10 + number}", f"v{self._bridge}{number}", power)
        host.init_pid = _child_of(power.pid)
        _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns",
            str(host.init_pid))  # fmt: skip
        _ip("link", "set", host.cable, "master", self._bridge, "up")
        inside = ("nsenter", f"--target={host.init_pid}", "--net", "ip")
        # A restarted host keeps its address: the ARP tables of its peers hold the address.
        _run(*inside, "link", "set", "eth0", "address", f"02:00:00:00:00:{number:02x}")
        _run(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _run(*inside, "link", "set", interface, "up")
        return host

    def _await_ssh(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        first = self._names()[0]
        for name in self._names():
            words = self.command(first, [str(self.agent), name, "true"])
            while (done := subprocess.run(words, capture_output=True, text=True)).returncode:
                log = (self.folder / f"sshd-{name}.log").read_text()
                assert time.monotonic() < deadline, f"{name}: {done.stderr}\n{log}"
                time.sleep(0.1)


def _child_of(pid: int) -> int:
    """The process that unshare forked, which is in the new namespaces."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        children = psutil.Process(pid).children()
        # Before its exec, the child may not have left unshare's namespaces.
        if children and children[0].name() != "unshare":
            return children[0].pid
        time.sleep(0.02)
    raise AssertionError("unshare made no process: this needs root")


def _free_network() -> str:
    """The first three numbers of a private network that no interface has."""
    taken = _run("ip", "-4", "-o", "addr")
    while True:
        net = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
        if f" {net}." not in taken:
            return net


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout

"""Pods without a kubelet: each with its own network, processes, name, files and user."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

BIN = Path(sys.executable).parent
USER_ID = 1000
_START_TIMEOUT_S = 20.0
# It waits for its network, then becomes the container's command as process 1. The files of this
# machine may belong to root alone, so the only remaining privilege of root is reading them.
_BOOT = """
set -e
read -r go
hostname {hostname}
mount -t tmpfs -o size={shm} tmpfs /dev/shm
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/resolv.conf /etc/resolv.conf
mount --bind {folder}/passwd /etc/passwd
cd {home}
exec setpriv --reuid={user} --regid={user} --clear-groups --no-new-privs \
  --inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search \
  --bounding-set=-all,+dac_read_search "$@" < /dev/null
"""


@dataclass
class Pod:
    """One running pod; its command is process 1 of the pod."""

    name: str
    address: str
    power: subprocess.Popen[bytes]
    first: psutil.Process
    log_path: Path

    @property
    def pid(self) -> int:
        """Process 1, by its number outside."""
        return self.first.pid

    def log(self) -> str:
        """The output of its command so far."""
        return self.log_path.read_text(errors="replace")

    def run(self, command: Sequence[str], timeout_s: float) -> None:
        """Run a command inside, as a kubelet runs a hook."""
        enter = ("nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--pid", "--")
        subprocess.run([*enter, *command], check=True, timeout=timeout_s)

    def processes(self) -> list[psutil.Process]:
        """Every process of the pod, including zombies."""
        try:
            return [self.first, *self.first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def probe(self, spec: Mapping[str, Any], ports: Mapping[str, int]) -> int:
        """The status of one `httpGet` probe, sent as a kubelet sends it; 0: no answer."""
        get = spec["httpGet"]
        url = f"http://{self.address}:{ports[get['port']]}{get['path']}"
        try:
            with urllib.request.urlopen(url, timeout=spec.get("timeoutSeconds", 1)) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def until_ready(self, spec: Mapping[str, Any], ports: Mapping[str, int]) -> None:
        """Probe until it succeeds."""
        deadline = time.monotonic() + 100
        while self.probe(spec, ports) != 200:
            assert self.power.poll() is None, f"{self.name} ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"{self.name} is never ready:\n{self.log()}"
            time.sleep(0.3)


class Pods:
    """A network of pods. Needs root. All pods end with the block."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pods-", dir="/var/tmp"))
        self.folder.chmod(0o755)
        self._tag = secrets.token_hex(3)
        self._net = _free_network()
        self._pods: list[Pod] = []

    def __enter__(self) -> Pods:
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n")
        (self.folder / "resolv.conf").write_text("options timeout:1 attempts:1\n")
        # One home for all, as files go: kernels are compiled once.
        home = self.folder / "home"
        home.mkdir()
        cache = Path.home() / ".cache" / "trimaran"
        if cache.is_dir():
            shutil.copytree(cache, home / ".cache" / "trimaran")
        _run("chown", "-R", f"{USER_ID}:{USER_ID}", str(home))
        (self.folder / "passwd").write_text(
            f"root:x:0:0::/root:/bin/sh\ntrimaran:x:{USER_ID}:{USER_ID}::{home}:/bin/sh\n"
        )
        _run("ip", "link", "add", f"pod{self._tag}", "type", "bridge")
        _run("ip", "addr", "add", f"{self._net}.1/24", "dev", f"pod{self._tag}")
        _run("ip", "link", "set", f"pod{self._tag}", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self._pods:
            # The change of user resets the signal at the parent's death.
            with contextlib.suppress(psutil.NoSuchProcess):
                pod.first.kill()
            pod.power.wait()
        subprocess.run(["ip", "link", "del", f"pod{self._tag}"], stderr=subprocess.DEVNULL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        shm: str,
        domain: str = "",
    ) -> Pod:
        """Run a container's command; other pods resolve its name and ``name.domain``."""
        number = len(self._pods) + 11
        address, home = f"{self._net}.{number}", self.folder / "home"
        scratch = self.folder / f"{name}.tmp"
        scratch.mkdir()
        shutil.chown(scratch, USER_ID, USER_ID)
        with (self.folder / "hosts").open("a") as hosts:
            hosts.write(
                f"{address} {name}.{domain} {name}\n" if domain else f"{address} {name}\n"
            )
        script = _BOOT.format(
            hostname=name, shm=shm, folder=self.folder, home=home, user=USER_ID
        )
        log_path = self.folder / f"{name}.log"
        with log_path.open("wb") as log:
            power = subprocess.Popen(
                ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork",
                 "--mount-proc", "--kill-child", "sh", "-c", script, "sh", *command],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
                env={
                    "PATH": f"{BIN}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                    "HOME": str(home), "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1", **env,
                },
            )  # fmt: skip
        pod = Pod(name, address, power, _child_of(power.pid), log_path)
        self._pods.append(pod)
        self._plug_in(pod, number)
        assert power.stdin is not None
        power.stdin.write(b"go\n")
        power.stdin.close()
        return pod

    def _plug_in(self, pod: Pod, number: int) -> None:
        cable = f"p{self._tag}{number}"
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns",
             str(pod.pid))  # fmt: skip
        _run("ip", "link", "set", cable, "master", f"pod{self._tag}", "up")
        inside = ("nsenter", f"--target={pod.pid}", "--net", "ip")
        _run(*inside, "addr", "add", f"{pod.address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _run(*inside, "link", "set", interface, "up")


def _child_of(pid: int) -> psutil.Process:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(pid).children()
            # Before its exec, the child may not have left unshare's namespaces.
            if children and children[0].name() != "unshare":
                return children[0]
        time.sleep(0.02)
    raise AssertionError("unshare made no process: this needs root")


def _free_network() -> str:
    taken = _run("ip", "-4", "-o", "addr")
    while True:
        net = f"10.{100 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
        if f" {net}." not in taken:
            return net


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout

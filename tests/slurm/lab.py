"""A real Slurm on this machine: munged, slurmctld and several slurmd, each node with a name.

Needs root and Debian's packages; missing packages are installed. All files are below one
folder, and ports are private, so that labs and other Slurm installations do not interfere.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from trimaran.bench.serving.free_ports import free_ports

PROGRAMS = {
    "slurmctld": "slurmctld", "slurmd": "slurmd", "sinfo": "slurm-client", "munged": "munge",
    "unshare": "util-linux", "curl": "curl",
}  # fmt: skip
FILES = {
    "/usr/lib/*/libpmi2.so.0": "libpmi2-0",
    # Slurm's PMIx plug-in opens the library by this name.
    "/usr/lib/*/pmix2/lib/libpmix.so": "libpmix-dev",
}
NUM_CPUS = 8
NUM_GPUS = 2
READY_S = 60.0
GRACE_S = 60
"""A preempted job of partition main may run on for so long."""

LOST_NODE_S = 20
"""A node that is silent for so long is down."""

CONFIG = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=3,sched_min_interval=100000
SwitchType=switch/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=10
CompleteWait=0
MinJobAge=600
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout={lost}
MessageTimeout=20
TCPTimeout=5
PropagateResourceLimits=NONE
GresTypes=gpu
"""
# Each node has a separate host name, hosts file and PMIx folder.
NODE_INIT = """\
#!/bin/sh
node=$1 folder=$2; shift 2
hostname "$node"
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/spool/$node/pmix" "$folder/pmix"
exec "$@"
"""


class SlurmLab:
    """The daemons of one cluster. Use as a context manager: no process outlives the block."""

    def __init__(self, folder: Path, num_nodes: int = 2) -> None:
        self.folder = folder
        self.nodes = [f"n{number + 1}" for number in range(num_nodes)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {**_plain_environ(), "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> SlurmLab:
        install_packages()
        try:
            self._write()
            self._start_munge()
            self._start("slurmctld", ["slurmctld", "-D", "-c", "-f", self._conf])
            for node in self.nodes:
                self.start_node(node)
            self.wait_idle()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_node(self, node: str) -> None:
        """Start a node's daemon, in a host name of its own."""
        command = ["unshare", "--uts", "--mount", str(self.folder / "node-init"), node]
        command += [str(self.folder), "slurmd", "-D", "-N", node, "-f", self._conf]
        self._start(node, command)

    def fail_node(self, node: str) -> None:
        """Kill a node: its daemon and everything that runs there."""
        for process in self.processes_on(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._daemons.pop(node).wait(30)

    def processes_on(self, node: str) -> list[psutil.Process]:
        """The daemon of a node and all processes below it."""
        daemon = psutil.Process(self._daemons[node].pid)
        return [daemon, *_below(daemon, node, self.folder)]

    def run(
        self, *words: str, text: str | None = None, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command against this cluster."""
        return subprocess.run(
            list(words), env=self.env, input=text, capture_output=True, text=True,
            timeout=timeout_s, cwd="/",
        )  # fmt: skip

    def job(self, job_id: str) -> dict[str, str]:
        """Slurm's record of a job, by Slurm's names."""
        done = self.run("scontrol", "--oneliner", "show", "job", job_id)
        assert done.returncode == 0, done.stderr
        pairs = [w.partition("=") for w in done.stdout.splitlines()[0].split() if "=" in w]
        return {name: value for name, _, value in pairs}

    def wait_state(self, job_id: str, *states: str, timeout_s: float = 60) -> dict[str, str]:
        """Wait until a job is in one of these states."""
        deadline = time.monotonic() + timeout_s
        while (job := self.job(job_id))["JobState"] not in states:
            assert time.monotonic() < deadline, f"{states} not reached: {job}"
            time.sleep(0.3)
        return job

    def wait_idle(self, timeout_s: float = READY_S) -> None:
        """Wait until every node can take work."""
        deadline = time.monotonic() + timeout_s
        while True:
            listing = self.run("sinfo", "-h", "-N", "-o", "%N %t").stdout
            if sorted(set(listing.split("\n"))) == ["", *(f"{n} idle" for n in self.nodes)]:
                return
            assert time.monotonic() < deadline, f"{listing}\n{self.logs()}"
            time.sleep(0.3)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        texts = []
        for path in sorted((self.folder / "log").glob("*")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            texts.append("\n".join([f"==== {path.name}", *lines]))
        return "\n".join(texts)

    def close(self) -> None:
        """Cancel all jobs and end every daemon with its descendants."""
        if "slurmctld" in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.run("scancel", "--user=root", "--signal=KILL", timeout_s=20)
                self.run("scancel", "--user=root", timeout_s=20)
        for name in list(self._daemons):
            daemon = self._daemons.pop(name)
            below = []
            with contextlib.suppress(psutil.NoSuchProcess):
                below = _below(psutil.Process(daemon.pid), name, self.folder)
            daemon.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            for process in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()

    # ---- parts --------------------------------------------------------------------------

    @property
    def _conf(self) -> str:
        return str(self.folder / "slurm.conf")

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self.env, start_new_session=True, cwd="/",
            )  # fmt: skip

    def _start_munge(self) -> None:
        munge = self.folder / "munge"
        self._start(
            "munged",
            ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged",
             "--foreground", f"--key-file={munge}/key", f"--socket={munge}/socket",
             f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"],
        )  # fmt: skip
        deadline = time.monotonic() + READY_S
        while not (munge / "socket").is_socket():
            assert time.monotonic() < deadline, "munged did not start"
            time.sleep(0.05)

    def _write(self) -> None:
        folder = self.folder
        for name in ("log", "run", "state", "munge", "dev", "pmix"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for path in (folder, *folder.parents):
            # munged, which is not root, passes through them.
            if path.stat().st_mode & 0o777 == 0o700:
                path.chmod(0o755)
        (folder / "munge" / "key").write_bytes(os.urandom(128))
        (folder / "munge" / "key").chmod(0o400)
        for path in (folder / "munge", folder / "munge" / "key"):
            shutil.chown(path, "munge", "munge")
        ports = free_ports(len(self.nodes) + 1)
        text = CONFIG.format(
            host=socket.gethostname(), port=ports[0], folder=folder, lost=LOST_NODE_S
        )
        for node, port in zip(self.nodes, ports[1:], strict=True):
            (folder / "spool" / node / "pmix").mkdir(parents=True)
            text += (
                f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port} "
                f"CPUs={NUM_CPUS} RealMemory=4096 Gres=gpu:{NUM_GPUS} State=UNKNOWN\n"
            )
        for partition in (
            f"main Default=YES PriorityTier=1 GraceTime={GRACE_S}",
            "urgent PriorityTier=10 PreemptMode=OFF",
        ):
            text += f"PartitionName={partition} Nodes=ALL MaxTime=INFINITE State=UP\n"
        (folder / "slurm.conf").write_text(text)
        devices = f"{folder}/dev/gpu[0-{NUM_GPUS - 1}]"
        for number in range(NUM_GPUS):
            # A device like /dev/null: Slurm only counts and numbers the device.
            os.mknod(folder / "dev" / f"gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
        (folder / "gres.conf").write_text(f"Name=gpu File={devices}\n")
        (folder / "mpi.conf").write_text(f"PMIxCliTmpDirBase={folder}/pmix\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainCores=no\n")
        names = "".join(f"127.0.0.1 {node}\n" for node in self.nodes)
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + names)
        (folder / "node-init").write_text(NODE_INIT)
        (folder / "node-init").chmod(0o755)


def install_packages() -> None:
    """Install missing packages of Slurm, as root on Debian.

    Raises:
        AssertionError: names the missing packages if they cannot be installed.
    """
    wanted = {p for name, p in PROGRAMS.items() if shutil.which(name) is None}
    root = Path("/")
    wanted |= {p for name, p in FILES.items() if not list(root.glob(name.lstrip("/")))}
    if not wanted:
        return
    names = " ".join(sorted(wanted))
    assert os.geteuid() == 0 and shutil.which("apt-get"), f"missing: apt-get install {names}"
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends"]):
        command = ["apt-get", *words, *(sorted(wanted) if words[0] == "install" else [])]
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, timeout=600)


def _below(daemon: psutil.Process, node: str, folder: Path) -> list[psutil.Process]:
    """Processes below a daemon, and the step daemons of the node, which are not."""
    found = {process.pid: process for process in daemon.children(recursive=True)}
    for process in psutil.process_iter(["name"]):
        # They overwrite their command line and environment, but keep the node's log open.
        with contextlib.suppress(psutil.Error, OSError):
            if process.info["name"] == "slurmstepd" and _has_open(
                process, folder / "log" / f"{node}.log"
            ):
                for each in [process, *process.children(recursive=True)]:
                    found[each.pid] = each
    return list(found.values())


def _has_open(process: psutil.Process, path: Path) -> bool:
    fds = Path("/proc", str(process.pid), "fd").iterdir()
    return any(os.readlink(fd) == str(path) for fd in fds)


def _plain_environ() -> dict[str, str]:
    """This process's environment without any other Slurm's or MPI job's."""
    prefixes = ("SLURM", "PMI", "OMPI_COMM", "OMPI_UNIVERSE", "PRTE_")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}

"""The specification of a batch job: options for Slurm, and flags for the server in it."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.flag_values import count, port, positive
from trimaran.comm.topology import MAX_RANKS

TEMPLATES = {
    "leader": "one model on one node",
    "leader-multinode": "one model over several nodes",
    "orchestrator": "several models, each with workers of its own",
    "replicas": "an array of servers of one model",
}
ENDPOINTS = ("http", "grpc", "metrics")
MAX_PORT = 65535
PORT_SHIFT = 10
"""Ports of a replica behind those of the one before it."""

MAX_DRAIN_S = 65535
"""Longest time between Slurm's signal and its kill: sbatch refuses more."""

MAX_EXIT_SHARE = 0.8
"""Part of the time between Slurm's signal and its kill that the drain may take."""

RARE = (
    "account", "qos", "mem", "constraint", "reservation", "cpus_per_task", "grpc_port",
    "metrics_port", "max_requeues", "mpi", "container_mounts", "job_name",
)  # fmt: skip
"""Flags that the short help leaves out."""

_FREE_OPTIONS = ("partition", "account", "qos", "time", "mem", "constraint", "reservation")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The values that fill a template."""

    template: str
    name: str
    nodes: int
    world_size: int
    tasks_per_node: int
    cpus_per_task: int | None
    gpus_per_node: int
    num_replicas: int
    """Tasks of the array; 0 without one."""

    options: tuple[tuple[str, str], ...]
    """Slurm's options that only pass through, by name."""

    sbatch_lines: tuple[str, ...]
    log_dir: str
    drain_s: int
    """Seconds before the time limit at which Slurm asks the server to end."""

    max_requeues: int
    setup: tuple[str, ...]
    """Shell lines before the server starts, such as `module load`."""

    model_repo: str
    http_port: int
    grpc_port: int
    metrics_port: int
    serve_flags: tuple[str, ...]
    mpi: str
    container_image: str
    container_mounts: str

    @property
    def exit_timeout_s(self) -> int:
        """Longest drain of the server."""
        return max(1, int(self.drain_s * MAX_EXIT_SHARE))

    @property
    def job_variable(self) -> str:
        """The job's own id, in the script's words."""
        if self.num_replicas:
            return "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
        return "$SLURM_JOB_ID"

    @property
    def run_name(self) -> str:
        """The name of the folder of this job's logs, in the script's words."""
        return f'"{self.name}-{self.job_variable}"'

    @classmethod
    def from_args(
        cls, args: argparse.Namespace, endpoints: Sequence[str] = ENDPOINTS
    ) -> JobSpec:
        """The job that the flags describe; ``endpoints`` are those that its server opens.

        Raises:
            ConfigError: they contradict each other.
        """
        _check_words(args)
        _check_shape(args)
        _check_ports(args, [f"{name}_port" for name in endpoints])
        return cls(
            template=args.template,
            name=args.job_name,
            nodes=args.nodes,
            world_size=args.world_size,
            tasks_per_node=-(-args.world_size // args.nodes),
            cpus_per_task=args.cpus_per_task,
            gpus_per_node=args.gpus_per_node,
            num_replicas=(args.replicas or 1) if args.template == "replicas" else 0,
            options=tuple(
                (name, getattr(args, name)) for name in _FREE_OPTIONS if getattr(args, name)
            ),
            sbatch_lines=tuple(args.sbatch),
            log_dir=os.path.abspath(args.log_dir),
            drain_s=args.drain_seconds,
            max_requeues=args.max_requeues,
            setup=tuple(args.setup),
            model_repo=os.path.abspath(args.model_repo),
            http_port=args.http_port,
            grpc_port=args.grpc_port,
            metrics_port=args.metrics_port,
            serve_flags=split_flags(args.serve_flags),
            mpi=args.mpi,
            container_image=args.container_image,
            container_mounts=args.container_mounts,
        )


def split_flags(flags: str) -> tuple[str, ...]:
    """The words of ``--serve-flags``; raises ConfigError."""
    try:
        return tuple(shlex.split(flags))
    except ValueError as error:
        raise ConfigError(
            f"--serve-flags {flags!r}: {error}. Quote it as in a shell."
        ) from None


def _check_shape(args: argparse.Namespace) -> None:
    """Refuse nodes, ranks and GPUs that do not go together."""
    if args.world_size > MAX_RANKS + 1:
        raise ConfigError(
            f"--world-size is {args.world_size}, but at most {MAX_RANKS} ranks and an "
            "orchestrator's place make one job. Lower it."
        )
    if args.nodes > 1 and args.template in ("leader", "replicas"):
        raise ConfigError(
            f"--nodes is {args.nodes} but template {args.template} runs on one node. "
            "Choose --template leader-multinode or orchestrator."
        )
    if args.nodes > 1 and args.container_image and args.template == "orchestrator":
        raise ConfigError(
            f"--nodes is {args.nodes} but inside a container groups of workers start on "
            "their own node only. Leave out --container-image, or serve one model."
        )
    if args.world_size % args.nodes and args.template == "leader-multinode":
        raise ConfigError(
            f"--world-size {args.world_size} ranks do not spread evenly over {args.nodes} "
            "nodes. Change one of the two."
        )
    if args.template != "replicas" and args.replicas:
        raise ConfigError(
            f"--replicas {args.replicas} goes with --template replicas, not {args.template}"
        )
    _check_container(args)
    if args.drain_seconds > MAX_DRAIN_S:
        raise ConfigError(
            f"--drain-seconds is {args.drain_seconds} but Slurm signals {MAX_DRAIN_S} s before "
            "the end at most. Lower it."
        )
    per_node = -(-args.world_size // args.nodes)
    if 0 < args.gpus_per_node < per_node:
        raise ConfigError(
            f"--gpus-per-node {args.gpus_per_node} is less than the {per_node} ranks of a "
            "node, and each needs a GPU. Raise it, or serve on more nodes."
        )


def _check_container(args: argparse.Namespace) -> None:
    """Refuse flags that have no effect without a container, or in another one."""
    if args.container_mounts and not args.container_image:
        raise ConfigError(
            f"--container-mounts {args.container_mounts} has no effect without "
            "--container-image: name that too, or leave it out"
        )
    if args.mpi != "pmix" and not (
        args.container_image and args.template == "leader-multinode"
    ):
        raise ConfigError(
            f"--mpi {args.mpi} is for --template leader-multinode with --container-image; "
            "elsewhere the plug-in is chosen by the library that mpi4py loads. Leave it out."
        )


def _check_ports(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuse ports that two servers on a node would share, or that do not exist."""
    reach = PORT_SHIFT * max(args.replicas - 1, 0)
    for name, port_ in ((name, getattr(args, name)) for name in names):
        if port_ + reach > MAX_PORT:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {port_} and the last of {args.replicas} "
                f"replicas would get {port_ + reach}, {PORT_SHIFT} more for each, but ports "
                f"end at {MAX_PORT}. Lower it, or submit fewer replicas."
            )
    for one, other in itertools.combinations(names, 2):
        gap = abs(getattr(args, one) - getattr(args, other))
        if not gap:
            raise ConfigError(
                f"--{one.replace('_', '-')} and --{other.replace('_', '-')} are both "
                f"{getattr(args, one)}. Name another port for one of them."
            )
        if gap <= reach and gap % PORT_SHIFT == 0:
            raise ConfigError(
                f"--{one.replace('_', '-')} {getattr(args, one)} and "
                f"--{other.replace('_', '-')} {getattr(args, other)}: replicas on a node are "
                f"{PORT_SHIFT} ports apart, so one would get a port of another. Name ports "
                f"that do not differ by a multiple of {PORT_SHIFT}."
            )


def _check_words(args: argparse.Namespace) -> None:
    """Refuse values that Slurm would read differently."""
    if not args.model_repo:
        raise ConfigError("--model-repo DIR is missing: the model repository to serve")
    for name in ("job_name", *_FREE_OPTIONS):
        value = getattr(args, name)
        if re.search(r"[\s\"'$`\\;#]", value):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} {value!r}: spaces, quotes and #, which ends a line for Slurm, cannot "
                "be written there"
            )
    if "/" in args.job_name or not args.job_name:
        raise ConfigError(
            f"--job-name {args.job_name!r}: logs have it in their names. Name it without /."
        )
    for line in args.sbatch:
        if not re.fullmatch(r"-\S.*", line):
            raise ConfigError(
                f"--sbatch {line!r}: Slurm takes a line of options that begins with -, and "
                "reads none behind another line. Name --sbatch once for each line."
            )
    if re.search(r"[%\"\\\n]|\s#", args.log_dir):
        raise ConfigError(
            f"--log-dir {args.log_dir!r}: Slurm gives % a meaning in file names, a # behind a "
            "space ends a line, and quotes and backslashes cannot be written there. Choose "
            "another folder."
        )


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that `JobSpec.from_args` reads."""
    add = parser.add_argument
    add("--template", default="leader", choices=tuple(TEMPLATES), help="kind of job (leader)")
    add("--model-repo", default="", metavar="DIR", help="model repository, on every node")
    add("--world-size", type=positive, default=1, metavar="N", help="ranks in all (1)")
    add("--nodes", type=positive, default=1, metavar="N", help="nodes of the job (1)")
    add("--replicas", type=positive, default=0, metavar="N", help="servers of the array")
    add("--gpus-per-node", type=count, default=0, metavar="N", help="0: serve on the CPU (0)")
    add("--cpus-per-task", type=positive, metavar="N", help="Slurm's --cpus-per-task")
    for name in _FREE_OPTIONS:
        add(f"--{name}", default="", metavar="X", help=f"Slurm's --{name}")
    add("--sbatch", action="append", default=[], metavar="LINE", help="more #SBATCH options")
    add("--setup", action="append", default=[], metavar="LINE", help="shell line run first")
    add("--job-name", default="trimaran", metavar="NAME", help="also of logs (trimaran)")
    add("--log-dir", default="trimaran-logs", metavar="DIR",
        help="logs, on every node (trimaran-logs)")  # fmt: skip
    add("--http-port", type=port, default=8000, metavar="P", help="HTTP port (8000)")
    add("--grpc-port", type=port, default=8001, metavar="P", help="gRPC port (8001)")
    add("--metrics-port", type=port, default=8002, metavar="P", help="metrics port (8002)")
    add("--serve-flags", default="", metavar="FLAGS", help="more flags of trimaran serve")
    add("--drain-seconds", type=positive, default=60, metavar="S", help="time to finish (60)")
    add("--max-requeues", type=count, default=3, metavar="N", help="after failures (3)")
    add("--mpi", default="pmix", choices=("pmix", "pmi2"), help="plug-in in containers (pmix)")
    add("--container-image", default="", metavar="IMAGE", help="run in it (Pyxis, Enroot)")
    add("--container-mounts", default="", metavar="MOUNTS", help="Pyxis' --container-mounts")

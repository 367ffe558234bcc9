"""`trimaran slurm`: render a batch script, submit it, stop its job."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.flag_values import seconds
from trimaran.slurm import queue
from trimaran.slurm.job_spec import ENDPOINTS, PORT_SHIFT, RARE, JobSpec, add_job_arguments

__all__ = ["add_arguments", "run"]

EXIT_FAILURE = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of all three actions."""
    parser.usage = "%(prog)s render|submit [flags] | %(prog)s stop JOB"
    add = parser.add_argument
    add(
        "action", choices=("render", "submit", "stop"),
        help="write the batch script, submit it, or stop its job",
    )  # fmt: skip
    add("job", nargs="?", default="", help="id of the job to stop")
    add_job_arguments(parser)
    add("--output", default="", metavar="FILE", help="write the script there")
    hide, take_flags = getattr(parser, "hide", None), getattr(parser, "take_flags", None)
    if hide is not None and take_flags is not None:
        hide(*RARE)
        take_flags("--serve-flags", "--sbatch")
    add(
        "--wait", type=seconds, default=600.0, metavar="S", help="wait so long; 0: do not (600)"
    )  # fmt: skip


def run(args: argparse.Namespace, endpoints: Sequence[str] = ENDPOINTS) -> int:
    """Do one action; the exit code. The server of a job opens ``endpoints``."""
    if args.action == "stop":
        return _stop(args)
    if args.job:
        raise ConfigError(f"{args.action} takes flags only, not {args.job!r}")
    job = JobSpec.from_args(args, endpoints)
    script = render(job)
    if args.action == "render":
        _write(script, args.output)
        return 0
    return _submit(job, script, args)


def _write(script: str, path: str) -> None:
    if not path:
        print(script, end="")
        return
    try:
        # A path may hold bytes that are no UTF-8.
        Path(path).write_text(script, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from None


def _make_folder(path: str) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--log-dir {path}: {error.strerror}. Name a folder that can be made on every node."
        ) from None


def _submit(job: JobSpec, script: str, args: argparse.Namespace) -> int:
    """Check with Slurm, submit, and print the endpoints once every server is ready."""
    if args.output:
        _write(script, args.output)
    _make_folder(job.log_dir)
    print(queue.test_only(script))
    job_id = queue.submit(script)
    print(f"Job {job_id} is submitted; its logs go to {job.log_dir}.")
    names = (
        [f"{job_id}_{task}" for task in range(job.num_replicas)]
        if job.num_replicas
        else [job_id]
    )
    if args.wait <= 0:
        return 0
    folders = {name: Path(job.log_dir, f"{job.name}-{name}") for name in names}
    found = queue.wait_ready(job_id, folders, args.wait)
    for name, endpoints in found.items():
        print(f"Ready: {name}")
        for title, url in endpoints.items():
            print(f"  {title:<8} {url}")
    return 0


def _stop(args: argparse.Namespace) -> int:
    if not args.job:
        raise ConfigError("slurm stop: the job's id is missing: trimaran slurm stop JOB")
    queue.drain(args.job)
    if args.wait <= 0:
        return 0
    state = queue.wait_over(args.job, args.wait)
    print(f"Job {args.job}: {state}")
    return 0 if state == "COMPLETED" else EXIT_FAILURE


def render(job: JobSpec) -> str:
    """The batch script of a job."""
    environment = Environment(
        loader=PackageLoader("trimaran.slurm", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # a shell script; values are quoted where the shell reads them
    )
    environment.filters["quote"] = shlex.quote
    template = environment.get_template(f"{job.template.replace('-', '_')}.sbatch")
    return template.render(job=job, port_shift=PORT_SHIFT)

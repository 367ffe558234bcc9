"""`trimaran slurm`, which checks the server's flags before the job is queued."""

from __future__ import annotations

import argparse

from trimaran.comm.errors import ConfigError
from trimaran.launcher.cli.main import parser_of
from trimaran.slurm import commands
from trimaran.slurm.commands import add_arguments
from trimaran.slurm.job_spec import ENDPOINTS, split_flags

__all__ = ["add_arguments", "run"]

_FIXED = {
    "model_repo": "Name it with trimaran slurm --model-repo",
    "world_size": "Name it with trimaran slurm --world-size",
    **{f"{name}_port": f"Name it with trimaran slurm --{name}-port" for name in ENDPOINTS},
    "ready_file": "It is ready.json in the folder of the job's logs",
}
"""Flags of the server that the script sets, and the remedy if they are given again."""


def run(args: argparse.Namespace) -> int:
    """Do one action; the exit code. Exits with 2 if `serve` has no such flag.

    Raises:
        ConfigError: the flags of `serve` and those of the job contradict each other.
    """
    parser = parser_of("serve")
    parser.set_defaults(**dict.fromkeys(_FIXED))
    # A run file in these flags may exist on the job's nodes alone: it is not read here.
    serve = parser.parse_words(split_flags(args.serve_flags))
    for name, remedy in _FIXED.items():
        # In orchestrator mode only the server's own flags may set the world size.
        is_set = name != "world_size" or args.template != "orchestrator"
        if is_set and getattr(serve, name) is not None:
            raise ConfigError(
                f"--serve-flags: --{name.replace('_', '-')} {getattr(serve, name)} would "
                f"overrule the script's value. {remedy}."
            )
    return commands.run(args, [name for name in ENDPOINTS if getattr(serve, f"allow_{name}")])

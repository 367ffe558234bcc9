"""`trimaran slurm`, which learns of a misspelt flag of the server before a job has queued."""

from __future__ import annotations

import argparse

from trimaran.launcher.cli import parser_of
from trimaran.slurm import commands
from trimaran.slurm.commands import add_arguments
from trimaran.slurm.job_spec import ENDPOINTS, split_flags

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Do one action; the exit code. Ends with 2 where `serve` knows no such flag."""
    # A run file of theirs may be on the job's nodes alone: it is not read here.
    serve = parser_of("serve").parse_words(split_flags(args.serve_flags))
    return commands.run(args, [name for name in ENDPOINTS if getattr(serve, f"allow_{name}")])

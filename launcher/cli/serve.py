"""`trimaran serve`: flags in, a checked configuration out, the supervisor run."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys

from trimaran.comm.errors import ConfigError
from trimaran.comm.log import setup_logging
from trimaran.launcher.flags.serve_flags import add_arguments
from trimaran.launcher.placement import preflight
from trimaran.launcher.placement.job import abort_job, become_rank
from trimaran.launcher.resolution import settings
from trimaran.launcher.resolution.access import forget_secrets, open_port_warnings
from trimaran.launcher.resolution.resolver import Resolver
from trimaran.launcher.starters.mpi_launch import check_library, library_version
from trimaran.launcher.supervisor.group_specs import Programs
from trimaran.launcher.supervisor.supervisor import EXIT_CONFIG, supervise

__all__ = ["add_arguments", "run"]

logger = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; the exit code.

    0 after a drain, 1 when serving failed, 2 for a faulty configuration.
    """
    setup_logging("supervisor", log_format=args.log_format)
    # The front end logs ineffective settings of the repository; logging them once is enough.
    repository_log = logging.getLogger("trimaran.server")
    level = repository_log.level
    repository_log.setLevel(logging.ERROR)
    try:
        return _serve(args)
    finally:
        repository_log.setLevel(level)


def _serve(args: argparse.Namespace) -> int:
    settings.apply_environment(args, os.environ)
    job = settings.job_of(args)
    if job is not None and job.rank > 0:
        become_rank(Programs.installed().rank)
    try:
        resolver = Resolver(args, job)
        config = resolver.initial()
        forget_secrets(args, os.environ)
        setup_logging(
            "supervisor",
            log_format=config.log.format,
            level=config.log.level,
            directory=config.log.dir,
        )
        preflight.check(config)
        mpi = resolver.mpi if resolver.needs_mpi else None
        if mpi is not None:
            check_library(mpi)
        elif resolver.launch.kind == "none":
            library_version()  # a rank without mpirun is a world of one, but loads MPI
        programs = Programs.installed()
    except ConfigError as error:
        if job is None:
            raise
        # Printed before the abort, which may end this task too.
        with contextlib.suppress(OSError):
            print(f"trimaran: error: {error}", file=sys.stderr, flush=True)
        abort_job()
        return EXIT_CONFIG
    for note in config.notes:
        logger.info("%s", note)
    for warning in open_port_warnings(config.frontend):
        logger.warning("%s", warning)
    for line in config.picture.splitlines():
        logger.info("%s", line)
    return supervise(config, mpi, programs, resolver)

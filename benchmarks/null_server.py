"""`trimaran serve` with `null_engine.py` in place of each rank; takes the flags of serve."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trimaran.comm.log import setup_logging
from trimaran.launcher.flags.serve_flags import add_arguments
from trimaran.launcher.resolution.resolver import Resolver
from trimaran.launcher.supervisor.group_specs import Programs
from trimaran.launcher.supervisor.supervisor import supervise


def main() -> int:
    """Serve until a stop signal."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    setup_logging("supervisor")
    resolver = Resolver(parser.parse_args(), None)
    programs = Programs(
        # Started as modules: the package may be an uninstalled tree of an earlier commit.
        frontend=(sys.executable, "-m", "trimaran.server.main"),
        rank=(sys.executable, str(Path(__file__).with_name("null_engine.py"))),
    )
    return supervise(resolver.initial(), None, programs, resolver)


if __name__ == "__main__":
    sys.exit(main())

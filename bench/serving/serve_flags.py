"""The flags of `trimaran bench serve`: those of the plain benchmark, and what to sweep."""

from __future__ import annotations

import argparse
import copy

from trimaran.bench.limits.shapes import SHAPES
from trimaran.comm.files.flag_values import positive

_NOT_COPIED = ("help", "config", "workload")


def add_flags(parser: argparse.ArgumentParser, plain: argparse.ArgumentParser) -> None:
    """All flags of ``plain``, which may also stand before the sub-command, and our own."""
    for action in plain._actions:
        if action.option_strings and action.dest not in _NOT_COPIED:
            own = copy.copy(action)
            # What stood before the sub-command holds unless it is named again.
            own.default = argparse.SUPPRESS
            parser._add_action(own)
    add = parser.add_argument
    add("--load", action="append", metavar="ISL/OSLxN", help="N random prompts; repeat")
    add("--rates", type=float, nargs="+", metavar="R", help="arrivals a second; -1: at once")
    add("--concurrencies", type=positive, nargs="+", metavar="N", help="requests in flight")
    add(
        "--runs",
        type=positive,
        default=1,
        metavar="N",
        help="of each point; the median is told (1)",
    )
    add("--gpus", type=positive, default=1, metavar="N", help="of the server (default 1)")
    add("--shape", choices=sorted(SHAPES), help="of the served model, for the limit")
    add("--ceilings-of", metavar="FILE", help="machine's ceilings: a `throughput --output`")
    add("--output", metavar="FILE", help="append results as JSON lines")

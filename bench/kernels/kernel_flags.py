"""The flags of `trimaran bench kernels`."""

from __future__ import annotations

import argparse

from trimaran.bench.limits.shapes import SHAPES
from trimaran.comm.files.flag_values import positive, seconds

AREAS = ("operators", "fp8", "integers", "attention", "elementwise", "sampling")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this sub-command."""
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="llama8b", help="the layer's sizes (llama8b)"
    )
    parser.add_argument(
        "--areas", nargs="+", choices=AREAS, default=["operators"], metavar="NAME",
        help=f"kernels to time: {', '.join(AREAS)} (operators)",
    )  # fmt: skip
    parser.add_argument(
        "--rows", type=positive, nargs="+", default=[1, 64, 256, 1024, 8192], metavar="N",
        help="tokens of a step (1 64 256 1024 8192)",
    )  # fmt: skip
    parser.add_argument(
        "--context",
        type=positive,
        default=1024,
        metavar="N",
        help="tokens of a decode's cache (1024)",
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="of weights and values (bfloat16)",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="where kernels run (cuda)"
    )
    parser.add_argument(
        "--ceiling-seconds", type=seconds, default=3.0, metavar="S",
        help="how long the machine's own limits are measured (3)",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", help="append results as JSON lines")

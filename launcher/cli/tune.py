"""`trimaran tune`: measures which kernels are fastest for one engine on this machine's GPU."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trimaran.bench.limits.shapes import SHAPES
from trimaran.bench.limits.shapes import pretrained_config as pretrained_config_of
from trimaran.builder.progress import ProgressBar
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.flag_values import positive
from trimaran.kernels.tables.tuned_choices import (
    FILE_NAME,
    Tuning,
    TuningKey,
    user_file,
    write_tuning,
)
from trimaran.worker.config.engine_config import ParallelConfig
from trimaran.worker.config.engine_folder import EngineFolder, check_parallel_sizes
from trimaran.worker.config.parallel_sizes import RequestedSizes, expert_sizes, layout_of

if TYPE_CHECKING:
    from trimaran.kernels.tuning.tuner import Measured
    from trimaran.worker.config.pretrained_config import PretrainedConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `trimaran tune`."""
    model = parser.add_mutually_exclusive_group(required=True)
    folder = "an engine folder or a Hugging Face folder"
    model.add_argument("--engine", "--engine-dir", type=Path, metavar="DIR", help=folder)
    model.add_argument("--shape", choices=sorted(SHAPES), help="a well-known shape instead")
    add = parser.add_argument
    add("--tp-size", type=positive, metavar="N", help="as in `serve` (1, or the folder's)")
    add("--moe-ep-size", type=positive, metavar="N", help="as in `serve`")
    rows = "rows of products, as many as sequences decode at once (512)"
    add("--max-rows", type=positive, default=512, metavar="N", help=rows)
    tokens = "tokens of a step with experts (8192)"
    add("--max-tokens", type=positive, default=8192, metavar="N", help=tokens)
    add("--cuts", type=positive, default=6, metavar="N", help="tile shapes to time (6)")
    output = f"where choices go (DIR/{FILE_NAME}, or the user's cache if DIR is not writable)"
    add("--output", type=Path, metavar="FILE", help=output)


def run(args: argparse.Namespace) -> int:
    """Measure and write the choices. Returns the exit code.

    Raises:
        ConfigError: there is no GPU here whose kernels have choices, or nothing to choose.
    """
    began = time.monotonic()
    config, parallel = _model_of(args)
    # Imported here, because torch takes a second and a CPU has no Triton.
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "torch finds no GPU here: run trimaran tune on the machine that serves"
        )
    from trimaran.kernels.cuda.hopper_gemm import can_multiply
    from trimaran.kernels.tuning.tuner import Tuner
    from trimaran.worker.models.registry import dtype_by_name
    from trimaran.worker.models.tunable import Tunable

    device, dtype = torch.device("cuda", 0), dtype_by_name(config.dtype)
    card = torch.cuda.get_device_name(device)
    if not can_multiply(device, dtype):
        raise ConfigError(
            f"there is no choice of kernels for {config.dtype} on {card}: tune bfloat16 or "
            "float16 on a GPU of compute capability 9.0"
        )
    tunable = Tunable.of(config, parallel)
    tuner = Tuner(
        device, dtype, tunable.products, tunable.mixtures,
        max_rows=args.max_rows, max_tokens=args.max_tokens, num_cuts=args.cuts,
    )  # fmt: skip
    with torch.inference_mode(), ProgressBar(tuner.num_steps, counts_bytes=False) as bar:
        products, experts = tuner.run(bar.show)
    path = _output_of(args)
    write_tuning(path, Tuning(TuningKey.of(card), products, experts))
    for line in _told(tuner.measured):
        print(line)
    print(
        f"trimaran tune: {len(products)} products and {len(experts)} products of experts on "
        f"{card} in {time.monotonic() - began:.0f} s: {path}"
    )
    return 0


def _model_of(args: argparse.Namespace) -> tuple[PretrainedConfig, ParallelConfig]:
    """The model's sizes, and the layout of its ranks."""
    if args.engine is not None:
        requested = RequestedSizes(
            tp_size=args.tp_size or 0, moe_ep_size=args.moe_ep_size or -1
        )
        folder = EngineFolder.load(args.engine, check_weights=False)
        return folder.config, layout_of(requested, folder)
    config = pretrained_config_of(args.shape)
    return config, _free_layout(config, args)


def _free_layout(config: PretrainedConfig, args: argparse.Namespace) -> ParallelConfig:
    tp_size, parts = args.tp_size or 1, args.moe_ep_size or -1
    moe_tp_size, moe_ep_size = expert_sizes(-1, parts, tp_size, 1)
    layout = ParallelConfig(tp_size=tp_size, moe_tp_size=moe_tp_size, moe_ep_size=moe_ep_size)
    check_parallel_sizes(config, tp_size, 1, layout.expert_parts)
    return layout


def _output_of(args: argparse.Namespace) -> Path:
    """The file to write: the flag's, the folder's, or the one of the user's cache."""
    if args.output is not None:
        return Path(args.output)
    if args.engine is not None and os.access(args.engine, os.W_OK):
        return Path(args.engine, FILE_NAME)
    return user_file()


def _told(measured: list[Measured]) -> list[str]:
    """A line for each weight: the rows with another kernel than by rule, and both times."""
    lines: dict[str, list[str]] = {}
    for each in measured:
        found = lines.setdefault(each.name, [])
        if each.numbers is not None:
            found.append(
                f"{each.rows}: {each.derived_us:.1f} to {each.best_us:.1f} us "
                f"{list(each.numbers)}"
            )
    return [
        f"{name}, rows: {'; '.join(found) or 'as by rule'}" for name, found in lines.items()
    ]

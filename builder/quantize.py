"""``trimaran quantize``: a Hugging Face folder of floats in, one with FP8 weights out."""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

from trimaran.builder.foreign_flags import FlagSink
from trimaran.builder.stop_signals import run_stoppable
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_folder import EngineFolder, FolderKind
from trimaran.worker.config.quantization import LOAD_METHODS


def add_arguments(parser: FlagSink) -> None:
    """Declare the flags of ``trimaran quantize``."""
    parser.add_argument("--checkpoint", "--model-dir", type=Path, required=True, metavar="DIR",
                        help="a Hugging Face folder in safetensors")  # fmt: skip
    parser.add_argument("--output", "--output-dir", type=Path, required=True, metavar="DIR",
                        help="a new folder")  # fmt: skip
    parser.add_argument("--quantization", choices=LOAD_METHODS, default=LOAD_METHODS[0],
                        help="a scale a row, or one for 128x128 (fp8)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Write one quantized folder. Returns the exit code."""
    return run_stoppable("quantize", partial(_quantize, args))


def _quantize(args: argparse.Namespace) -> int:
    began = time.monotonic()
    source = EngineFolder.load(args.checkpoint)
    if source.kind is not FolderKind.HUGGINGFACE:
        raise ConfigError(
            f"{args.checkpoint}: holds the shards of ranks. Name the Hugging Face folder."
        )
    source = source.quantized(args.quantization)
    from trimaran.builder.quantized_folder import QuantizedFolder  # imports torch

    folder = QuantizedFolder(source, args.quantization)
    folder.write(args.output)
    print(
        f"trimaran quantize: wrote {args.output}: {folder.num_quantized} weights in FP8, "
        f"{folder.num_bytes / 2**20:.1f} MiB, {time.monotonic() - began:.1f} s"
    )
    return 0

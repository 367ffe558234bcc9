"""The flags by which TensorRT-LLM's conversion scripts ask for SmoothQuant."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimaran.builder.foreign_flags import FlagSink, say_harmless
from trimaran.builder.quantization.smoothing_strength import strength_of
from trimaran.builder.settings import load_source
from trimaran.builder.weight_only_flags import (
    check_calibrated,
    checkpoint_of,
    is_on,
    quantization_name,
)
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_folder import EngineFolder

_FLAG = "--smoothquant"


def add_smoothquant_flags(parser: FlagSink) -> None:
    """Declare the flags."""
    parser.add_argument(_FLAG, "-sq", metavar="A",
                        help="INT8 weights and inputs, smoothed with this strength by the text "
                        "of --calib_dataset")  # fmt: skip
    parser.add_argument("--per_channel", nargs="?", const="enable", metavar="X",
                        help="with --smoothquant: a scale for each row")  # fmt: skip
    parser.add_argument("--per_token", nargs="?", const="enable", metavar="X",
                        help="with --smoothquant: a scale for each token")  # fmt: skip
    parser.hide("smoothquant", "per_channel", "per_token")


def reads_text(args: argparse.Namespace) -> bool:
    """Whether the flags ask for SmoothQuant, which reads the text of ``--calib_dataset``."""
    return strength_of(_FLAG, args.smoothquant) > 0


@contextmanager
def checkpoint_source(args: argparse.Namespace) -> Iterator[EngineFolder]:
    """The checkpoint that the flags name, quantized as they ask.

    SmoothQuant writes the quantized weights of the whole model into a folder beside
    ``--output`` that is removed at the end.

    Raises:
        ConfigError: flags contradict each other, or the checkpoint does not fit them.
    """
    if not reads_text(args):
        say_harmless([f"--{each}" for each in ("per_channel", "per_token")
                      if getattr(args, each) is not None])  # fmt: skip
        source = load_source(checkpoint_of(args), quantization_name(args))
        check_calibrated(args, source)
        yield source
        return
    _check_alone(args)
    from trimaran.builder.quantization.smoothquant import (  # imports torch
        CalibrationText,
        SmoothQuant,
        write_smoothed,
    )

    source = load_source(checkpoint_of(args), "none")
    how = SmoothQuant(
        strength=strength_of(_FLAG, args.smoothquant),
        has_row_scales=is_on(args.per_channel),
        has_token_scales=is_on(args.per_token),
    )
    text = CalibrationText("--calib_dataset", args.calib_dataset, args.calib_size)
    with _folder_beside(args.output) as folder:
        yield write_smoothed(source, how, text, folder / "smoothed")


def _check_alone(args: argparse.Namespace) -> None:
    flag = f"{_FLAG} {args.smoothquant}"
    if args.calib_dataset is None:
        raise ConfigError(
            f"{flag}: measures the inputs of products on a text. Add --calib_dataset FILE, a "
            "text that resembles the requests, or name a W8A8 folder of compressed-tensors as "
            "--checkpoint."
        )
    name = quantization_name(args)
    if name != "none" or is_on(args.use_weight_only):
        other = "--use_weight_only" if is_on(args.use_weight_only) else f"--quantization {name}"
        raise ConfigError(
            f"{flag} and {other} quantize the same weights. Leave one of them out."
        )


@contextmanager
def _folder_beside(output: Path) -> Iterator[Path]:
    output = Path(os.path.realpath(output))
    # Nothing lies beside a mount point on the same disk.
    parent = None if os.path.ismount(output) else output.parent
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.smoothed.", dir=parent))
    except OSError as error:
        raise ConfigError(
            f"{output}: no folder can be made beside it: {error.strerror or error}. Name "
            "another --output."
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

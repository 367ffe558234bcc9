"""The flags by which TensorRT-LLM's conversion scripts ask for SmoothQuant."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trimaran.builder.foreign_flags import FlagSink, say_harmless
from trimaran.builder.output_folder import folder_of_sources
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


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """The checkpoint of a build, quantized as the flags ask."""

    outline: EngineFolder
    """Its configuration and the headers of its files, which are all that checks read."""

    make: Callable[[], EngineFolder] | None = None
    """Makes the checkpoint with its tensors; None if ``outline`` has them. To be called inside
    `replaced_folder`."""

    def with_tensors(self) -> EngineFolder:
        """The checkpoint with its tensors."""
        return self.outline if self.make is None else self.make()


@contextmanager
def source_checkpoint(args: argparse.Namespace) -> Iterator[SourceCheckpoint]:
    """The checkpoint that the flags name.

    SmoothQuant makes the quantized weights of the whole model in the `folder_of_sources` of
    ``--output``.

    Raises:
        ConfigError: flags contradict each other, or the checkpoint does not fit them.
    """
    if not reads_text(args):
        say_harmless([f"--{each}" for each in ("per_channel", "per_token")
                      if getattr(args, each) is not None])  # fmt: skip
        source = load_source(checkpoint_of(args), quantization_name(args))
        check_calibrated(args, source)
        yield SourceCheckpoint(source)
        return
    _check_alone(args)
    from trimaran.builder.quantization.smoothquant import (  # imports torch
        CalibrationText,
        SmoothQuant,
        kept_smoothed,
        write_outline,
    )

    source = load_source(checkpoint_of(args), "none")
    how = SmoothQuant(
        strength=strength_of(_FLAG, args.smoothquant),
        has_row_scales=is_on(args.per_channel),
        has_token_scales=is_on(args.per_token),
    )
    text = CalibrationText("--calib_dataset", args.calib_dataset, args.calib_size)
    with tempfile.TemporaryDirectory(prefix="trimaran-outline-") as folder:
        outline = write_outline(source, how, text, Path(folder) / "smoothed")
        made = partial(kept_smoothed, source, how, text, folder_of_sources(args.output))
        yield SourceCheckpoint(outline, made)


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

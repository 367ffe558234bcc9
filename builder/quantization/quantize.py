"""``trimaran quantize``: a Hugging Face folder of floats in, one with quantized weights out."""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trimaran.builder.foreign_flags import FlagSink
from trimaran.builder.quantization.calibration_text import (
    NUM_SEQUENCES,
    SEQUENCE_TOKENS,
    check_calibration,
)
from trimaran.builder.quantization.smoothing_strength import DEFAULT_STRENGTH, strength_of
from trimaran.builder.stop_signals import run_stoppable
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.flag_values import positive
from trimaran.worker.config.engine_folder import EngineFolder, FolderKind
from trimaran.worker.config.quantization import LOAD_METHODS

if TYPE_CHECKING:
    from trimaran.builder.quantization.quantized_folder import QuantizedFolder


def add_arguments(parser: FlagSink) -> None:
    """Declare the flags of ``trimaran quantize``."""
    parser.add_argument("--checkpoint", "--model-dir", type=Path, required=True, metavar="DIR",
                        help="a Hugging Face folder in safetensors")  # fmt: skip
    parser.add_argument("--output", "--output-dir", type=Path, required=True, metavar="DIR",
                        help="a new folder")  # fmt: skip
    parser.add_argument("--qformat", metavar="NAME",
                        help="TensorRT-LLM's fp8, int8_wo, int4_wo, int4_awq or "
                        "int8_sq")  # fmt: skip
    parser.add_argument("--quantization", choices=LOAD_METHODS,
                        help="FP8, or integers of 8 or 4 bits (fp8)")  # fmt: skip
    parser.add_argument("--calib", "--calib_dataset", "--calib-dataset", metavar="FILE",
                        help="text to whose inputs the weights are fitted")  # fmt: skip
    parser.add_argument("--calib_size", "--calib-size", type=positive, metavar="N",
                        help=f"sequences of {SEQUENCE_TOKENS} tokens that are read "
                        f"({NUM_SEQUENCES})")  # fmt: skip
    parser.add_argument("--auto_quantize_bits", "--auto-quantize-bits", type=float,
                        metavar="BITS", help="most bits of a weight in the mean: with --calib "
                        "the most sensitive layers stay floats")  # fmt: skip
    parser.add_argument("--smoothquant", metavar="A",
                        help="strength of --qformat int8_sq: above 0, at most 1 "
                        f"({DEFAULT_STRENGTH})")  # fmt: skip


_FITTED = "int4_awq"
"""A format whose weights are fitted to a text."""

_SMOOTHED = "int8_sq"
"""A format of INT8 weights and inputs, whose outliers a text shows."""

_ROUNDED = "w8a8_int8"
"""A scheme of `_SMOOTHED` numbers that are rounded to the nearest, without a text."""

_QFORMATS = {"fp8": "fp8", "int8_wo": "int8", "int4_wo": "int4", _FITTED: "int4"}


def _scheme_name(args: argparse.Namespace) -> str:
    """The scheme that the flags name.

    Raises:
        ConfigError: --qformat names a format that is not made here, the two flags differ, or
            a text would have no effect.
    """
    form = args.qformat
    name: str | None = args.quantization
    if form is None:
        if name == _ROUNDED and args.calib is not None:
            raise ConfigError(
                f"--quantization {name} rounds to the nearest and reads no text, but --calib "
                f"is {args.calib}. Name --qformat {_SMOOTHED}, which smooths by the text."
            )
        return name or LOAD_METHODS[0]
    if form not in _QFORMATS:
        made = ", ".join((*_QFORMATS, _SMOOTHED))
        raise ConfigError(f"--qformat {form}: such weights are not made here. Made are {made}.")
    if form == _FITTED and args.calib is None:
        raise ConfigError(
            f"--qformat {form}: such weights are fitted to a text. Add --calib FILE, or name "
            "int4_wo."
        )
    meant = _QFORMATS[form]
    if name not in (None, meant):
        raise ConfigError(
            f"--qformat {form} means --quantization {meant}, but --quantization is {name}. "
            "Leave one of them out."
        )
    return meant


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
    if args.qformat == _SMOOTHED:
        _write(args, _smoothed(args, source), began)
        return 0
    if args.smoothquant is not None:
        raise ConfigError(
            f"--smoothquant {args.smoothquant}: is the strength of --qformat {_SMOOTHED}. Name "
            "that format, or leave the flag out."
        )
    floats = source.config
    source = source.quantized(_scheme_name(args))
    if floats.quantization is not None:
        raise ConfigError(
            f"{args.checkpoint}: asks for a KV cache of {floats.kv_cache_quant_algo} in the "
            "section that describes quantized weights, which would be replaced. Build or serve "
            "the folder with --quantization."
        )
    from trimaran.builder.quantization.quantized_folder import QuantizedFolder  # imports torch

    if args.calib is not None:
        check_calibration("--calib", args.calib, source)
    elif args.calib_size is not None:
        raise ConfigError("--calib_size counts sequences of a text. Add --calib FILE.")
    elif args.auto_quantize_bits is not None:
        raise ConfigError(
            "--auto_quantize_bits compares predictions of a text. Add --calib FILE."
        )
    folder, bits = QuantizedFolder(source), args.auto_quantize_bits
    if args.calib is not None:
        kept = folder.calibrate(args.calib, args.calib_size, bits)
        if kept is not None:
            print(
                f"trimaran quantize: {len(kept.names)} weights stay floats, {kept.bits:.2f} "
                f"bits in the mean; the others cause {100 * kept.share:.0f} % of the divergence"
            )
    _write(args, folder, began)
    return 0


def _smoothed(args: argparse.Namespace, source: EngineFolder) -> QuantizedFolder:
    """The folder of ``--qformat int8_sq``, with a scale for each row and token.

    Raises:
        ConfigError: flags contradict each other, or the checkpoint cannot be smoothed.
    """
    form = f"--qformat {_SMOOTHED}"
    if args.calib is None:
        raise ConfigError(
            f"{form}: SmoothQuant measures the inputs of products on a text. Add --calib FILE, "
            "or name int8_wo, whose inputs stay floats."
        )
    for flag in ("quantization", "auto_quantize_bits"):
        value = getattr(args, flag)
        if value is not None:
            raise ConfigError(
                f"{form} makes INT8 of all linear layers, but --{flag} is {value}. Leave one "
                "of them out."
            )
    from trimaran.builder.quantization.smoothquant import (  # imports torch
        CalibrationText,
        SmoothQuant,
        smoothed_folder,
    )

    strength = DEFAULT_STRENGTH
    if args.smoothquant is not None:
        strength = strength_of("--smoothquant", args.smoothquant)
        if not strength:
            raise ConfigError(
                f"--smoothquant {args.smoothquant}: {form} needs a strength above 0. Name "
                f"{DEFAULT_STRENGTH}, or leave the flag out."
            )
    text = CalibrationText("--calib", args.calib, args.calib_size)
    return smoothed_folder(source, SmoothQuant(strength=strength), text)


def _write(args: argparse.Namespace, folder: QuantizedFolder, began: float) -> None:
    folder.write(args.output)
    print(
        f"trimaran quantize: wrote {args.output}: {folder.num_quantized} weights in "
        f"{folder.numbers}, {folder.num_bytes / 2**20:.1f} MiB, "
        f"{time.monotonic() - began:.1f} s"
    )

"""The flags by which TensorRT-LLM's conversion scripts ask for quantized weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from trimaran.builder.foreign_flags import FlagSink, say_harmless
from trimaran.builder.settings import load_source
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_folder import EngineFolder

_OFF = ("disable", "none", "false", "0", "off", "no")
_CALIBRATED = {"int4_awq": "awq", "int4_gptq": "gptq", "int8_gptq": "gptq"}
"""Precisions whose weights a tool has fitted to texts, and the checkpoints that hold them."""

_GROUPED = {32: "int4_g32", 64: "int4_g64", 128: "int4"}
_DEFAULT_GROUP = 128

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_size",
)  # fmt: skip
"""Sizes that a model and its quantized weights have in common."""


def add_weight_only_flags(parser: FlagSink) -> None:
    """Declare the flags."""
    parser.add_argument("--use_weight_only", nargs="?", const="enable", metavar="X",
                        help="--quantization int8, or as the precision says")  # fmt: skip
    parser.add_argument("--weight_only_precision", metavar="NAME",
                        help="int8, int4; int4_awq, int4_gptq: of a checkpoint")  # fmt: skip
    parser.add_argument("--per_group", nargs="?", const="enable", metavar="X",
                        help="int4 has groups in any case")  # fmt: skip
    parser.add_argument("--group_size", type=int, metavar="N",
                        help="inputs that share a scale of int4: 32, 64 or 128")  # fmt: skip
    parser.add_argument("--quant_ckpt_path", "--quant-ckpt-path", type=Path, metavar="PATH",
                        help="the model's quantized weights: a folder, or the file in "
                        "it")  # fmt: skip
    parser.hide(
        "use_weight_only", "weight_only_precision", "per_group", "group_size", "quant_ckpt_path"
    )


def checkpoint_of(args: argparse.Namespace) -> Path:
    """The folder whose weights are converted: that of ``--quant_ckpt_path``, else the
    checkpoint.

    Raises:
        ConfigError: the folder's weights are not quantized, are not those of the file that
            was named, or belong to a model of other sizes than the checkpoint's.
    """
    path: Path | None = args.quant_ckpt_path
    checkpoint: Path = args.checkpoint
    if path is None:
        return checkpoint
    folder = path.parent if path.is_file() else path
    found = EngineFolder.load(folder)
    if path.is_file() and [each.resolve() for each in found.weight_files] != [path.resolve()]:
        raise ConfigError(
            f"--quant_ckpt_path {path}: {folder} holds other weights too. Name the folder."
        )
    if found.config.quantization is None:
        raise ConfigError(
            f"--quant_ckpt_path {path}: {folder}/config.json describes no quantized weights "
            "(quantization_config). Name the folder that the quantization tool wrote."
        )
    floats = load_source(checkpoint, "none").config
    for name in _SIZES:
        mine, theirs = getattr(found.config, name), getattr(floats, name)
        if mine != theirs:
            raise ConfigError(
                f"--quant_ckpt_path {path}: {name} is {mine}, but {theirs} in {checkpoint}. "
                "Name the quantized weights of the same model."
            )
    return folder


def quantization_name(args: argparse.Namespace) -> str:
    """The name of --quantization that the flags mean.

    Raises:
        ConfigError: flags contradict each other, or name what is not made here.
    """
    own: str = args.quantization
    if not is_on(args.use_weight_only):
        others = ("weight_only_precision", "per_group", "group_size")
        say_harmless([f"--{each}" for each in others if getattr(args, each) is not None])
        return own
    precision = (args.weight_only_precision or "int8").lower()
    if precision in _CALIBRATED:
        return own
    if precision not in ("int8", "int4"):
        names = ", ".join(("int8", "int4", *_CALIBRATED))
        raise ConfigError(f"--weight_only_precision {precision}: must be one of {names}.")
    size = args.group_size or _DEFAULT_GROUP
    if size not in _GROUPED:
        raise ConfigError(
            f"--group_size {size}: groups have 32, 64 or 128 inputs. Name one of these."
        )
    name = "int8" if precision == "int8" else _GROUPED[size]
    if precision == "int8" and is_on(args.per_group):
        raise ConfigError(
            "--per_group: int8 has a scale a row. Leave the flag out, or name "
            "--weight_only_precision int4."
        )
    if own not in ("none", name):
        raise ConfigError(
            f"--use_weight_only means --quantization {name}, but --quantization is {own}. "
            "Leave one of them out."
        )
    return name


def check_calibrated(args: argparse.Namespace, source: EngineFolder) -> None:
    """Refuse a precision whose weights are fitted to texts unless ``source`` holds them.

    Raises:
        ConfigError: the checkpoint has another format.
    """
    precision = (args.weight_only_precision or "").lower()
    method = _CALIBRATED.get(precision)
    if not is_on(args.use_weight_only) or method is None:
        return
    quantization = source.config.quantization
    if quantization is None or quantization.method != method:
        raise ConfigError(
            f"--weight_only_precision {precision}: such weights are fitted to texts "
            f"before, and {source.path} does not hold them. Name the folder in the format "
            f"{method} as --checkpoint, or --weight_only_precision "
            f"{precision.partition('_')[0]}; or fit weights with `trimaran quantize --calib "
            "FILE`, and build that folder without the flag."
        )


def is_on(word: str | None) -> bool:
    """Whether a flag with an optional value was given, and not switched off."""
    return word is not None and word.lower() not in _OFF

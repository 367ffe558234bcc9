"""The dtype of an engine's KV cache: flags of build commands, and scales in the folder."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from trimaran.builder.foreign_flags import FlagSink, say_harmless
from trimaran.builder.progress import ProgressBar
from trimaran.builder.quantization.calibration_text import (
    NUM_SEQUENCES,
    SEQUENCE_TOKENS,
    calibration_model,
    calibration_sequences,
    check_calibration,
)
from trimaran.builder.smoothquant_flags import reads_text
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.flag_values import positive
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.config.kv_cache_dtype import (
    ALGORITHMS,
    KV_CACHE_DTYPES,
    SCALES_FILE,
    KVScales,
    resolve_kv_cache_dtype,
)
from trimaran.worker.config.pretrained_config import PretrainedConfig

_FLAG = "--calib_dataset"


def add_kv_cache_flags(parser: FlagSink) -> None:
    """Flags of the KV cache's dtype, and of the text from which its scales are calibrated."""
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto",
                        metavar="TYPE",
                        help="fp8, int8 or the model's (auto: the checkpoint's)")  # fmt: skip
    for kind in ALGORITHMS:
        parser.add_argument(f"--{kind}_kv_cache", dest="kv_cache_dtype", action="store_const",
                            const=kind, help=f"--kv-cache-dtype {kind}")  # fmt: skip
    parser.add_argument("--calib_dataset", "--calib-dataset", metavar="FILE",
                        help="text from which scales of the KV cache are made")  # fmt: skip
    parser.add_argument("--calib_size", "--calib-size", type=positive, metavar="N",
                        help=f"sequences of {SEQUENCE_TOKENS} tokens that are read "
                        f"({NUM_SEQUENCES})")  # fmt: skip


def with_kv_cache_dtype(
    args: argparse.Namespace, source: EngineFolder, config: PretrainedConfig
) -> PretrainedConfig:
    """``config`` with the KV cache that the flags or the checkpoint ask for.

    Raises:
        ConfigError: the dtype is not served with the model, or scales would be missing.
    """
    dtype, file = config.dtype, args.calib_dataset
    kind = resolve_kv_cache_dtype(args.kv_cache_dtype, source.config, source.path, dtype)
    algorithm = ALGORITHMS.get(kind, "")
    if file is not None and algorithm:
        check_calibration(_FLAG, file, source)
    elif file is not None and not reads_text(args):
        say_harmless(["--calib_dataset"])
    elif kind == "int8" and find_scales(source) is None:
        raise ConfigError(
            f"a KV cache of INT8 needs scales, and {source.path} holds none. Add "
            "--calib_dataset FILE, a text for which the model is run."
        )
    return replace(config, kv_cache_quant_algo=algorithm)


def find_scales(source: EngineFolder) -> KVScales | None:
    """The scales that a checkpoint brings along."""
    from trimaran.worker.models.weights.kv_scales import folder_kv_scales  # imports torch

    return None if not source.path.is_dir() else folder_kv_scales(source)


def write_kv_scales(
    args: argparse.Namespace, source: EngineFolder, config: PretrainedConfig, folder: Path
) -> None:
    """Write the scales of the KV cache, calibrated or the checkpoint's, into the built folder.

    A folder without weights gets no calibrated ones: scales belong to weights.

    Raises:
        ConfigError: the scales do not fit the model, or the text cannot be read.
    """
    kinds = {name: kind for kind, name in ALGORITHMS.items()}
    kind = kinds.get(config.kv_cache_quant_algo)
    (folder / SCALES_FILE).unlink(missing_ok=True)
    if kind is None:
        return
    if args.calib_dataset is not None:
        if args.save_config_only:
            return
        scales: KVScales | None = _calibrated(args, source, config, kind)
    else:
        scales = find_scales(source)
    if scales is None:
        print(
            f"trimaran: warning: the KV cache is {config.kv_cache_quant_algo} without scales: "
            "keys and values are stored with the scale 1.0. --calib_dataset FILE makes some.",
            file=sys.stderr,
        )
        return
    scales.check(config.num_hidden_layers, config.num_key_value_heads, str(source.path))
    scales.for_kind(kind).write(folder)


def _calibrated(
    args: argparse.Namespace, source: EngineFolder, config: PretrainedConfig, kind: str
) -> KVScales:
    from trimaran.builder.quantization.kv_calibration import (
        calibrate_kv_scales,  # imports torch
    )

    file = args.calib_dataset
    sequences = calibration_sequences(_FLAG, file, source, args.calib_size)
    model = calibration_model(source, config.dtype, args.quantization)
    num_tokens, done = sum(map(len, sequences)), 0
    with ProgressBar(num_tokens) as progress:

        def tell(count: int) -> None:
            nonlocal done
            done += count
            progress.show(done, f"{done} of {num_tokens} tokens read for scales")

        try:
            scales = calibrate_kv_scales(model, kind, sequences, tell)
        except ValueError as error:
            raise ConfigError(f"{_FLAG} {file}: {error}.") from None
    print(f"trimaran: KV cache scales ({kind}) from {num_tokens} tokens of {file}")
    return scales

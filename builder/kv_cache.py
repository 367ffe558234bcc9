"""The dtype of an engine's KV cache: flags of build commands, and scales in the folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trimaran.builder.foreign_flags import FlagSink, say_harmless
from trimaran.builder.progress import ProgressBar
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.flag_values import positive
from trimaran.comm.files.input_files import read_text
from trimaran.comm.tokenizers.prepare import has_tokenizer, prepare
from trimaran.worker.config.engine_config import EngineConfig
from trimaran.worker.config.engine_folder import EngineFolder, FolderKind
from trimaran.worker.config.host_limits import usable_cores
from trimaran.worker.config.kv_cache_dtype import (
    ALGORITHMS,
    KV_CACHE_DTYPES,
    SCALES_FILE,
    KVScales,
    resolve_kv_cache_dtype,
)
from trimaran.worker.config.pretrained_config import PretrainedConfig

_SEQUENCE_TOKENS = 512
_NUM_SEQUENCES = 512
"""Sequences that are read at most, unless ``--calib_size`` names another number."""


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
                        help=f"sequences of {_SEQUENCE_TOKENS} tokens that are read "
                        f"({_NUM_SEQUENCES})")  # fmt: skip


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
        if source.kind is not FolderKind.HUGGINGFACE or not source.path.is_dir():
            raise ConfigError(
                f"--calib_dataset {file}: {source.path} is no Hugging Face folder, whose model "
                "could read the text. Calibrate where the Hugging Face folder is converted."
            )
        if not has_tokenizer(source.path):
            raise ConfigError(
                f"--calib_dataset {file}: {source.path} holds no tokenizer for the text. Add "
                "the tokenizer's files."
            )
        _text_of(file)
    elif file is not None:
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

    Raises:
        ConfigError: the scales do not fit the model, or the text cannot be read.
    """
    kinds = {name: kind for kind, name in ALGORITHMS.items()}
    kind = kinds.get(config.kv_cache_quant_algo)
    (folder / SCALES_FILE).unlink(missing_ok=True)
    if kind is None:
        return
    if args.calib_dataset is not None:
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
    import torch

    from trimaran.comm.collectives.tensor_group import SingleRankGroup
    from trimaran.comm.topology import ParallelLayout
    from trimaran.worker.config.engine_config import CacheConfig, SchedulerConfig
    from trimaran.worker.models.kv_calibration import calibrate_kv_scales
    from trimaran.worker.models.registry import load_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length = min(_SEQUENCE_TOKENS, config.max_position_embeddings)
    limits = SchedulerConfig(max_seq_len=length, max_input_len=length)
    engine = EngineConfig(
        model="calibration",
        engine_dir=str(source.path),
        dtype=config.dtype,
        quantization=args.quantization,
        device=device.type,
        num_threads=usable_cores(),
        scheduler=limits,
        # The keys and values themselves are measured.
        cache=CacheConfig(dtype=config.dtype),
    )
    ids = prepare(source.path).fast().encode(_text_of(args.calib_dataset)).ids
    sequences = list(_sequences(ids, length, args.calib_size or _NUM_SEQUENCES))
    model = load_model(engine, ParallelLayout(), SingleRankGroup(), device)
    num_tokens, done = sum(map(len, sequences)), 0
    with ProgressBar(num_tokens) as progress:

        def tell(count: int) -> None:
            nonlocal done
            done += count
            progress.show(done, f"{done} of {num_tokens} tokens read for scales")

        try:
            scales = calibrate_kv_scales(model, kind, sequences, tell)
        except ValueError as error:
            raise ConfigError(f"--calib_dataset {args.calib_dataset}: {error}.") from None
    print(
        f"trimaran: KV cache scales ({kind}) from {num_tokens} tokens of {args.calib_dataset}"
    )
    return scales


def _sequences(ids: list[int], length: int, most: int) -> Iterator[list[int]]:
    for first in range(0, min(len(ids), most * length), length):
        yield ids[first : first + length]


def _text_of(file: str) -> str:
    """The text of ``--calib_dataset``.

    Raises:
        ConfigError: the file cannot be read as text, or is empty.
    """
    try:
        text = read_text(Path(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--calib_dataset {file}: cannot be read as a text in UTF-8 ({error}). Name a file "
            "of text that resembles the requests."
        ) from None
    if not text.strip():
        raise ConfigError(f"--calib_dataset {file}: is empty. Name a file with some text.")
    return text

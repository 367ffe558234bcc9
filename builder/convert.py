"""``trimaran convert``: the first of two build steps, which shards weights without limits."""

from __future__ import annotations

import argparse
import time
from functools import partial

from trimaran.builder.config_file import ShardTable, checkpoint_values, write_config
from trimaran.builder.foreign_flags import (
    CONVERT_FLAGS,
    FlagSink,
    add_foreign_flags,
    check_foreign_flags,
    say_harmless,
)
from trimaran.builder.gguf_tokenizer import tokenizer_files, write_files
from trimaran.builder.journal import empty
from trimaran.builder.kv_cache import (
    add_kv_cache_flags,
    with_kv_cache_dtype,
    write_kv_scales,
)
from trimaran.builder.output_folder import replaced_folder, say_done
from trimaran.builder.settings import (
    OtherNames,
    add_checkpoint_flags,
    add_model_flags,
    pretrained_config,
    rank_mapping,
)
from trimaran.builder.smoothquant_flags import (
    SourceCheckpoint,
    add_smoothquant_flags,
    source_checkpoint,
)
from trimaran.builder.stop_signals import run_stoppable
from trimaran.builder.weight_only_flags import add_weight_only_flags
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.flag_values import positive
from trimaran.worker.config.engine_folder import EngineFolder, FolderKind, RankMapping

_OLDER_NAMES = OtherNames(
    checkpoint=("-i", "--in-file"),
    output=("-o", "--out-dir"),
    dtype=("-t", "--storage-type"),
    workers=("-p", "--processes"),
)
"""Names of the script ``hf_gpt_convert.py``."""


def add_arguments(parser: FlagSink) -> None:
    """Declare the flags of ``trimaran convert``."""
    what = "a Hugging Face folder or a GGUF file"
    add_checkpoint_flags(parser, what, "tllm_checkpoint", _OLDER_NAMES)
    add_model_flags(parser, _OLDER_NAMES)
    add_kv_cache_flags(parser)
    parser.add_argument("-tp", "--tensor-parallelism", type=positive, metavar="N",
                        help="as --tp-size, into the output's folder N-gpu")  # fmt: skip
    parser.hide("tensor_parallelism")
    add_weight_only_flags(parser)
    add_smoothquant_flags(parser)
    add_foreign_flags(parser, CONVERT_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Write one checkpoint folder. Returns the exit code."""
    return run_stoppable("convert", partial(_convert, args))


def _convert(args: argparse.Namespace) -> int:
    began = time.monotonic()
    say_harmless(check_foreign_flags(args, CONVERT_FLAGS))
    args = _with_tensor_parallelism(args)
    with source_checkpoint(args) as checkpoint:
        mapping = _write(args, checkpoint)
    say_done("convert", args.output, mapping, began)
    return 0


def _write(args: argparse.Namespace, checkpoint: SourceCheckpoint) -> RankMapping:
    source = checkpoint.outline
    if source.kind is not FolderKind.HUGGINGFACE:
        raise ConfigError(
            f"{args.checkpoint}: is converted already. Name the Hugging Face folder, or go on "
            f"with `trimaran build --checkpoint-dir {args.checkpoint}`."
        )
    mapping = rank_mapping(args, source)
    config = with_kv_cache_dtype(args, source, pretrained_config(args, source))
    tokenizer = tokenizer_files(source)
    with replaced_folder(args.output, has_sources=checkpoint.make is not None) as folder:
        shards: ShardTable = []
        if args.save_config_only:
            empty(folder)
        else:
            from trimaran.builder.shards import write_shards  # imports torch

            source = checkpoint.with_tensors()
            shards = write_shards(source, config, mapping, folder, args.workers)
        write_kv_scales(args, source, config, folder)
        write_files(folder, tokenizer)
        write_config(folder, checkpoint_values(config, mapping, shards))
        EngineFolder.load(folder, check_weights=not args.save_config_only)
    return mapping


def _with_tensor_parallelism(args: argparse.Namespace) -> argparse.Namespace:
    """The flags with the size and the folder that ``--tensor-parallelism`` means."""
    size = args.tensor_parallelism
    if size is None:
        return args
    if args.tp_size not in (None, size):
        raise ConfigError(
            f"--tensor-parallelism is {size} but --tp-size is {args.tp_size}. Leave one out."
        )
    changed = {"tp_size": size, "output": args.output / f"{size}-gpu"}
    return argparse.Namespace(**{**vars(args), **changed})

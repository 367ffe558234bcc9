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
from trimaran.builder.journal import empty
from trimaran.builder.output_folder import replaced_folder, say_done
from trimaran.builder.settings import (
    add_checkpoint_flags,
    add_model_flags,
    load_source,
    pretrained_config,
    rank_mapping,
)
from trimaran.builder.stop_signals import run_stoppable
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_folder import EngineFolder, FolderKind


def add_arguments(parser: FlagSink) -> None:
    """Declare the flags of ``trimaran convert``."""
    add_checkpoint_flags(parser, "a Hugging Face folder", "tllm_checkpoint")
    add_model_flags(parser)
    add_foreign_flags(parser, CONVERT_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Write one checkpoint folder. Returns the exit code."""
    return run_stoppable("convert", partial(_convert, args))


def _convert(args: argparse.Namespace) -> int:
    began = time.monotonic()
    say_harmless(check_foreign_flags(args, CONVERT_FLAGS))
    source = load_source(args.checkpoint, args.quantization)
    if source.kind is not FolderKind.HUGGINGFACE:
        raise ConfigError(
            f"{args.checkpoint}: is converted already. Name the Hugging Face folder, or go on "
            f"with `trimaran build --checkpoint-dir {args.checkpoint}`."
        )
    mapping = rank_mapping(args, source)
    config = pretrained_config(args, source)
    with replaced_folder(args.output) as folder:
        shards: ShardTable = []
        if args.save_config_only:
            empty(folder)
        else:
            from trimaran.builder.shards import write_shards  # imports torch

            shards = write_shards(source, config, mapping, folder, args.workers)
        write_config(folder, checkpoint_values(config, mapping, shards))
        EngineFolder.load(folder, check_weights=not args.save_config_only)
    say_done("convert", args.output, mapping, began)
    return 0

"""``trimaran build``: makes an engine folder from a checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

from trimaran.builder.config_file import ShardTable, engine_values, write_config
from trimaran.builder.draft_heads import check_head, draft_head, write_head
from trimaran.builder.foreign_flags import (
    BUILD_FLAGS,
    CONVERT_FLAGS,
    PLUGIN_FLAGS,
    FlagSink,
    add_foreign_flags,
    check_foreign_flags,
    plugin_values,
    say_harmless,
)
from trimaran.builder.gguf_tokenizer import tokenizer_files, write_files
from trimaran.builder.journal import empty
from trimaran.builder.kv_cache import (
    add_kv_cache_flags,
    with_kv_cache_dtype,
    write_kv_scales,
)
from trimaran.builder.output_folder import check_replaceable, replaced_folder, say_done
from trimaran.builder.settings import (
    add_checkpoint_flags,
    add_draft_flags,
    add_model_flags,
    build_config,
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
from trimaran.comm.tokenizers.end_ids import summary
from trimaran.comm.tokenizers.prepare import has_tokenizer, prepare
from trimaran.worker.config.engine_folder import EngineFolder, FolderKind, RankMapping
from trimaran.worker.config.pretrained_config import PretrainedConfig

_FOREIGN = (*CONVERT_FLAGS, *BUILD_FLAGS, *PLUGIN_FLAGS)


def add_arguments(parser: FlagSink) -> None:
    """Declare the flags of ``trimaran build``."""
    what = "a Hugging Face folder, a GGUF file, or the result of `convert`"
    add_checkpoint_flags(parser, what, "engine_outputs")
    add_model_flags(parser)
    add_kv_cache_flags(parser)
    for name, text in (
        ("max-batch-size", "requests in one step (2048)"),
        ("max-input-len", "longest prompt (1024)"),
        ("max-num-tokens", "tokens in one step (8192)"),
        ("max-beam-width", "most beams of a request (1)"),
        ("tokens-per-block", "tokens of a KV cache block (by device: 16 or 32)"),
        ("max-lora-rank", "size of a LoRA adapter (64)"),
        ("max-output-len", "longest output, instead of --max-seq-len"),
    ):
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=text)
    parser.add_argument("--max-seq-len", "--max-decoder-seq-len", type=positive, metavar="N",
                        help="prompt and output together (the model's positions)")  # fmt: skip
    add_draft_flags(parser)
    parser.add_argument("--build-config", type=Path, metavar="FILE", help="JSON file of limits")
    parser.add_argument("--dry-run", action="store_true", help="check, but write nothing")
    parser.hide("max_output_len", "build_config")
    add_weight_only_flags(parser)
    add_smoothquant_flags(parser)
    add_foreign_flags(parser, _FOREIGN)


def run(args: argparse.Namespace) -> int:
    """Build one engine folder. Returns the exit code."""
    return run_stoppable("build", partial(_build, args))


def _build(args: argparse.Namespace) -> int:
    began = time.monotonic()
    say_harmless(check_foreign_flags(args, _FOREIGN))
    with source_checkpoint(args) as checkpoint:
        mapping = _write(args, checkpoint)
    if mapping is not None:
        say_done("build", args.output, mapping, began)
    return 0


def _write(args: argparse.Namespace, checkpoint: SourceCheckpoint) -> RankMapping | None:
    """Write the engine folder; None if --dry-run wrote nothing."""
    _say_tokenizer(args.checkpoint)
    source = checkpoint.outline
    mapping = rank_mapping(args, source)
    config = with_kv_cache_dtype(args, source, pretrained_config(args, source))
    limits = build_config(args, config, plugin_values(args))
    head = draft_head(args, limits)
    check_head(head, config, mapping)
    tokenizer = tokenizer_files(source)
    if args.dry_run:
        check_replaceable(args.output)
        size = _size(args, source, config, mapping) / 2**20
        print(
            f"trimaran build: {args.output} can be built ({size:.1f} MiB); --dry-run wrote "
            "nothing"
        )
        return None
    with replaced_folder(args.output, has_sources=checkpoint.make is not None) as folder:
        if not args.save_config_only:
            source = checkpoint.with_tensors()
        shards = _shards(args, source, config, mapping, folder)
        write_kv_scales(args, source, config, folder)
        write_files(folder, tokenizer)
        write_head(head, folder, config, mapping)
        write_config(folder, engine_values(config, mapping, limits, shards))
        EngineFolder.load(folder, check_weights=not args.save_config_only)
    return mapping


def _say_tokenizer(checkpoint: Path) -> None:
    """Say how the tokenizer beside the weights is read. A faulty tokenizer stops no build: the
    model may be served with another tokenizer."""
    if not (checkpoint.is_dir() and has_tokenizer(checkpoint)):
        return
    try:
        found = summary(prepare(checkpoint), checkpoint)
    except ConfigError as error:
        print(f"trimaran build: warning: {error}", file=sys.stderr)
    else:
        print(f"trimaran build: tokenizer: {found}")


def _shards(
    args: argparse.Namespace,
    source: EngineFolder,
    config: PretrainedConfig,
    mapping: RankMapping,
    folder: Path,
) -> ShardTable:
    if args.save_config_only:
        empty(folder)
        return []
    from trimaran.builder.shards import take_shards, write_shards  # imports torch

    if source.kind is FolderKind.CHECKPOINT:
        return take_shards(source, folder)
    return write_shards(source, config, mapping, folder, args.workers)


def _size(
    args: argparse.Namespace,
    source: EngineFolder,
    config: PretrainedConfig,
    mapping: RankMapping,
) -> int:
    """Bytes of the weight files, after checks but without writing them."""
    if args.save_config_only:
        return 0
    if source.kind is FolderKind.CHECKPOINT:
        return sum(path.stat().st_size for path in source.weight_files)
    from trimaran.builder.shards import check_shards  # imports torch

    return check_shards(source, config, mapping)

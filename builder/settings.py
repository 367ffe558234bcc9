"""The parallel sizes, the dtype and the limits of a build, from flags and a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimaran.builder.draft_heads import (
    HEAD_MODES,
    add_head_flags,
    chain_length,
    dynamic_limits_of_flags,
    tree_of_flags,
)
from trimaran.builder.foreign_flags import FlagSink
from trimaran.builder.gguf_integers import KEEP_INTEGERS, with_integers
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.flag_values import count, positive, workers
from trimaran.comm.files.input_files import UTF8, parse_json
from trimaran.worker.config.engine_config import MAX_SEQS
from trimaran.worker.config.engine_folder import (
    BuildConfig,
    EngineFolder,
    FolderKind,
    RankMapping,
    check_parallel_sizes,
)
from trimaran.worker.config.gguf_file import is_gguf, load_gguf
from trimaran.worker.config.parallel_sizes import RequestedSizes, layout_of
from trimaran.worker.config.pretrained_config import DTYPES, PretrainedConfig
from trimaran.worker.config.quantization import LOAD_METHODS
from trimaran.worker.config.speculation_config import MAX_DRAFT_TOKENS
from trimaran.worker.config.stages import parse_partition, stage_sizes

LOGITS_DTYPES = ("float32", "float16")
_LIMITS = (
    "max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width",
    "max_lora_rank",
)  # fmt: skip
_OVERRIDES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "inter_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "n_positions": "max_position_embeddings",
    "rotary_base": "rotary_base",
}


_NO_DRAFTS, _EXTERNAL = "none", "draft_tokens_external"
_LOOKAHEAD = "lookahead_decoding"
_SERVED_MODES = (_NO_DRAFTS, _EXTERNAL, _LOOKAHEAD, *HEAD_MODES)


def load_source(path: Path, quantization: str) -> EngineFolder:
    """The checkpoint: a Hugging Face folder, a GGUF file, or a folder made by ``trimaran
    convert``."""
    source = load_gguf(path) if is_gguf(path) else EngineFolder.load(path)
    if quantization == KEEP_INTEGERS:
        return with_integers(source)
    source = source.quantized(quantization)
    if source.kind is FolderKind.ENGINE:
        raise ConfigError(
            f"{path}: is an engine folder already. Serve it, or name the checkpoint it was "
            "built from."
        )
    return source


def rank_mapping(args: argparse.Namespace, source: EngineFolder) -> RankMapping:
    """Parallel sizes from the flags, checked against the model's heads and layers."""
    built_for = source.mapping
    asked = RequestedSizes(
        tp_size=args.tp_size or (built_for.tp_size if built_for else 1),
        pp_size=args.pp_size or (built_for.pp_size if built_for else 0),
        dp_size=args.dp_size or 0,
        moe_tp_size=args.moe_tp_size,
        moe_ep_size=args.moe_ep_size,
        pp_partition=parse_partition(args.pp_partition) if args.pp_partition else (),
    )
    layout = layout_of(asked, source)
    tp_size, pp_size, expert_dp_size = layout.tp_size, layout.pp_size, layout.expert_dp_size
    check_parallel_sizes(source.config, tp_size, pp_size, layout.expert_parts)
    if layout.dp_size != expert_dp_size:
        raise ConfigError(
            f"--dp-size is {layout.dp_size} but each dp rank holds all experts, or the model "
            "has none, so dp ranks read the same files. Build without it, and serve with "
            f"--dp-size {layout.dp_size}; or share the experts over dp ranks (--moe-ep-size)."
        )
    world_size = tp_size * pp_size * expert_dp_size
    if args.world_size is not None and args.world_size != world_size:
        raise ConfigError(
            f"--world-size is {args.world_size} but --tp-size {tp_size} times --pp-size "
            f"{pp_size} times --dp-size {expert_dp_size} is {world_size}. Correct one of them."
        )
    return RankMapping(
        world_size=world_size,
        tp_size=tp_size,
        pp_size=pp_size,
        dp_size=expert_dp_size,
        moe_tp_size=layout.moe_tp_size,
        moe_ep_size=layout.moe_ep_size,
        # Recorded even if the split is even, so that the folder describes its files completely.
        pp_partition=tuple(
            stage_sizes(source.config.num_hidden_layers, pp_size, layout.pp_partition)
        ),
        gpus_per_node=args.gpus_per_node,
    )


def pretrained_config(args: argparse.Namespace, source: EngineFolder) -> PretrainedConfig:
    """The model's configuration, with the dtypes of the flags."""
    config = source.config
    for flag, name in _OVERRIDES.items():
        value = getattr(args, flag, None)
        if value is not None and float(value) != float(getattr(config, name)):
            raise ConfigError(
                f"--{flag} is {_number(value)} but {source.path} has {name} "
                f"{getattr(config, name)}. Remove the flag: sizes come from the checkpoint."
            )
    dtype = config.dtype if args.dtype == "auto" else args.dtype
    if source.kind is FolderKind.CHECKPOINT and dtype != config.dtype:
        raise ConfigError(
            f"--dtype is {dtype} but {source.path} was converted to {config.dtype}. Convert "
            "again with the other type, or remove the flag."
        )
    return replace(config, dtype=dtype, logits_dtype=args.logits_dtype or config.logits_dtype)


def _number(value: float) -> str:
    """A flag's number as it was written: sizes are whole, a rotary base may not be."""
    return str(int(value)) if float(value).is_integer() else str(value)


def build_config(
    args: argparse.Namespace, config: PretrainedConfig, plugins: dict[str, str]
) -> BuildConfig:
    """The limits: from the flags, else from ``--build-config``, else the defaults."""
    filed = _build_config_file(args.build_config)
    given = {name: filed[name] for name in _LIMITS if filed.get(name) is not None}
    given.update({name: v for name in _LIMITS if (v := getattr(args, name)) is not None})
    max_seq_len = _max_seq_len(args, config, given)
    max_input_len = given.get("max_input_len", min(BuildConfig().max_input_len, max_seq_len))
    max_num_tokens = given.get("max_num_tokens", BuildConfig().max_num_tokens)
    # Only an explicit batch size is checked against the token budget.
    max_batch_size = given.get(
        "max_batch_size", min(BuildConfig().max_batch_size, max_num_tokens)
    )
    if max_input_len > max_seq_len:
        raise ConfigError(
            f"--max-input-len ({max_input_len}) is above --max-seq-len ({max_seq_len}), which "
            "counts prompt and output. Lower the first or raise the second."
        )
    if max_batch_size > MAX_SEQS:
        raise ConfigError(
            f"--max-batch-size ({max_batch_size}) is above the {MAX_SEQS} sequences that an "
            "engine runs at once. Lower it."
        )
    if max_num_tokens < max_batch_size:
        raise ConfigError(
            f"--max-num-tokens ({max_num_tokens}) is below --max-batch-size "
            f"({max_batch_size}), so a full decode step would not fit. Raise the first or "
            "lower the second."
        )
    max_beam_width = given.get("max_beam_width", BuildConfig().max_beam_width)
    if not 1 <= max_beam_width <= max_batch_size:
        raise ConfigError(
            f"--max-beam-width is {max_beam_width} but must be from 1 to --max-batch-size "
            f"({max_batch_size}): each beam takes the place of a request in a step."
        )
    tokens_per_block = args.tokens_per_block or _filed_tokens_per_block(filed)
    blocks = {"tokens_per_block": tokens_per_block} if tokens_per_block else {}
    return BuildConfig(
        max_batch_size=max_batch_size,
        max_input_len=max_input_len,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        max_beam_width=max_beam_width,
        max_lora_rank=given.get("max_lora_rank", BuildConfig().max_lora_rank),
        **_drafts(args, filed),
        plugin_config={**blocks, **plugins},
    )


def _drafts(args: argparse.Namespace, filed: Mapping[str, Any]) -> dict[str, Any]:
    """Which drafts the engine verifies, and how many; empty for none."""
    mode, most = args.speculative_decoding_mode, args.max_draft_len
    mode = filed.get("speculative_decoding_mode") if mode is None else mode
    most = filed.get("max_draft_len") if most is None else most
    if mode is None:
        # Older versions have the second flag alone. Files may hold the mode as a number.
        mode = _EXTERNAL if most else _NO_DRAFTS
    if mode not in _SERVED_MODES:
        raise ConfigError(
            f"--speculative_decoding_mode is {mode!r} but must be one of "
            f"{', '.join(_SERVED_MODES)}"
        )
    limits, tree = dynamic_limits_of_flags(args, mode, most), tree_of_flags(args, mode, most)
    if limits is not None:
        most = limits.num_nodes
    else:
        most = chain_length(args, mode, most) if tree is None else tree.num_nodes
    if mode == _NO_DRAFTS and most:
        raise ConfigError(
            f"--max_draft_len is {most} but --speculative_decoding_mode is {_NO_DRAFTS}, with "
            f"which no draft tokens are verified. Name {_EXTERNAL}, or leave the first out."
        )
    if mode == _NO_DRAFTS:
        return {}
    if mode == _LOOKAHEAD and type(most) is int:
        # A tree of drafts has more; one chain needs no more.
        most = min(most, MAX_DRAFT_TOKENS)
    if type(most) is not int or not 1 <= most <= MAX_DRAFT_TOKENS:
        raise ConfigError(
            f"--max_draft_len is {most or 0} but must be 1 to {MAX_DRAFT_TOKENS} with "
            f"--speculative_decoding_mode {mode}"
        )
    choices = "" if tree is None else tree.text
    width, depth = (0, 0) if limits is None else limits[:2]
    return {
        "speculative_decoding_mode": mode, "max_draft_len": most, "draft_choices": choices,
        "draft_width": width, "draft_depth": depth,
    }  # fmt: skip


def _max_seq_len(
    args: argparse.Namespace, config: PretrainedConfig, given: dict[str, int]
) -> int:
    positions = config.max_position_embeddings
    if args.max_output_len is not None:
        if "max_input_len" not in given and 0 < args.max_output_len < positions:
            rest = positions - args.max_output_len
            given["max_input_len"] = min(BuildConfig().max_input_len, rest)
        max_input_len = given.get("max_input_len", BuildConfig().max_input_len)
        total = max_input_len + args.max_output_len
        if args.max_seq_len not in (None, total):
            raise ConfigError(
                f"--max-seq-len is {args.max_seq_len} but --max-output-len "
                f"{args.max_output_len} behind --max-input-len {max_input_len} makes {total}. "
                "Leave out --max-output-len."
            )
        given["max_seq_len"] = total
    max_seq_len = given.get("max_seq_len", positions)
    if max_seq_len > positions:
        raise ConfigError(
            f"--max-seq-len ({max_seq_len}) is above the model's {positions} positions "
            "(max_position_embeddings). Lower it, or leave it out."
        )
    return max_seq_len


def _build_config_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = parse_json(path.read_text(encoding=UTF8))
    except OSError as error:
        raise ConfigError(f"--build-config {path}: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"--build-config {path}: is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--build-config {path}: must hold one object.")
    for name in _LIMITS:
        value = values.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(
                f"--build-config {path}: {name} is {value!r} but must be a whole number of 1 "
                "or more."
            )
    return values


def _filed_tokens_per_block(values: dict[str, Any]) -> int:
    plugins = values.get("plugin_config")
    value = plugins.get("tokens_per_block") if isinstance(plugins, dict) else None
    return value if type(value) is int and value > 0 else 0


@dataclass(frozen=True, slots=True)
class OtherNames:
    """Further names of flags, as an older script has them: a short and a long name each."""

    checkpoint: tuple[str, ...] = ()
    output: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()


def _names(others: tuple[str, ...], *own: str) -> tuple[str, ...]:
    """All names of a flag, the short one first."""
    return *others[:1], *own, *others[1:]


def add_checkpoint_flags(
    parser: FlagSink, what: str, default_output: str, others: OtherNames = OtherNames()
) -> None:
    """Flags of the checkpoint's folder, described by ``what``, and of the output folder."""
    names = _names(others.checkpoint, "--checkpoint", "--checkpoint-dir", "--model-dir")
    parser.add_argument(*names, type=Path, required=True, metavar="DIR", help=what)
    parser.add_argument(*_names(others.output, "--output", "--output-dir"), type=Path,
                        default=Path(default_output), metavar="DIR",
                        help=f"({default_output})")  # fmt: skip


def add_model_flags(parser: FlagSink, others: OtherNames = OtherNames()) -> None:
    """Flags of both build steps: model, number of ranks and dtype."""
    number = positive
    parser.add_argument("--tp-size", type=number, metavar="N", help="ranks that share a layer")
    parser.add_argument("--pp-size", type=number, metavar="N", help="pipeline stages")
    parser.add_argument("--pp-partition", metavar="N,N,...",
                        help="layers of each stage (as even as can be)")  # fmt: skip
    parser.add_argument("--dp-size", type=number, metavar="N",
                        help="dp ranks that share the experts")  # fmt: skip
    parser.add_argument("--moe-tp-size", type=int, default=-1, metavar="N",
                        help="ranks that share an expert")  # fmt: skip
    parser.add_argument("--moe-ep-size", type=int, default=-1, metavar="N",
                        help="ranks that share the experts out")  # fmt: skip
    parser.add_argument(*_names(others.dtype, "--dtype"), choices=("auto", *DTYPES),
                        default="auto",
                        help="of weights (default: the checkpoint's)")  # fmt: skip
    parser.add_argument("--quantization", choices=("none", *LOAD_METHODS, KEEP_INTEGERS),
                        default="none",
                        help="of float weights as read; gguf keeps integers")  # fmt: skip
    own = {"dest": "quantization", "action": "store_const", "const": "fp8"}
    parser.add_argument("--use_fp8", "--use_fp8_rowwise", **own, help="--quantization fp8")
    parser.add_argument("--logits-dtype", choices=LOGITS_DTYPES, help="of returned logits")
    parser.add_argument("--gpus-per-node", type=number, default=8, metavar="N",
                        help="kept in config.json")  # fmt: skip
    parser.add_argument("--world-size", type=number, metavar="N",
                        help="checked against the sizes above")  # fmt: skip
    parser.add_argument(*_names(others.workers, "--workers"), type=workers, metavar="N",
                        help="processes that cut and write weights (one a core)")  # fmt: skip
    parser.add_argument("--save-config-only", action="store_true", help="write no weights")
    for flag, name in _OVERRIDES.items():
        parser.add_argument(f"--{flag}", type=float, metavar="N",
                            help=f"checked against the checkpoint's {name}")  # fmt: skip
    parser.hide("world_size", "gpus_per_node", *_OVERRIDES)


def add_draft_flags(parser: FlagSink) -> None:
    """Flags of the draft tokens that an engine verifies."""
    parser.add_argument("--speculative_decoding_mode",
                        choices=_SERVED_MODES,
                        help="draft_tokens_external: of requests and of a draft model; "
                        "lookahead_decoding: of the model itself; eagle, medusa, "
                        "explicit_draft_tokens (ReDrafter): of heads; mtp: of the checkpoint's "
                        "layer for it (none)")  # fmt: skip
    parser.add_argument("--max_draft_len", type=count, metavar="N",
                        help="most draft tokens of a request (0)")  # fmt: skip
    add_head_flags(parser)

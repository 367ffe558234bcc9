"""Reads and checks a model folder and the layout of its weight files; free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import parse_json, read_text
from trimaran.comm.files.json_types import check_field_types
from trimaran.comm.tokenizers.end_ids import model_end_ids
from trimaran.worker.config.checkpoint_folder import (
    check_weight_files,
    find_weight_files,
    quantization_of_folder,
    refuse_adapter,
    refuse_lost_links,
    stored_dtype,
    tied_unless_stored,
)
from trimaran.worker.config.kv_cache_dtype import kv_algorithm
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.config.quantization import QuantizationConfig, load_time_quantization
from trimaran.worker.config.shard_file import read_header
from trimaran.worker.config.stages import stage_sizes

_OF_MODEL = (
    "architecture", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_size",
    "max_position_embeddings", "position_embedding_type",
    "tie_word_embeddings", "attn_bias", "qkv_bias", "qk_norm", "kv_lora_rank", "q_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mlp_bias", "lm_head_bias",
    "parallel_residual", "num_input_norms", "num_experts", "moe_intermediate_size",
    "topk_method", "shared_expert_intermediate_size", "shared_expert_gate", "dense_layers",
    "quantization",
)  # fmt: skip
"""Keys that determine names and shapes of weights and tables, and which rows are vocabulary."""

_OF_RANKS = ("tp_size", "pp_size", "dp_size", "moe_ep_size")


def origin_of(config: PretrainedConfig, mapping: RankMapping) -> dict[str, Any]:
    """The configuration that a model's weights depend on, by the keys of ``config.json``."""
    # The KV cache may have another dtype without other weights.
    values, sizes = replace(config, kv_cache_quant_algo="").to_dict(), asdict(mapping)
    layers = stage_sizes(config.num_hidden_layers, mapping.pp_size, mapping.pp_partition)
    return {
        **{name: values[name] for name in _OF_MODEL},
        **{f"mapping.{name}": sizes[name] for name in _OF_RANKS},
        "mapping.pp_partition": layers,
    }


def check_origin(file: Path, said: str, wanted: dict[str, Any], source: str) -> None:
    """Refuse a configuration whose parallel sizes differ from those of ``file``.

    ``said`` holds the sizes in the file's header; files of older versions have none.

    Raises:
        ConfigError: names the key, its value, and the value in the file.
    """
    try:
        origin = dict(parse_json(said or "{}"))
    except (ValueError, TypeError):
        raise ConfigError(
            f"{file}: not a whole weight file: what its header says of its model is not JSON. "
            "Build or copy the folder again."
        ) from None
    for key, value in wanted.items():
        found = origin.get(key, value)
        if key == "quantization" and found != value:
            found = _in_current_form(found, str(file))
        if found != value:
            raise ConfigError(
                f"{source}: {key} is {json.dumps(value)}, but {file.name} was cut for "
                f"{json.dumps(found)}. Set it back to that, or build the folder again."
            )


def _in_current_form(section: Any, source: str) -> Any:
    """A ``quantization`` section with the keys that earlier versions did not write."""
    quantization = QuantizationConfig.from_dict(section, source)
    return section if quantization is None else quantization.to_dict()


FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
_BUILD_AGAIN = "Build the folder again with `trimaran build`"


class FolderKind(Enum):
    """The kinds of model folders."""

    ENGINE = "engine"
    """One shard a rank, with the limits that the engine was built for."""

    CHECKPOINT = "checkpoint"
    """One shard a rank, without limits: the result of the first of two build steps."""

    HUGGINGFACE = "huggingface"
    """Whole tensors, which ranks shard while loading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMapping:
    """The parallel sizes that a folder's shards were made for."""

    world_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    moe_tp_size: int = 1
    moe_ep_size: int = 1
    dp_size: int = 1
    """Data-parallel ranks that share the experts; 1 if each rank holds all of them. Ranks with
    the same weights read the same shards."""

    pp_partition: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty for an even split."""

    gpus_per_node: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """The limits that an engine folder was built for."""

    max_batch_size: int = 2048
    max_input_len: int = 1024
    max_seq_len: int = 0
    """Prompt and output tokens together; 0 means the model's positions."""

    max_num_tokens: int = 8192
    max_beam_width: int = 1
    max_lora_rank: int = 64
    """Largest rank of a LoRA adapter."""

    speculative_decoding_mode: str = "none"
    """``none``, or ``draft_tokens_external``: the engine verifies draft tokens of requests."""

    max_draft_len: int = 0
    """Most draft tokens of a request; 0 for none."""

    draft_choices: str = ""
    """The tree that the head drafts, as `draft_tree.read_choices` reads it; empty: a chain."""

    draft_width: int = 0
    """Nodes that a dynamic tree of drafts expands at each depth, or beams; 0: neither."""

    draft_depth: int = 0
    """Tokens of a longest path through a dynamic tree, or of a beam."""

    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    plugin_config: dict[str, Any] = field(default_factory=dict)
    """``tokens_per_block`` and the plugin settings that the build command was given."""

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a KV block; 0 if unset."""
        return int(self.plugin_config.get("tokens_per_block", 0))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``config.json``."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFolder:
    """An engine folder with a checked configuration and checked files. No weights are read."""

    path: Path
    kind: FolderKind
    config: PretrainedConfig
    mapping: RankMapping | None
    """None for a Hugging Face folder, which any parallel sizes can load."""

    build: BuildConfig
    weight_files: tuple[Path, ...]
    """One a rank in rank order, or all files of a Hugging Face folder."""

    @classmethod
    def load(cls, path: str | Path, *, check_weights: bool = True) -> EngineFolder:
        """Read ``config.json`` and check it against the folder's files.

        ``check_weights=False`` ignores weight files, for random weights.
        Raises `ConfigError` that names the file, the value and the remedy.
        """
        folder = Path(path)
        values = _read_config(folder)
        source = str(folder / CONFIG_FILE)
        if "pretrained_config" not in values and "mapping" not in values:
            return cls._load_huggingface(folder, values, source, check_weights)
        return cls._load_sharded(folder, values, source, check_weights)

    @classmethod
    def _load_huggingface(
        cls, folder: Path, values: dict[str, Any], source: str, check_weights: bool
    ) -> EngineFolder:
        quantization = quantization_of_folder(folder, values)
        files = find_weight_files(folder) if check_weights else ()
        if not (values.get("dtype") or values.get("torch_dtype")):
            values = {**values, "dtype": stored_dtype(files)}
        if "text_config" in values and "tie_word_embeddings" not in values:
            # Transformers ties the weights then, unless a file stores a head.
            values = {**values, **tied_unless_stored(files)}
        config = PretrainedConfig.from_huggingface(values, source)
        # Only ids that the folder itself names, and not the defaults of its family.
        ends = model_end_ids(folder)
        config = replace(
            config,
            quantization=quantization,
            kv_cache_quant_algo=kv_algorithm(folder, values),
            eos_token_ids=ends,
        )
        check_weight_files(folder, files, config)
        return cls(
            path=folder,
            kind=FolderKind.HUGGINGFACE,
            config=config,
            mapping=None,
            build=BuildConfig(max_input_len=config.max_position_embeddings),
            weight_files=files,
        )

    @classmethod
    def _load_sharded(
        cls, folder: Path, values: dict[str, Any], source: str, check_weights: bool
    ) -> EngineFolder:
        is_engine = "pretrained_config" in values
        _check_format(values, source)
        pretrained = _section(values, "pretrained_config", source) if is_engine else values
        config = PretrainedConfig.from_dict(pretrained, source)
        mapping = _rank_mapping(_section(pretrained, "mapping", source), config, source)
        build = (
            _build_config(_section(values, "build_config", source), source)
            if is_engine
            else BuildConfig()
        )
        files = tuple(shard_path(folder, rank) for rank in range(mapping.world_size))
        if check_weights:
            _check_shards(files, values.get("shards"), origin_of(config, mapping), source)
        return cls(
            path=folder,
            kind=FolderKind.ENGINE if is_engine else FolderKind.CHECKPOINT,
            config=config,
            mapping=mapping,
            build=build,
            weight_files=files,
        )

    def quantized(self, name: str) -> EngineFolder:
        """This folder with its weights quantized as they are read; ``none`` leaves them.

        Raises:
            ConfigError: the weights are quantized already, or cut for ranks.
        """
        if name == "none":
            return self
        quantization = self.config.quantization
        # Without rules the KV cache alone is quantized.
        if quantization is not None and quantization.rules:
            raise ConfigError(
                f"--quantization is {name} but the weights of {self.path} are quantized "
                f"already ({quantization.describe()}). Leave the flag out."
            )
        if self.kind is not FolderKind.HUGGINGFACE:
            raise ConfigError(
                f"--quantization is {name} but {self.path} holds the shards of ranks. Build it "
                f"with `trimaran build --quantization {name}`, or name the Hugging Face folder."
            )
        return replace(
            self, config=replace(self.config, quantization=load_time_quantization(name))
        )

    @property
    def max_seq_len(self) -> int:
        """Prompt and output tokens together, at most the model's positions."""
        positions = self.config.max_position_embeddings
        return min(self.build.max_seq_len or positions, positions)

    def check_parallel(
        self, tp_size: int, pp_size: int, moe_ep_size: int = 1, expert_dp_size: int = 1
    ) -> None:
        """Refuse parallel sizes that differ from those of this folder's shards."""
        if self.mapping is None:
            check_parallel_sizes(self.config, tp_size, pp_size, moe_ep_size)
            return
        built_for = self.mapping
        if (built_for.tp_size, built_for.pp_size) != (tp_size, pp_size):
            in_dp_ranks = (
                f" in each of {built_for.dp_size} dp ranks" if built_for.dp_size > 1 else ""
            )
            raise ConfigError(
                f"{self.path}: built for tp_size {built_for.tp_size} and pp_size "
                f"{built_for.pp_size}{in_dp_ranks} (world size {built_for.world_size}), "
                f"but asked to run with tp_size {tp_size} and pp_size {pp_size} (world size "
                f"{tp_size * pp_size}). Start {built_for.world_size} ranks, or build again "
                f"with --tp-size {tp_size} --pp-size {pp_size}."
            )
        if self.config.num_experts and built_for.moe_ep_size != moe_ep_size:
            raise ConfigError(
                f"{self.path}: built for moe_ep_size {built_for.moe_ep_size}, but asked to run "
                f"with {moe_ep_size}. Leave the sizes of experts out, or build again with "
                f"--moe-ep-size {moe_ep_size}."
            )
        if built_for.dp_size != expert_dp_size:
            raise ConfigError(
                f"{self.path}: built for experts shared over {built_for.dp_size} dp rank(s), "
                f"but asked to share them over {expert_dp_size}. Serve it with --dp-size "
                f"{built_for.dp_size}, or build again for other dp ranks and sizes of experts."
            )

    def shard_of(self, rank: int) -> Path:
        """The weight file of one rank of an engine or checkpoint folder."""
        # Data-parallel ranks with the same weights read the same files.
        return self.weight_files[rank % len(self.weight_files)]


def shard_path(folder: Path, rank: int) -> Path:
    """The path of one rank's weights."""
    return folder / f"rank{rank}.safetensors"


def check_parallel_sizes(
    config: PretrainedConfig, tp_size: int, pp_size: int, moe_ep_size: int = 1
) -> None:
    """Refuse parallel sizes that leave a rank without a head or a layer, or experts uneven.

    Heads and widths that the sizes do not divide are padded with zeros.
    """
    for name, size in (("tp_size", tp_size), ("pp_size", pp_size)):
        if size < 1:
            raise ConfigError(f"{name} is {size} but must be 1 or more")
    if moe_ep_size > 1 and not config.num_experts:
        raise ConfigError(
            f"moe_ep_size is {moe_ep_size} but the model has no experts to share out. Leave "
            "--moe-tp-size and --moe-ep-size out."
        )
    if config.num_experts % moe_ep_size:
        raise ConfigError(
            f"num_experts ({config.num_experts}) is not a multiple of moe_ep_size "
            f"({moe_ep_size}). Choose a --moe-ep-size that divides it."
        )
    if tp_size > config.num_attention_heads:
        raise ConfigError(
            f"tp_size ({tp_size}) is above num_attention_heads ({config.num_attention_heads}), "
            "so a rank would have none. Choose a smaller --tp-size."
        )
    if pp_size > config.num_hidden_layers:
        raise ConfigError(
            f"pp_size ({pp_size}) is above num_hidden_layers ({config.num_hidden_layers}), so "
            "a stage would be empty. Choose a smaller --pp-size."
        )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if folder.suffix == ".gguf" or (any(folder.glob("*.gguf")) and not path.exists()):
        raise ConfigError(
            f"{folder}: GGUF files are served once they are built: trimaran build --checkpoint "
            "FILE.gguf --output DIR."
        )
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder. Name an engine folder made by `trimaran build`, or a "
            "Hugging Face folder."
        )
    try:
        text = read_text(path)
    except FileNotFoundError:
        refuse_lost_links([path])
        refuse_adapter(folder)
        snapshots = sorted(folder.glob(f"snapshots/*/{CONFIG_FILE}"))
        inside = f" Or was {snapshots[-1].parent} meant?" if snapshots else ""
        raise ConfigError(
            f"{folder}: holds no {CONFIG_FILE}. Name an engine folder made by "
            f"`trimaran build`, or a Hugging Face folder.{inside}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {error}. {_BUILD_AGAIN}, or correct its access rights."
        ) from None
    if not text.strip():
        raise ConfigError(f"{path}: is empty. {_BUILD_AGAIN}, or copy it again.")
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ConfigError(
            f"{path}: is not JSON: {error}. {_BUILD_AGAIN}, or copy it again."
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: holds a {type(values).__name__}, not an object. {_BUILD_AGAIN}."
        )
    return values


def _check_format(values: Mapping[str, Any], source: str) -> None:
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        made_by = values.get("version", "another program")
        raise ConfigError(
            f"{source}: format_version is {version!r} (written by {made_by!r}), but this "
            f"version reads {FORMAT_VERSION}. {_BUILD_AGAIN} of this version."
        )


def _section(values: Mapping[str, Any], key: str, source: str) -> dict[str, Any]:
    section = values.get(key)
    if not isinstance(section, dict):
        raise ConfigError(
            f"{source}: {key} is {section!r} but must be an object. {_BUILD_AGAIN}."
        )
    return section


def _rank_mapping(
    values: Mapping[str, Any], config: PretrainedConfig, source: str
) -> RankMapping:
    known = {field.name for field in fields(RankMapping)}
    chosen = {key: value for key, value in values.items() if key in known}
    partition = chosen.pop("pp_partition", None) or []
    _check_type_of("mapping.", RankMapping, {"pp_partition": partition}, source)
    _check_positive_integers(chosen, "mapping", source)
    _check_positive_integers(dict(enumerate(partition)), "mapping.pp_partition", source)
    mapping = RankMapping(**chosen, pp_partition=tuple(partition))
    try:
        stage_sizes(config.num_hidden_layers, mapping.pp_size, mapping.pp_partition)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    world_size = mapping.tp_size * mapping.pp_size * mapping.dp_size
    if mapping.world_size != world_size:
        raise ConfigError(
            f"{source}: mapping.world_size is {mapping.world_size} but tp_size "
            f"{mapping.tp_size} times pp_size {mapping.pp_size} times dp_size "
            f"{mapping.dp_size} is {world_size}. {_BUILD_AGAIN}."
        )
    return mapping


def _build_config(values: Mapping[str, Any], source: str) -> BuildConfig:
    known = {field.name for field in fields(BuildConfig)}
    chosen = {key: value for key, value in values.items() if key in known}
    # Without draft tokens their limit is 0.
    limits = {k: v for k, v in chosen.items() if k.startswith("max_") and k != "max_draft_len"}
    _check_positive_integers(limits, "build_config", source)
    plugins = chosen.setdefault("plugin_config", {})
    _check_type_of("build_config.", BuildConfig, chosen, source)
    blocks = {"tokens_per_block": plugins.get("tokens_per_block", 1)}
    _check_positive_integers(blocks, "build_config.plugin_config", source)
    return BuildConfig(**chosen)


def _check_type_of(inside: str, owner: type, values: Mapping[str, Any], source: str) -> None:
    try:
        check_field_types(owner, values, inside=inside)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}. {_BUILD_AGAIN}.") from None


def _check_positive_integers(values: Mapping[Any, Any], section: str, source: str) -> None:
    for key, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{source}: {section}.{key} is {value!r} but must be a whole number of 1 or "
                f"more. {_BUILD_AGAIN}."
            )


def _check_shards(
    files: tuple[Path, ...], listed: Any, origin: dict[str, Any], source: str
) -> None:
    entries = [] if listed is None else listed
    if not (isinstance(entries, list) and all(isinstance(each, dict) for each in entries)):
        raise ConfigError(
            f"{source}: shards is {listed!r} but must be a list of objects. {_BUILD_AGAIN}."
        )
    entry_of = {entry.get("file"): entry for entry in entries}
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"{file}: missing, though {source} tells of {len(files)} ranks. "
                f"{_BUILD_AGAIN}, or copy all of its files."
            )
        header = read_header(file)
        entry = entry_of.get(file.name, {})
        found = {"bytes": file.stat().st_size, "header_sha256": header.checksum}
        for key, value in found.items():
            # Folders of older versions have no checksums.
            if entry.get(key, value) != value:
                raise ConfigError(
                    f"{file}: has {key} {value}, but {source} tells of {entry[key]}: it "
                    f"belongs to another build. {_BUILD_AGAIN}, or copy it again."
                )
        check_origin(file, header.origin, origin, source)

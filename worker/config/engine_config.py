"""What one engine is and may hold: the configuration that every rank of a group gets."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from trimaran.comm.errors import ConfigError
from trimaran.comm.topology import MAX_RANKS
from trimaran.worker.config.experts_config import ExpertsConfig

ALL_REDUCES = ("auto", "nccl", "peer", "fused")
"""Values of `EngineConfig.all_reduce`."""

MAX_SEQS = 1 << 16
"""Most sequences that an engine runs at once: it keeps a row of numbers for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel axes; world size is ``tp_size * pp_size * dp_size``.

    ``moe_tp_size * moe_ep_size`` is ``tp_size``, or with experts shared out over the lanes
    ``tp_size * dp_size``.
    """

    tp_size: int = 1
    pp_size: int = 1
    moe_tp_size: int = -1
    moe_ep_size: int = -1
    dp_size: int = 1
    """Lanes: copies of the attention layers, each with requests of its own."""

    pp_partition: tuple[int, ...] = ()
    """Layers of each pipeline stage; none to share them out evenly."""

    def __post_init__(self) -> None:
        if self.world_size > MAX_RANKS:
            raise ConfigError(
                f"tp_size {self.tp_size} times pp_size {self.pp_size} times dp_size "
                f"{self.dp_size} is {self.world_size} ranks, but at most {MAX_RANKS} work "
                "together. Lower one of the sizes."
            )

    @property
    def expert_parts(self) -> int:
        """Parts of the experts' ranks that share the experts out."""
        return max(self.moe_ep_size, 1)

    @property
    def expert_lanes(self) -> int:
        """Data-parallel ranks that share a layer's experts; 1 where each holds all of them."""
        num_ranks = self.tp_size * self.dp_size
        return self.dp_size if self.moe_tp_size * self.moe_ep_size == num_ranks else 1

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.tp_size * self.pp_size * self.dp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits on what one engine step may hold."""

    max_num_batched_tokens: int = 8192
    """Tokens one step may compute, prompt chunks and decodes together."""

    max_num_seqs: int = 256
    """Sequences that may hold KV blocks at once; rows on the device."""

    max_seq_len: int = 2048
    """Prompt and output of a sequence together."""

    max_input_len: int = 2048
    """Longest prompt."""

    policy: str = "guaranteed_no_evict"
    """``max_utilization``, ``guaranteed_no_evict``, ``static_batch``, or the import path of an
    `AdmissionPolicy`, see `worker/scheduling/admission_policy.py`."""

    batching: str = "inflight_fused_batching"
    """``inflight_fused_batching`` or ``V1``."""

    enable_chunked_context: bool = True
    """A prompt may be computed over several steps."""

    max_beam_width: int = 1
    """Most beams of a request."""

    max_queue_size: int = 0
    """Requests that may wait; 0 means no limit."""

    level_queue_sizes: tuple[int, ...] = ()
    """The same for each priority level, whose requests then wait in a queue of their own:
    the first is that of priority -1, the next of -2 and so on."""

    expected_output_tokens: int = 1024
    """Output after which a sequence is thought to end, until some ended. For
    ``max_utilization``."""

    tokens_per_read: float = 0.0
    """Prompt tokens that are computed in the time of reading the weights; known once the model
    is. For ``max_utilization``, see `worker/scheduling/preemption.py`."""

    depth: int = 0
    """Steps in flight: 1 plain, 2 overlapped, in a pipeline one a stage or one more; 0 what
    suits the device (GPU 2, CPU 1) and the stages."""

    @property
    def has_queue_limits(self) -> bool:
        """Whether a request may find its queue full."""
        return bool(self.max_queue_size or self.level_queue_sizes)

    @property
    def is_v1(self) -> bool:
        """Whether the strategy is static batching by its old name."""
        return self.batching.upper() == "V1"

    @property
    def is_static(self) -> bool:
        """Whether a batch runs to its longest request before the next starts."""
        return self.policy == "static_batch" or self.is_v1

    @property
    def can_preempt(self) -> bool:
        """Whether sequences start without a reservation of blocks, and may be paused."""
        return self.policy == "max_utilization" and not self.is_static

    def __post_init__(self) -> None:
        if self.max_num_seqs > MAX_SEQS:
            raise ConfigError(
                f"max_num_seqs ({self.max_num_seqs}) is above the {MAX_SEQS} sequences that an "
                "engine runs at once. Lower --max-batch-size (of bench: --max-num-seqs)."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below "
                f"max_num_seqs ({self.max_num_seqs}), so a full decode step would not "
                "fit. Raise the first or lower the second."
            )
        if self.expected_output_tokens < 1:
            raise ConfigError(
                f"expected_output_tokens is {self.expected_output_tokens} but must be 1 or more"
            )
        if self.depth < 0:
            raise ConfigError(f"depth is {self.depth} but must be 1 or more, or 0 (by device)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How much KV cache there is and how it is reused."""

    tokens_per_block: int = 0
    """0 means by device: 32, or on one Hopper GPU as many as `cache_sides` needs."""

    max_tokens: int = 0
    """Token capacity (``max_tokens_in_paged_kv_cache``); 0 means by memory fraction."""

    free_memory_fraction: float = 0.9
    """Share of the memory left after the weights that the cache takes."""

    enable_block_reuse: bool = True
    """Finished prompts' blocks serve later requests with the same prefix."""

    attention_windows: tuple[int, ...] = ()
    """Tokens that a layer's queries see (``max_attention_window_size``), themselves included,
    layer by layer and then again from the first; empty means all of them."""

    num_sinks: int = 0
    """First tokens that are seen whatever the window (``sink_token_length``)."""

    host_bytes: int = 0
    """Host memory of each rank for evicted blocks (``kv_cache_host_memory_bytes``); without
    reuse, of sequences that made room for others."""

    def __post_init__(self) -> None:
        if any(window < 1 for window in self.attention_windows):
            raise ConfigError(
                f"attention windows are {list(self.attention_windows)} but each must be 1 or "
                "more. Leave max_attention_window_size unset for none."
            )
        if self.num_sinks < 0 or self.host_bytes < 0:
            raise ConfigError(
                f"num_sinks ({self.num_sinks}) and host_bytes ({self.host_bytes}) must be 0 or "
                "more"
            )
        if self.num_sinks and not self.attention_windows:
            raise ConfigError(
                f"sink_token_length is {self.num_sinks} but no attention window is set, so all "
                "tokens are seen as it is. Set max_attention_window_size too, or leave both "
                "unset."
            )

    def check_use_of_host(self, scheduler: SchedulerConfig) -> None:
        """Raise ConfigError if nothing would ever be kept on the host."""
        if self.host_bytes and not (self.enable_block_reuse or scheduler.can_preempt):
            raise ConfigError(
                f"kv_cache_host_memory_bytes is {self.host_bytes} but blocks are not reused, "
                f"and with batch_scheduler_policy {scheduler.policy} no sequence makes room "
                "for others, so none would be kept. Set enable_kv_cache_reuse to True, the "
                "policy to max_utilization, or the bytes to 0."
            )

    def windows_of(
        self, own: tuple[int, ...], max_seq_len: int, num_layers: int
    ) -> tuple[int, ...]:
        """Tokens back that each layer sees: the least of ``attention_windows``, taken in
        turn, and the model's ``own``; 0 for all, and where no sequence is longer."""
        given = self.attention_windows or (0,)
        windows = []
        for number in range(num_layers):
            sizes = (given[number % len(given)], own[number] if own else 0)
            windows.append(min((size for size in sizes if 0 < size < max_seq_len), default=0))
        return tuple(windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """How many adapters an engine keeps, and how large they may be."""

    max_adapter_size: int = 64
    """Largest rank of an adapter's matrices."""

    gpu_memory_fraction: float = 0.05
    """Share of the memory left beside the model and the KV cache, for adapters in use; 0
    serves none."""

    host_memory_bytes: int = 1 << 30
    """A rank's memory for adapters that may be used again."""

    prefetch_dir: str = ""
    """A folder of adapters, each in a subfolder that is named by its task id, or by a name."""

    has_graphs: bool = False
    """Decode steps with adapters run from CUDA graphs too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedConfig:
    """Whether outputs can be made to follow a grammar, and by which tokenizer."""

    backend: str = ""
    """``xgrammar``, or empty: none is served."""

    tokenizer_dir: str = ""
    """A Hugging Face folder; empty means the engine's own."""

    tokenizer_info_path: str = ""
    """A JSON file with ``encoded_vocab``, ``tokenizer_str`` and ``stop_token_ids`` instead."""

    timeout_s: float = 30.0
    """A guide that takes longer to be compiled is refused."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ConfigError(
                f"--guide-timeout is {self.timeout_s:g} but a guide needs some time to be "
                "compiled. Name more seconds, or leave it out."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One model's engine."""

    model: str
    """Name of the served token-level model."""

    engine_dir: str
    """An engine folder, or a Hugging Face folder that is sharded in memory."""

    dtype: str = "auto"
    """``auto`` (the folder's), ``float32``, ``float16`` or ``bfloat16``."""

    load_format: str = "auto"
    """``auto``, or ``random``: weights made on the device, no files read."""

    device: str = "auto"
    """``auto``, ``cpu`` or ``cuda``."""

    num_threads: int = 1
    """CPU threads of a rank."""

    gpu_device_ids: tuple[int, ...] = ()
    """Local GPUs of the ranks, in rank order; empty means by local rank."""

    deterministic: bool = False
    """A request's tokens do not depend on what else is in its batches."""

    cuda_graphs: bool = True
    """Decode steps on a GPU run from CUDA graphs."""

    max_cuda_graphs: int = 0
    """Graphs of decode steps at most, the smallest first; 0 means all sizes."""

    prompt_graph_tokens: int | None = None
    """Steps with prompts of up to so many tokens run from CUDA graphs too; None: as many as
    have been found worth it, where such steps can be captured."""

    collective_graphs: bool | None = None
    """Steps in which several ranks meet run from CUDA graphs too; None: where these are on
    one host."""

    first_layer_table: bool | None = None
    """The first layer's queries, keys and values are looked up by token id, see
    `worker/models/first_layer_table.py`; None: where that is worth its memory."""

    all_reduce: str = "auto"
    """Who sums over the GPUs of a tensor group: ``nccl``; ``peer``: our own kernels, which
    read each other's memory, whatever is not too large for them; ``fused``: these, and in
    steps of few tokens the norms behind the sums make them; or ``auto``: ``peer`` where it
    can be, and where that is faster and can be too, ``fused``."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    guided: GuidedConfig = field(default_factory=GuidedConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)

    def __post_init__(self) -> None:
        most = self.parallel.pp_size + 1
        if self.scheduler.depth > most:
            raise ConfigError(
                f"depth is {self.scheduler.depth} but with {self.parallel.pp_size} pipeline "
                f"stage(s) at most {most} steps are in flight. Lower it."
            )
        self.cache.check_use_of_host(self.scheduler)
        self._check_collectives()

    def _check_collectives(self) -> None:
        if self.all_reduce not in ALL_REDUCES:
            raise ConfigError(
                f"all_reduce is {self.all_reduce!r} but must be one of {', '.join(ALL_REDUCES)}"
            )
        asked = {"--collective-graphs": self.collective_graphs}
        asked[f"--all-reduce {self.all_reduce}"] = self.all_reduce in ("peer", "fused")
        for flag in (name for name, is_set in asked.items() if is_set):
            if self.device == "cpu":
                raise ConfigError(
                    f"{flag} is about sums between GPUs, but the device is cpu. Leave it out."
                )
        if self.collective_graphs and not self.cuda_graphs:
            raise ConfigError(
                "--collective-graphs is set but cuda_graph_mode is false: no steps are "
                "captured then. Leave one of them out."
            )

    def to_wire(self) -> dict[str, Any]:
        """Plain dictionaries, for msgpack."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> EngineConfig:
        """The inverse of `to_wire`."""
        values = dict(wire)
        parallel = values["parallel"]
        stages = tuple(parallel["pp_partition"])
        values["parallel"] = ParallelConfig(**{**parallel, "pp_partition": stages})
        scheduler = values["scheduler"]
        levels = tuple(scheduler["level_queue_sizes"])
        values["scheduler"] = SchedulerConfig(**{**scheduler, "level_queue_sizes": levels})
        cache = values["cache"]
        windows = tuple(cache["attention_windows"])
        values["cache"] = CacheConfig(**{**cache, "attention_windows": windows})
        values["lora"] = LoraConfig(**values["lora"])
        values["guided"] = GuidedConfig(**values["guided"])
        values["experts"] = ExpertsConfig(**values["experts"])
        values["gpu_device_ids"] = tuple(values["gpu_device_ids"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Which steps of every rank are traced, and where the files go."""

    MAX_STEPS: ClassVar[int] = 1000

    first: int
    last: int
    """Traced as well."""

    folder: str

    @classmethod
    def parse(cls, text: str, folder: str, folder_flag: str = "--log-dir") -> ProfileConfig:
        """The meaning of ``steps=FIRST:LAST``; ``folder_flag`` is how one says the folder.

        Raises:
            ConfigError: the text means nothing, or more steps than a trace can hold.
        """
        found = re.fullmatch(r"steps=(\d+):(\d+)", text)
        if found is None:
            raise ConfigError(
                f"--profile is {text!r} but must name the first and the last step of the "
                "trace, as in steps=100:120"
            )
        first, last = int(found[1]), int(found[2])
        if first < 1 or last < first:
            raise ConfigError(
                f"--profile {text}: steps count from 1 and the last is not before the first"
            )
        if last - first >= cls.MAX_STEPS:
            raise ConfigError(
                f"--profile {text} asks for {last - first + 1} steps but a trace that a viewer "
                f"can open holds at most {cls.MAX_STEPS}. Name fewer."
            )
        if not folder:
            raise ConfigError(
                f"--profile {text} has no folder to write to. Add {folder_flag} DIR."
            )
        return cls(first=first, last=last, folder=folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """What a rank needs beside its engine: whom to serve and how long to wait."""

    engine: EngineConfig
    group: str
    incarnation: int = 0
    frontends: tuple[str, ...] = ()
    """Addresses that rank 0 dials once the group is warm."""

    start_method: str = ""
    """How the group was started, for the log and the metrics: ``mpirun`` and the like."""

    participants: tuple[int, ...] = ()
    """World ranks that run this engine, in order; empty means all of them. A rank that
    runs no engine (the orchestrator's place in a job) is in no group's list."""

    hang_timeout_s: float = 10.0
    """A step, or a peer's silence, longer than this ends the group; 0 means never."""

    start_timeout_s: float = 1800.0
    """Longest time from a rank's start to a loaded and warm model."""

    stats_period_ms: int = 100
    """Least time between two `StatsReport`."""

    profile: ProfileConfig | None = None
    """Steps to trace; None for none."""

    def to_wire(self) -> dict[str, Any]:
        """Plain dictionaries, for msgpack."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> RankConfig:
        """The inverse of `to_wire`."""
        values = dict(wire)
        values["engine"] = EngineConfig.from_wire(values["engine"])
        values["frontends"] = tuple(values["frontends"])
        values["participants"] = tuple(values["participants"])
        if values.get("profile") is not None:
            values["profile"] = ProfileConfig(**values["profile"])
        return cls(**values)

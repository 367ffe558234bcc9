"""One engine's configuration, which every rank of its group receives."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from trimaran.comm.errors import ConfigError
from trimaran.comm.topology import MAX_RANKS
from trimaran.worker.config.experts_config import ExpertsConfig
from trimaran.worker.config.speculation_config import SpeculationConfig

ALL_REDUCES = ("auto", "nccl", "peer", "fused")
"""Values of `EngineConfig.all_reduce`."""

MAX_SEQS = 1 << 16
"""Most sequences that an engine runs at once: host and device keep a row for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel axes; world size is ``tp_size * pp_size * dp_size``.

    ``moe_tp_size * moe_ep_size`` is ``tp_size``, or ``tp_size * dp_size`` if data-parallel
    ranks share the experts.
    """

    tp_size: int = 1
    pp_size: int = 1
    moe_tp_size: int = -1
    moe_ep_size: int = -1
    dp_size: int = 1
    """Data-parallel ranks: copies of the attention layers, each with its own requests."""

    pp_partition: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty for an even split."""

    def __post_init__(self) -> None:
        if self.world_size > MAX_RANKS:
            raise ConfigError(
                f"tp_size {self.tp_size} times pp_size {self.pp_size} times dp_size "
                f"{self.dp_size} is {self.world_size} ranks, but at most {MAX_RANKS} work "
                "together. Lower one of the sizes."
            )

    @property
    def expert_parts(self) -> int:
        """Groups of ranks that each hold a part of the experts."""
        return max(self.moe_ep_size, 1)

    @property
    def expert_dp_size(self) -> int:
        """Data-parallel ranks that share a layer's experts; 1 if each holds all of them."""
        num_ranks = self.tp_size * self.dp_size
        return self.dp_size if self.moe_tp_size * self.moe_ep_size == num_ranks else 1

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.tp_size * self.pp_size * self.dp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine step."""

    max_num_batched_tokens: int = 8192
    """Tokens that one step may compute, prompt chunks and decodes together."""

    max_num_seqs: int = 256
    """Sequences that may hold KV blocks at once; rows on the device."""

    max_seq_len: int = 2048
    """Prompt and output tokens of a sequence together."""

    max_input_len: int = 2048
    """Longest prompt."""

    policy: str = "guaranteed_no_evict"
    """``max_utilization``, ``guaranteed_no_evict``, ``static_batch``, or the import path of an
    `AdmissionPolicy`, see `worker/scheduling/admission_policy.py`."""

    batching: str = "inflight_fused_batching"
    """``inflight_fused_batching`` or ``V1``."""

    enable_chunked_context: bool = True
    """Whether a prompt may be computed over several steps."""

    max_beam_width: int = 1
    """Largest beam width of a request."""

    max_queue_size: int = 0
    """Requests that may wait in the queue; 0 means no limit."""

    level_queue_sizes: tuple[int, ...] = ()
    """The same for each priority level, which has its own queue: the first limit is for
    priority -1, the next for -2 and so on."""

    expected_output_tokens: int = 1024
    """Assumed tokens of an output until enough sequences ended, for ``max_utilization``."""

    tokens_per_read: float = 0.0
    """Prompt tokens that are computed in the time that reading the weights takes; set once
    the model is known. For ``max_utilization``, see `worker/scheduling/preemption.py`."""

    max_recompute_rows: int = 0
    """Most decodes of a step in which output is computed again: each of its tokens is a decode.
    0 leaves this to the kernels of prompts, which round otherwise. Set by device and mode."""

    depth: int = 0
    """Steps in flight: 1 without overlap, 2 overlapped, in a pipeline the number of stages or
    one more; 0 chooses by device (GPU 2, CPU 1) and stages."""

    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    @property
    def has_queue_limits(self) -> bool:
        """Whether a request may be refused because its queue is full."""
        return bool(self.max_queue_size or self.level_queue_sizes)

    @property
    def max_num_rows(self) -> int:
        """Most decode rows of a step; more than sequences if draft tokens are verified."""
        return self.speculation.num_rows(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def is_v1(self) -> bool:
        """Whether ``batching_strategy`` is ``V1``, another name for static batching."""
        return self.batching.upper() == "V1"

    @property
    def is_static(self) -> bool:
        """Whether a batch runs until its longest request ends before the next batch starts."""
        return self.policy == "static_batch" or self.is_v1

    @property
    def can_preempt(self) -> bool:
        """Whether sequences start without a reservation of blocks, and may be preempted."""
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
    """Size and reuse of the KV cache."""

    tokens_per_block: int = 0
    """0 chooses by device: 32, or on one Hopper GPU what `kv_cache_partitions` needs."""

    max_tokens: int = 0
    """Capacity in tokens (``max_tokens_in_paged_kv_cache``); 0 means by memory fraction."""

    free_memory_fraction: float = 0.9
    """Fraction of the memory left after the weights that the cache takes."""

    enable_block_reuse: bool = True
    """Whether finished prompts' blocks serve later requests with the same prefix."""

    attention_windows: tuple[int, ...] = ()
    """Window of each layer in tokens, the query's included (``max_attention_window_size``);
    the list repeats from its first value. Empty means no windows."""

    num_sinks: int = 0
    """First tokens that every query sees, whatever the window (``sink_token_length``)."""

    host_bytes: int = 0
    """Host memory of a rank for evicted blocks; without reuse, of preempted sequences."""

    dtype: str = "auto"
    """The dtype of keys and values: ``auto`` or a name of `kv_cache_dtype.KV_CACHE_DTYPES`."""

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
        """Raise ConfigError if no block would ever be copied to the host."""
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
        """The window of each layer: the smaller of ``attention_windows``, repeated over the
        layers, and the model's ``own``; 0 if no window is shorter than ``max_seq_len``."""
        given = self.attention_windows or (0,)
        windows = []
        for number in range(num_layers):
            sizes = (given[number % len(given)], own[number] if own else 0)
            windows.append(min((size for size in sizes if 0 < size < max_seq_len), default=0))
        return tuple(windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """How many adapters an engine caches, and how large an adapter may be."""

    max_adapter_size: int = 64
    """Largest rank of an adapter's matrices."""

    gpu_memory_fraction: float = 0.05
    """Fraction of the memory left after the model and the KV cache, for adapters in use; 0
    disables adapters."""

    host_memory_bytes: int = 1 << 30
    """A rank's host memory for cached adapters."""

    prefetch_dir: str = ""
    """A folder with one subfolder an adapter, named by its task id or name."""

    has_graphs: bool = False
    """Whether decode steps with adapters run from CUDA graphs too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedConfig:
    """Whether guided decoding is served, and with which tokenizer."""

    backend: str = ""
    """``xgrammar``, or empty to serve no guides."""

    tokenizer_dir: str = ""
    """A Hugging Face folder; empty means the engine's own."""

    tokenizer_info_path: str = ""
    """A JSON file with ``encoded_vocab``, ``tokenizer_str`` and ``stop_token_ids``, in place of
    a tokenizer."""

    timeout_s: float = 30.0
    """Time after which the compilation of a guide is refused."""

    step_timeout_s: float = 1.0
    """Processor time of one mask; a request whose guide takes longer fails."""

    max_processes: int = 64
    """Guides that are followed at once; each has a process of its own."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ConfigError(
                f"--guide-timeout is {self.timeout_s:g} but a guide needs some time to be "
                "compiled. Name more seconds, or leave it out."
            )
        if self.step_timeout_s <= 0:
            raise ConfigError(
                f"--guide-step-timeout is {self.step_timeout_s:g} but a mask needs some time "
                "to be filled. Name more seconds, or leave it out."
            )
        if self.max_processes < 1:
            raise ConfigError(
                f"--guide-processes is {self.max_processes} but each guide in use needs a "
                "process. Name 1 or more, or leave it out."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The configuration of one model's engine."""

    model: str
    """Name of the served token-level model."""

    engine_dir: str
    """An engine folder, or a Hugging Face folder that is sharded in memory."""

    dtype: str = "auto"
    """``auto`` (the folder's), ``float32``, ``float16`` or ``bfloat16``."""

    quantization: str = "none"
    """How float weights of a Hugging Face folder are quantized as they are loaded: ``none``,
    or a name of `LOAD_METHODS`."""

    load_format: str = "auto"
    """``auto``, or ``random``: random weights made on the device, without reading files."""

    verify_weights: bool = True
    """An engine folder's weights are compared with their checksums while they are loaded."""

    device: str = "auto"
    """``auto``, ``cpu`` or ``cuda``."""

    num_threads: int = 1
    """CPU threads of a rank."""

    gpu_device_ids: tuple[int, ...] = ()
    """Local GPUs of the ranks, in rank order; empty means by local rank."""

    deterministic: bool = False
    """Whether a request's tokens are independent of the other requests in its batches."""

    cuda_graphs: bool = True
    """Whether decode steps on a GPU run from CUDA graphs."""

    max_cuda_graphs: int = 0
    """Most graphs of decode steps, the smallest sizes first; 0 captures all sizes."""

    prompt_graph_tokens: int | None = None
    """Largest step with prompts, in tokens, that runs from a CUDA graph; None: the size up to
    which graphs were measured to be faster, where such steps can be captured."""

    collective_graphs: bool | None = None
    """Whether steps with collectives run from CUDA graphs; None: only if all ranks are on one
    host."""

    first_layer_table: bool | None = None
    """Whether the first layer's queries, keys and values are looked up by token id, see
    `worker/models/first_layer_table.py`; None: where the gain is worth the memory."""

    all_reduce: str = "auto"
    """The all-reduce over the GPUs of a tensor group: ``nccl``; ``peer``: our kernels, which
    read peers' memory, up to a size; ``fused``: these kernels, and in small steps kernels that
    also compute the following norm; ``auto``: ``peer`` where possible, and ``fused`` where that
    is possible and faster."""

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
        drafts = SpeculationConfig(**scheduler["speculation"])
        values["scheduler"] = SchedulerConfig(
            **{**scheduler, "level_queue_sizes": levels, "speculation": drafts}
        )
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
    """Which steps every rank traces, and the folder of the traces."""

    MAX_STEPS: ClassVar[int] = 1000

    first: int
    last: int
    """The last traced step."""

    folder: str

    @classmethod
    def parse(cls, text: str, folder: str, folder_flag: str = "--log-dir") -> ProfileConfig:
        """Parse ``steps=FIRST:LAST``; ``folder_flag`` is the flag that errors name for the
        folder.

        Raises:
            ConfigError: the text has another form, or names more steps than a trace can hold.
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
    """A rank's configuration beside its engine: front ends to connect to, and time limits."""

    engine: EngineConfig
    group: str
    incarnation: int = 0
    frontends: tuple[str, ...] = ()
    """Addresses that rank 0 connects to once the group is warm."""

    start_method: str = ""
    """The group's starter, for the log and the metrics: ``mpirun`` and the like."""

    participants: tuple[int, ...] = ()
    """World ranks that run this engine, in order; empty means all ranks. A rank without an
    engine, such as the orchestrator's in a job, is in no group's list."""

    hang_timeout_s: float = 10.0
    """A step, or the silence of a peer, that lasts longer ends the group; 0 disables this."""

    start_timeout_s: float = 1800.0
    """Longest time from a rank's start to a loaded and warm model."""

    stats_period_ms: int = 100
    """Shortest time between two `StatsReport`."""

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

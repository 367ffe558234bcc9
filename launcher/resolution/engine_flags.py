"""The flags that go into an engine's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimaran.worker.config.experts_config import ExpertsConfig
from trimaran.worker.config.parallel_sizes import RequestedSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """The flags that go into an engine's configuration; None keeps the folder's value."""

    sizes: RequestedSizes = field(default_factory=RequestedSizes)
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    verify_weights: bool = True
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    tokens_per_block: int | None = None
    expected_output_tokens: int = 1024
    depth: int | None = None
    """None: the value of the model's keys, or else the best for the device and the stages."""

    num_threads: int | None = None
    deterministic: bool = False
    prompt_graph_tokens: int | None = None
    collective_graphs: bool | None = None
    first_layer_table: bool | None = None
    all_reduce: str = "auto"
    adapter_graphs: bool = False
    speculative_decoding: str | None = None
    """The drafter; None: the folder's."""

    draft_model: str | None = None
    """The folder of the network that drafts; None: the head in the engine folder."""

    max_draft_tokens: int | None = None
    verifies_all_drafts: bool = False
    guide_timeout_s: float = 30.0
    guide_step_timeout_s: float = 1.0
    max_guide_processes: int = 64
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)

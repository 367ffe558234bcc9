"""What one front-end process serves and where it listens."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from trimaran.server.access.config import AccessConfig, ConnectionLimits


def frontend_title(index: int) -> str:
    """A front end in log lines and among the groups; the first is the only one by default."""
    return f"front end {index}" if index else "front end"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiConfig:
    """The OpenAI port and what it serves."""

    port: int | None = None
    """None: the port is closed."""

    address: str = "0.0.0.0"
    default_max_tokens: int = 0
    """Most tokens of a request that sets no limit; 0: as many as the engine has room for."""

    lora_separator: str = ""
    """Between a model's name and an adapter's; empty: an adapter has its own name alone."""

    chat_template: str = ""
    """A template in place of those of tokenizers' folders."""

    chat_tokenizer: str = ""
    """A tokenizer's folder, whose templates replace those of models' tokenizers."""

    tool_call_parser: str = "auto"
    """The form of tool calls; ``auto``: by the chat template."""

    reasoning_parser: str = "auto"
    """The form of reasoning; ``none``: outputs have none; ``auto``: by the template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """The settings of a front end, sent by the supervisor."""

    model_repository: str
    """Folder of the served models."""

    engine_listen: tuple[str, ...] = ()
    """Addresses on which engine groups dial in (`comm.address`)."""

    token: str = ""
    """Secret that an engine must present on its connection."""

    index: int = 0
    """The index of this front end; the first one has index 0."""

    num_frontends: int = 1
    """Front ends that share the ports."""

    first_frontend: str = ""
    """Address at which the first front end listens for the others."""

    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Token-level model to the names of its worker groups."""

    server_id: str = "triton"
    """Name in the server metadata."""

    http_address: str = "0.0.0.0"
    http_port: int = 8000
    grpc_address: str = "0.0.0.0"
    grpc_port: int = 8001
    metrics_address: str = "0.0.0.0"
    metrics_port: int = 8002
    allow_http: bool = True
    allow_grpc: bool = True
    allow_metrics: bool = True

    http_max_input_bytes: int = 64 << 20
    """Limit on an HTTP body, compressed or not, and on each tensor in JSON."""

    grpc_max_message_bytes: int = 48 << 20
    """Limit on a gRPC message from a client."""

    http_max_pending_bytes: int = 256 << 20
    """Limit on the long bodies that have come, in part or whole, and are not yet decoded."""

    grpc_max_pending_bytes: int = 256 << 20
    """Limit on the long gRPC messages that have come and are not yet decoded."""

    exit_timeout_s: float = 30.0
    """Longest drain, in seconds."""

    replay_timeout_s: float = 120.0
    """Requests of a dead group wait this long for the group to come back, in seconds."""

    max_replays: int = 2
    """Replays of one request before it fails."""

    strict_readiness: bool = True
    model_control_mode: str = "none"
    load_models: tuple[str, ...] = ()
    """Models to load at start in explicit mode; ``*`` means all."""

    python_models: str = "native"
    """Models of a native role that run their own code: see `PythonModels.parse`."""

    repository_poll_s: float = 15.0
    """Pause between two polls of the repository, in seconds."""

    routing: str = "auto"
    """Routing between the groups of a model: ``least_loaded``, ``prefix_aware``, or ``auto``.
    """

    saved_state: bytes = b""
    """The loaded models of the previous front end, serialized; empty for the first one."""

    log_verbose_level: int = 0
    log_kinds: dict[str, bool] = field(default_factory=dict)
    """Whether lines of each kind (``log_info``) are logged; missing kinds are logged."""

    grpc_options: dict[str, int] = field(default_factory=dict)
    """gRPC settings of the operator, by gRPC's own names (``grpc.keepalive_time_ms``)."""

    grpc_max_calls: int = 16384
    """Calls that are open at once; further ones get RESOURCE_EXHAUSTED."""

    grpc_message_timeout_s: float = 300.0
    """The message of a unary call arrives within this time; 0 is no limit."""

    grpc_send_timeout_s: float = 60.0
    """A client of a stream takes a message within this time, or its requests are cancelled."""

    http_limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    """Deadlines and bounds of HTTP connections, those of the metrics port too."""

    access: AccessConfig = field(default_factory=AccessConfig)
    openai: OpenAiConfig = field(default_factory=OpenAiConfig)

    tokenizer_workers: int = 2
    """Processes that tokenize what is long."""

    max_text_bytes: int = 0
    """Longest text that is tokenized; 0: by the engine's longest prompt."""

    max_unread_logits_bytes: int = 0
    """Logits that streams hold together until clients read them; 0: by the vocabularies."""

    http_header_forward_pattern: str = ""
    grpc_header_forward_pattern: str = ""
    """Regular expressions of the headers that models get as parameters; empty: of none."""

    allow_client_shm: bool = False
    """Whether clients may register shared memory."""

    clamps_ids: bool = False
    """Whether ids outside the vocabulary become its first or last id; else they are refused."""

    metrics_config: dict[str, str] = field(default_factory=dict)
    """``--metrics-config`` keys: counter_latencies, histogram_latencies, ..."""

    metrics_interval_s: float = 2.0
    """Longest age of host metrics, in seconds."""

    allow_cpu_metrics: bool = True
    allow_gpu_metrics: bool = True

    @property
    def is_first(self) -> bool:
        """Whether this front end loads models, and adds up the counts of all front ends."""
        return self.index == 0

    def to_wire(self) -> dict[str, Any]:
        """Plain dictionaries, for msgpack."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> FrontendConfig:
        """The inverse of `to_wire`."""
        values = dict(wire)
        values["engine_listen"] = tuple(values["engine_listen"])
        values["load_models"] = tuple(values["load_models"])
        values["groups"] = {name: tuple(names) for name, names in values["groups"].items()}
        values["http_limits"] = ConnectionLimits(**values["http_limits"])
        values["access"] = AccessConfig.from_wire(values["access"])
        values["openai"] = OpenAiConfig(**values["openai"])
        return cls(**values)

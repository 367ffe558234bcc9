"""What the HTTP and gRPC servers share: models, counters, admission and settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelStatisticsResponse

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.admission import Admission
from trimaran.server.config import FrontendConfig
from trimaran.server.group_board import GroupBoard
from trimaran.server.infer_json import RequestedOutput
from trimaran.server.inference import InferRequest, InferResponse, Model
from trimaran.server.log_settings import LogSettings
from trimaran.server.measured_model import MeasuredModel
from trimaran.server.metadata import completed_config
from trimaran.server.metrics import Metrics
from trimaran.server.registry import ModelRegistry, parse_version
from trimaran.server.validation import WireInput

INTERNAL = "internal error; the server's log has the details"
"""What clients are told of a bug."""

CONTROL_REFUSED = "explicit model load / unload is not allowed if polling is enabled"
SHARED_MEMORY_DISABLED = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to "
    "enable."
)
TRACE_REFUSED = "this server does not trace requests; its trace settings cannot be changed"
TRACE_SETTINGS: dict[str, str | list[str]] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
REPOSITORY_NAME_REFUSED = "'repository_name' specification is not supported"


@dataclass(slots=True)
class Service:
    """One front end's state behind its protocols. Used on the event loop only."""

    config: FrontendConfig
    registry: ModelRegistry
    metrics: Metrics
    log_settings: LogSettings = field(default_factory=LogSettings)
    admission: Admission = field(default_factory=Admission)
    board: GroupBoard = field(default_factory=GroupBoard)
    _configs: dict[tuple[str, str], ModelConfig] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """Whether the server takes requests for all its models."""
        return not self.admission.is_draining and self.registry.is_ready

    def model_config(self, model: Model) -> ModelConfig:
        """The completed configuration of a model."""
        key = (model.name, model.version)
        if key not in self._configs:
            self._configs[key] = completed_config(model)
        return self._configs[key]

    def infer(
        self,
        model: Model,
        request: InferRequest,
        inputs: Sequence[WireInput],
        outputs: Sequence[RequestedOutput] = (),
    ) -> AsyncIterator[InferResponse]:
        """Check a parsed request against its model and start it.

        Raises:
            RequestError: the request does not fit; nothing was started.
        """
        names = tuple(output.name for output in outputs)
        request.inputs = self.registry.validator(model).check(inputs, names, request.id)
        request.outputs = names
        return model.infer(request)

    def statistics(self, name: str, version: str) -> ModelStatisticsResponse:
        """Counters of one model version, of all versions of one model, or of all models.

        Raises:
            RequestError: no such model or version.
        """
        number = parse_version(version)
        models = [m for m in self.registry.models() if name in ("", m.name)]
        if not models and name:
            raise RequestError(f"requested model '{name}' is not available")
        if name and number is not None:
            models = [m for m in models if m.version == str(number)]
            if not models:
                raise RequestError(
                    f"requested model version is not available for model '{name}'"
                )
        response = ModelStatisticsResponse()
        for model in models:
            if model.is_ready and isinstance(model, MeasuredModel):
                response.model_stats.append(model.statistics.message())
        return response

    def refuse_control(self) -> RequestError:
        """The error of a request to load or unload a model."""
        if self.config.model_control_mode != "explicit":
            return RequestError(CONTROL_REFUSED, ErrorKind.UNAVAILABLE)
        return RequestError(
            "this server does not load or unload models while it runs; restart it with the "
            "models wanted",
            ErrorKind.UNSUPPORTED,
        )


def unknown_region(kind: str, name: str) -> RequestError:
    """The error of a shared-memory region that nobody registered."""
    return RequestError(
        f"Unable to find {kind} shared memory region: '{name}'", ErrorKind.NOT_FOUND
    )

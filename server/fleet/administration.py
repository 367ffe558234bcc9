"""The decisions of the first front end, and the peers that receive them."""

from __future__ import annotations

from typing import Any, Protocol

from tritonclient.grpc.service_pb2 import ModelStatisticsResponse

from trimaran.server.inference.registry import IndexEntry
from trimaran.server.protocol.load_request import LoadRequest
from trimaran.server.settings import Changes
from trimaran.server.shared_memory.region_specs import Kind, RegionSpec


class Administration(Protocol):
    """Operations that only the first front end of a server may carry out.

    Every other front end forwards these calls to the first front end.
    """

    async def load(self, request: LoadRequest) -> None:
        """Load a model; returns once the model serves.

        Raises:
            RequestError: the model was not loaded.
        """

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Begin to unload a model.

        Raises:
            RequestError: clients may not unload.
        """

    async def index(self, only_ready: bool) -> list[IndexEntry]:
        """The repository index: in explicit mode with every model that could be loaded.

        Raises:
            RequestError: the repository cannot be read.
        """

    async def statistics(self, name: str, version: str) -> ModelStatisticsResponse:
        """Counters of one model version, of all versions of one model, or of all models.

        Raises:
            RequestError: no such model or version.
        """

    async def change_log_settings(self, changes: dict[str, Any]) -> None:
        """Change some log settings of all front ends.

        Raises:
            RequestError: as for `LogSettings.update`.
        """

    async def change_trace_settings(self, model: str, changes: Changes) -> None:
        """Change some trace settings of a model, or of all models, at all front ends.

        Raises:
            RequestError: as for `TraceSettings.update`.
        """

    async def register_region(self, spec: RegionSpec) -> None:
        """Open memory of a client at all front ends.

        Raises:
            RequestError: as for `SharedRegions.register`.
        """

    async def unregister_region(self, kind: Kind, name: str) -> None:
        """Forget memory of clients at all front ends; all of a kind if ``name`` is empty.

        Raises:
            RequestError: clients may not share memory.
        """

    async def refresh(self) -> None:
        """Update the counts of other front ends at the first front end, which sums the
        counts."""


class Peers(Protocol):
    """The front ends that follow this one."""

    def publish(self) -> None:
        """Send the current state to all followers soon."""

    async def await_update(self) -> None:
        """Return once every follower has received the list of models that this front end
        serves."""

    async def served(self, name: str, load_s: float) -> None:
        """Return once every follower serves a model whose load took ``load_s`` seconds here."""

    async def refresh(self) -> None:
        """Bring the followers' counts up to date."""


class NoPeers:
    """`Peers` of a server with a single front end."""

    def publish(self) -> None:
        """Nothing to send."""

    async def await_update(self) -> None:
        """Nothing to wait for."""

    async def served(self, name: str, load_s: float) -> None:
        """Nothing to wait for."""

    async def refresh(self) -> None:
        """Nothing to add up."""

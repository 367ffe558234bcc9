"""What all front ends of a server have to agree on: models, their states and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimaran.server.inference.registry import StateOfVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedState:
    """The first front end's word on what is served."""

    remembered: bytes = b""
    """`Remembered`, the loaded models."""

    states: tuple[StateOfVersion, ...] = ()
    """Every version that is not ready, or not served any more."""

    log_settings: Mapping[str, Any] = field(default_factory=dict)
    trace_settings: Mapping[str, Any] = field(default_factory=dict)
    """Those that were changed, by model."""

    def to_wire(self) -> dict[str, Any]:
        """Plain values, for msgpack."""
        states = [each.to_wire() for each in self.states]
        return {
            "remembered": self.remembered,
            "states": states,
            "log_settings": dict(self.log_settings),
            "trace_settings": dict(self.trace_settings),
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> SharedState:
        """The inverse of `to_wire`."""
        return cls(
            remembered=wire["remembered"],
            states=tuple(map(StateOfVersion.from_wire, wire["states"])),
            log_settings=wire["log_settings"],
            trace_settings=wire["trace_settings"],
        )

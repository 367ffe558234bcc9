"""What a front end leaves to the one that is started after its death."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack

from trimaran.server.inference.registry import StateOfVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedModel:
    """One loaded model, or one that waits for its steps."""

    name: str
    folder: str
    config: bytes
    """The ModelConfig that it was loaded with."""

    version: str = "1"
    fingerprint: str = ""
    groups: tuple[str, ...] = ()
    generation: int = 1
    is_loaded: bool = True
    load_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeavingGroups:
    """One generation of a model that is served no more: its groups end once no request of any
    front end runs on them."""

    model: str
    version: str
    generation: int
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """The loaded models, what became of others, and the last generation of each model that
    ever had one."""

    models: tuple[RememberedModel, ...] = ()
    leaving: tuple[LeavingGroups, ...] = ()
    generations: dict[str, int] = field(default_factory=dict)
    states: tuple[StateOfVersion, ...] = ()
    """Every version that is not ready."""

    def to_bytes(self) -> bytes:
        """For the supervisor to keep."""
        states = [each.to_wire() for each in self.states]
        packed: bytes = msgpack.packb({**asdict(self), "states": states})
        return packed

    @classmethod
    def from_bytes(cls, raw: bytes) -> Remembered:
        """The inverse of `to_bytes`."""
        values: dict[str, Any] = msgpack.unpackb(raw)
        models: Sequence[dict[str, Any]] = values["models"]
        leaving: Sequence[dict[str, Any]] = values["leaving"]
        return cls(
            models=tuple(
                RememberedModel(**{**model, "groups": tuple(model["groups"])})
                for model in models
            ),
            leaving=tuple(
                LeavingGroups(**{**each, "groups": tuple(each["groups"])}) for each in leaving
            ),
            generations=dict(values["generations"]),
            states=tuple(map(StateOfVersion.from_wire, values["states"])),
        )

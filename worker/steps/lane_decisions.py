"""The decisions of one step of all data-parallel ranks, as data and on the wire."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from trimaran.comm.errors import ProtocolError
from trimaran.worker.steps.step_types import SchedulerOutput

_FIRST_BYTE = 0x92
"""Of an encoded pair; that of one lane's decision is another, as it has more parts."""


@dataclass(slots=True)
class LaneDecisions:
    """The decisions of one step, which all lanes run together.

    A lane that has none computes no token of its own. Lanes count their own steps.
    """

    step: int
    lanes: list[SchedulerOutput | None]

    def encode(self) -> bytes:
        """A msgpack list: the step, and each lane's encoded decision or nothing."""
        decisions = [None if lane is None else lane.encode() for lane in self.lanes]
        packed: bytes = msgpack.packb([self.step, decisions])
        return packed

    @staticmethod
    def is_encoded(payload: bytes) -> bool:
        """Whether these are decisions of lanes, and not that of an engine without."""
        return payload[:1] == bytes([_FIRST_BYTE])

    @classmethod
    def decode(cls, payload: bytes) -> LaneDecisions:
        """The inverse of `encode`.

        Raises:
            ProtocolError: ``payload`` holds no encoded decisions.
        """
        try:
            step, decisions = msgpack.unpackb(payload)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ProtocolError(
                f"cannot decode the lanes' decisions of {len(payload)} bytes: {error}"
            ) from error
        lanes = [None if raw is None else SchedulerOutput.decode(raw) for raw in decisions]
        return cls(step, lanes)

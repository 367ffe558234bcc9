"""The decisions of one step for all data-parallel ranks, as data and on the wire."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from trimaran.comm.errors import ProtocolError
from trimaran.worker.steps.step_types import SchedulerOutput

_FIRST_BYTE = 0x92
"""Parts of an encoded pair; an encoded decision of a single rank has more parts."""


@dataclass(slots=True)
class DataParallelDecisions:
    """The decisions of one step, which all dp ranks run together.

    A dp rank without a decision computes no token of its own. Each dp rank counts its own
    steps.
    """

    step: int
    by_dp_rank: list[SchedulerOutput | None]

    def encode(self) -> bytes:
        """A msgpack list: the step, and each dp rank's encoded decision or nothing."""
        decisions = [None if rank is None else rank.encode() for rank in self.by_dp_rank]
        packed: bytes = msgpack.packb([self.step, decisions])
        return packed

    @staticmethod
    def is_encoded(payload: bytes) -> bool:
        """Whether ``payload`` holds decisions of several dp ranks, not a single decision."""
        return payload[:1] == bytes([_FIRST_BYTE])

    @classmethod
    def decode(cls, payload: bytes) -> DataParallelDecisions:
        """The inverse of `encode`.

        Raises:
            ProtocolError: ``payload`` holds no encoded decisions.
        """
        try:
            step, decisions = msgpack.unpackb(payload)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ProtocolError(
                f"cannot decode the dp ranks' decisions of {len(payload)} bytes: {error}"
            ) from error
        dp_ranks = [None if raw is None else SchedulerOutput.decode(raw) for raw in decisions]
        return cls(step, dp_ranks)

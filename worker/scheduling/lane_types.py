"""One step of all lanes as data: what is decided for each, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from trimaran.comm.errors import ProtocolError
from trimaran.worker.scheduling.step_plan import ScheduledStep
from trimaran.worker.steps.step_types import SampledTokens, SchedulerOutput

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


@dataclass(slots=True)
class LaneSteps:
    """The decisions of one step, and the sequences behind each of them."""

    decision: LaneDecisions
    lanes: list[ScheduledStep | None]

    @property
    def num_context(self) -> int:
        """Sequences that compute prompt tokens."""
        return sum(step.num_context for step in self.lanes if step is not None)

    @property
    def num_context_tokens(self) -> int:
        """Their tokens."""
        return sum(step.num_context_tokens for step in self.lanes if step is not None)

    @property
    def num_scheduled(self) -> int:
        """Sequences that compute anything; of beams one."""
        return sum(step.num_scheduled for step in self.lanes if step is not None)

    @property
    def num_generation_tokens(self) -> int:
        """Ids that the step adds to outputs, or finds for beams to choose from."""
        return sum(step.num_generation_tokens for step in self.lanes if step is not None)

    def parts(self, sampled: SampledTokens) -> list[tuple[ScheduledStep, SampledTokens]]:
        """The step of each lane that has one, and what it sampled."""
        steps = [step for step in self.lanes if step is not None]
        return list(zip(steps, sampled.lanes, strict=True))

"""How long a rank waits for others: who waits for one that itself waits gives up after it."""

from __future__ import annotations

from dataclasses import dataclass

from trimaran.comm.topology import ParallelLayout

_SHORTEST, _LONGEST = 0.8, 0.88
"""Of the hang timeout: whoever waits names who is missing before its watchdog ends it."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The longest waits of one rank in a step, in seconds.

    When a rank is lost all others wait within moments, most of them for ranks that wait
    too. The one that waits for the lost one itself is to give up first, as what it says is
    what the operator reads.
    """

    hidden_s: float
    """For the stage before."""

    tensor_s: float
    """For the other ranks of the tensor group, which get their hidden states by themselves."""

    experts_s: float
    """For the ranks of other lanes, each of which sums over its tensor group before."""

    results_s: float
    """On rank 0 for what the last stage sampled, behind all of these."""

    @classmethod
    def of(cls, topology: ParallelLayout, hang_timeout_s: float) -> Waits:
        """Those of a rank, by its stage."""
        num_waits = 3 * topology.pp_size

        def behind(number: int) -> float:
            return hang_timeout_s * (_SHORTEST + (_LONGEST - _SHORTEST) * number / num_waits)

        first = 3 * topology.pp_rank
        return cls(behind(first), behind(first + 1), behind(first + 2), behind(num_waits))

"""What one sequence's way through the engine took: cache blocks and moments."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class SequenceFigures:
    """Blocks of the prompt, and times in nanoseconds on this host's monotonic clock."""

    arrival_ns: int
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_new_blocks: int = 0
    """Taken for the prompt, one that is begun with but written to included."""

    num_reused_blocks: int = 0
    """Found in the cache."""

    def started(self, num_prompt_blocks: int, num_reused: int, num_last: int) -> None:
        """It has a place in a step; a return after preemption does not count."""
        if self.first_scheduled_ns:
            return
        self.first_scheduled_ns = time.monotonic_ns()
        self.num_reused_blocks = num_reused
        self.num_new_blocks = max(0, num_prompt_blocks - num_reused) + num_last

    def token(self) -> None:
        """Another token of output is known."""
        self.last_token_ns = time.monotonic_ns()
        if not self.first_token_ns:
            self.first_token_ns = self.last_token_ns

    def to_wire(self) -> dict[str, int]:
        """For the front end, by the names of its outputs."""
        return {
            "kv_cache_alloc_new_blocks": self.num_new_blocks,
            "kv_cache_reused_blocks": self.num_reused_blocks,
            "kv_cache_alloc_total_blocks": self.num_new_blocks,
            "arrival_time_ns": self.arrival_ns,
            "first_scheduled_time_ns": self.first_scheduled_ns,
            "first_token_time_ns": self.first_token_ns,
            "last_token_time_ns": self.last_token_ns,
        }

"""What engines count since their starts, added up so that it never falls."""

from __future__ import annotations

from collections.abc import Mapping

_Key = tuple[str, str]

SUMS = (
    "iteration_counter", "paused_sequences", "paused_tokens", "kv_host_moved_blocks",
    "kv_host_loaded_blocks", "lora_loaded_adapters",
)  # fmt: skip
"""Of `comm.messages.STATS_KEYS` those that only grow while an engine lives."""


class GroupSums:
    """The `SUMS` of each model, over all of its groups and their restarts.

    Added up from what the living groups say alone they would fall whenever one of several
    dies, and a rate over that is as high as all that the others ever did.
    """

    def __init__(self) -> None:
        self._totals: dict[_Key, dict[str, float]] = {}
        self._seen: dict[_Key, dict[str, Mapping[str, float]]] = {}

    def add(
        self, key: _Key, group: str, stats: Mapping[str, float], incarnation: int = 0
    ) -> None:
        """Count what a group's sums have grown by since they were seen last.

        A group that was started again begins anew at 0; one that has only lost its
        connection goes on. One that is seen for the first time in a later ``incarnation``
        counts from here: a front end before this one had shown what its earlier ones did
        too, and a sum that goes on below that reads as one that began again and grew at once.
        """
        totals = self._totals.setdefault(key, dict.fromkeys(SUMS, 0.0))
        seen = self._seen.setdefault(key, {})
        before = seen.get(group, stats if incarnation else {})
        for name in SUMS:
            now, then = stats.get(name, 0.0), before.get(name, 0.0)
            totals[name] += now - then if now >= then else now
        seen[group] = stats

    def totals(self, key: _Key) -> Mapping[str, float]:
        """The sums of a model; empty before any group has said something."""
        return self._totals.get(key, {})

    def remove_group(self, key: _Key, group: str) -> None:
        """Another group of this name begins at 0."""
        self._seen.get(key, {}).pop(group, None)

    def remove_model(self, key: _Key) -> None:
        """Added again, the model begins at 0."""
        self._totals.pop(key, None)
        self._seen.pop(key, None)

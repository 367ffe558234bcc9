"""What all lanes know of the step that they run, before it begins."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LaneBound:
    """The size of the largest lane's part, which whoever runs a step says to its layers."""

    most_tokens: int = 0
    """Of any lane; 0 where that is not known."""

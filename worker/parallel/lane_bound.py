"""What all lanes know of the step that they run, before it begins."""

from __future__ import annotations

from dataclasses import dataclass

MOST_TO_ALL = 128
"""Up to so many tokens a lane, all ranks get all tokens: none has to wait for counts."""


@dataclass(slots=True)
class LaneBound:
    """The size of the largest lane's part, which whoever runs a step says to its layers."""

    most_tokens: int = 0
    """Of any lane; 0 where that is not known."""

"""The output of `trimaran bench`."""

from __future__ import annotations


def rows(out: str) -> dict[str, float]:
    """The table as numbers."""
    cells = [line.strip("| ").split("|") for line in out.splitlines() if line.startswith("|")]
    return {label.strip(): float(value) for label, value in cells if "Stat" not in label}

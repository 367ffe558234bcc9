"""The categories of endpoints, as Triton's restricted APIs name them."""

from __future__ import annotations

from collections.abc import Iterable

from trimaran.comm.errors import ConfigError

CATEGORIES = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)

ADMIN_CATEGORIES = frozenset(("model-repository", "trace", "logging"))
"""Changes the server for all clients: what the administration port serves, where it is open."""

SERVING_ONLY = frozenset(("inference", "shared-memory"))
"""What the administration port does not serve."""


def parse_categories(text: str, where: str) -> frozenset[str]:
    """The categories of a list with commas between, of ``all``, or of ``none``.

    Raises:
        ConfigError: an unknown name; the message begins with ``where``.
    """
    if text == "all":
        return frozenset(CATEGORIES)
    names = [] if text == "none" else text.split(",")
    _check(names, where)
    return frozenset(names)


def _check(names: Iterable[str], where: str) -> None:
    for name in names:
        if name not in CATEGORIES:
            raise ConfigError(
                f"{where}: unknown category '{name}'. Categories are {', '.join(CATEGORIES)}."
            )

"""Tells the log when a request had to wait for a kernel to be compiled."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def watch_compilations() -> None:
    """From now on log each Triton kernel that is made ready, of this process.

    The warm-up has run every kernel that it knows of. One that is compiled later has kept a
    step waiting, once: the next start finds it in Triton's cache.
    """
    # Imported only now: a CPU needs no Triton.
    from triton import knobs

    knobs.compilation.listener = _log


def _log(*, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: object) -> None:
    name, seconds = metadata.get("name", "?"), times.total / 1e6
    if cache_hit:
        logger.debug("kernel %s read from the cache while serving in %.2f s", name, seconds)
    else:
        logger.warning("kernel %s compiled while serving, which took %.1f s", name, seconds)

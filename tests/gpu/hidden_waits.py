"""A block that forbids hidden device syncs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_hidden_waits() -> Iterator[None]:
    """Raise if a call of torch waits for the device within the block."""
    with warnings.catch_warnings():
        # torch says that the mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")

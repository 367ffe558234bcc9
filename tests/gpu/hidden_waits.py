"""A block in which no call may wait for the device unseen."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_hidden_waits() -> Iterator[None]:
    """Raise where a call of torch waits for the device, as long as the block lasts."""
    with warnings.catch_warnings():
        # torch says that the mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")

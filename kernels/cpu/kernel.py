"""Calls from Python to a compiled CPU kernel."""

from __future__ import annotations

import ctypes
import struct

import torch

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The kernels' numbers of supported dtypes."""


class Kernel:
    """A C function that takes one struct of 8-byte fields.

    Fields are packed into memory that is reused by the next call: several times cheaper than
    passing them one by one. A kernel therefore has one caller at a time.
    """

    def __init__(self, library: ctypes.CDLL, name: str, layout: str) -> None:
        self._pack = struct.Struct("=" + layout).pack_into
        self._args = ctypes.create_string_buffer(struct.calcsize("=" + layout))
        self._function = getattr(library, name)
        self._function.restype = None
        self._pointer = ctypes.c_void_p(ctypes.addressof(self._args))

    def __call__(self, *values: float) -> None:
        self._pack(self._args, 0, *values)
        self._function(self._pointer)

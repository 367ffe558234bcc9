"""Token ids in messages: raw little-endian int32 bytes.

The module stands apart because processes without token ids start without numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def pack_ids(ids: npt.ArrayLike) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(raw: bytes) -> npt.NDArray[np.int32]:
    """The inverse of `pack_ids`; a read-only view, not a copy."""
    return np.frombuffer(raw, dtype="<i4")

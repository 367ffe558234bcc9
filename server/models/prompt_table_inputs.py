"""Prompt embedding tables of token-level requests, and what tells their prompts apart."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from trimaran.comm.errors import RequestError
from trimaran.server.inference.request import Tensor
from trimaran.server.models.sample_inputs import SampleInputs

_TABLE = "prompt_embedding_table"
_EXTRA_IDS = "prompt_table_extra_ids"


def read_table(inputs: SampleInputs, tensor: Tensor | None) -> dict[str, Any] | None:
    """The table as an engine takes it; ``tensor`` is the whole batch's.

    Raises:
        RequestError: it is no table [entries, hidden size].
    """
    array = inputs.array(_TABLE)
    if array is None or tensor is None:
        return None
    if array.ndim != 2:
        raise RequestError(
            f"{_TABLE} has the shape {list(array.shape)} but must be [entries, hidden size]"
        )
    data = np.ascontiguousarray(array).tobytes()
    return {"dtype": tensor.datatype, "shape": list(array.shape), "data": data}


def cache_key(inputs: SampleInputs, num_tokens: int, table: dict[str, Any] | None) -> bytes:
    """What must be equal, beside ids, for prompts to share KV: the extra ids up to the last
    that is not 0, or where there are none the table; empty without a table.

    Raises:
        RequestError: there are extra ids, but not one a token.
    """
    extra = inputs.array(_EXTRA_IDS)
    if extra is not None:
        extra = extra.reshape(-1)
        padded = len(inputs.ids("input_ids"))
        if len(extra) not in (num_tokens, padded):
            raise RequestError(
                f"{_EXTRA_IDS} has {len(extra)} values, but the prompt has {num_tokens} "
                "tokens; send one value a token"
            )
        places = np.flatnonzero(extra[:num_tokens])
        if len(places):
            return _digest(b"extra", extra[: places[-1] + 1].astype("<u8").tobytes())
    if table is None:
        return b""
    return _digest(b"table", repr((table["dtype"], table["shape"])).encode(), table["data"])


def _digest(*parts: bytes) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()

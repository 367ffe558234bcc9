"""The classification extension: an output as its best classes instead of its values."""

from __future__ import annotations

import numpy as np

from trimaran.comm.errors import RequestError
from trimaran.server.inference.request import Tensor
from trimaran.server.inference.tensor_bytes import object_array

_UNSUPPORTED = frozenset(("BYTES", "FP16", "BF16", "BOOL"))


def classify(
    output: Tensor, num_classes: int, *, is_batching: bool, labels: list[str]
) -> Tensor:
    """The ``num_classes`` largest values of each row as ``value:index[:label]`` strings.

    Raises:
        RequestError: the output's datatype has no order that clients can read.
    """
    if output.datatype in _UNSUPPORTED:
        raise RequestError(
            f"class result not available for output due to unsupported type '{output.datatype}'"
        )
    rows = output.data.reshape(output.shape[0] if is_batching else 1, -1)
    count = min(num_classes, rows.shape[1])
    texts: list[bytes] = []
    for row in rows:
        for index in np.argsort(-row.astype(np.float64), kind="stable")[:count]:
            label = f":{labels[index]}" if index < len(labels) else ""
            texts.append(f"{float(row[index]):f}:{index}{label}".encode())
    shape = (len(rows), count) if is_batching else (count,)
    return Tensor(output.name, "BYTES", object_array(texts, shape))

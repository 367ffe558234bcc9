"""Tensors as JSON in both directions, without taking their memory twice."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from trimaran.server.inference.cooperative import CHUNK_BYTES, run_at_once
from trimaran.server.protocol.tensor_json import array_from_json, to_json


def test_many_texts_are_converted_in_place():
    tracemalloc.start()
    try:
        values = [f"w{number}" for number in range(50_000)]
        texts, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        array = array_from_json(values, "BYTES", "stop_words")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert array[0] == b"w0" and array[-1] == b"w49999" and array.shape == (50_000,)
    # The array's references, and one chunk of texts.
    assert peak - texts < 0.2 * texts


@pytest.mark.parametrize("size", [0, 1, 1024, 1025, 200_000])
def test_a_long_output_is_json_text_in_parts_of_a_megabyte(size):
    data = np.linspace(-1, 1, size, dtype=np.float32)
    parts = run_at_once(to_json(data, "FP32", "logits"))
    assert json.loads(b"[" + b"".join(parts) + b"]") == data.tolist()
    longest = 1.05 * CHUNK_BYTES
    assert all(CHUNK_BYTES <= len(part) < longest for part in parts[:-1])
    assert all(0 < len(part) < longest for part in parts[-1:])

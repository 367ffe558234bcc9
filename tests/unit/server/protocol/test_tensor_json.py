"""Texts of a JSON body become byte strings without taking their memory twice."""

from __future__ import annotations

import tracemalloc

from trimaran.server.protocol.tensor_json import array_from_json


def test_many_texts_are_converted_in_place_of_their_list():
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

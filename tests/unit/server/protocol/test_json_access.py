"""JSON bodies of clients, however long."""

import gc
import tracemalloc

import pytest

from trimaran.comm.errors import RequestError
from trimaran.server.protocol import json_access


def num_collections():
    return sum(generation["collections"] for generation in gc.get_stats())


def test_long_bodies_are_read_without_garbage_collections():
    body = b"[" + b"[0]," * 500_000 + b"[0]]"
    assert gc.isenabled()
    before = num_collections()
    value = json_access.parse(body)
    assert num_collections() - before <= 1
    assert len(value) == 500_001
    assert gc.isenabled()


def test_garbage_collection_resumes_after_an_invalid_json_body():
    with pytest.raises(RequestError, match="Missing a comma"):
        json_access.parse(b"[" + b"0 " * 1_000_000)
    assert gc.isenabled()


@pytest.mark.parametrize(
    "value",
    [
        {}, [], "a", None, {"a": []}, {"a": {}, "b": [[], {}]},
        [1, [2.5, [True, ["\udc80é", [[0]]]]]],
        {"choices": [{"index": n, "top": [{"t": [1, {"x": None}]}] * 3} for n in range(3)]},
    ],
)  # fmt: skip
def test_json_in_parts_is_that_of_one_call(value):
    assert json_access.dump_in_parts(value) == json_access.dump(value)
    made = json_access.Fragment(json_access.dump(value))
    assert json_access.dump_in_parts({"a": [made]}) == json_access.dump({"a": [value]})


def test_values_are_counted_outside_of_strings_however_long_these_are():
    """Without memory for each character, and without reading an open string twice."""
    limit = 64 * 100_000
    marks, escaped = b",{[:" * 200_000, b'\\",' * 200_000
    tracemalloc.start()
    for text in (marks, escaped, escaped + b"\\\\"):
        json_access.check_json(b'{"a":"%b"}' % text, limit)
        # The string has no end: its characters are no values either.
        json_access.check_json(b'{"a":"%b' % text, limit)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 16 << 20
    for body in (
        b'["%b",%b]' % (escaped, b"1," * 100_001),
        b'[%b"%b' % (b"1," * 100_001, escaped),
    ):
        with pytest.raises(RequestError, match="at most 100000 values"):
            json_access.check_json(body, limit)


def test_json_may_be_three_quarters_of_a_body():
    json_access.check_json(b" " * 3000, 4000)
    with pytest.raises(RequestError) as caught:
        json_access.check_json(b" " * 3001, 4000)
    assert str(caught.value) == (
        "the JSON of a request may have 3000 bytes, three quarters of --http-max-input-size, "
        "and this has 3001. Send tensors as binary data, or use --http-max-input-size to "
        "increase the limit."
    )

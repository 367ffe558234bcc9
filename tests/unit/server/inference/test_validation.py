"""Checks of requests against a configuration, and their error texts."""

import tracemalloc

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import RequestError
from trimaran.server.inference.validation import MAX_STRINGS, Validator, WireInput

FLAT = 'name: "M" input { name: "X" data_type: TYPE_INT32 dims: 4 }'
BATCHED = """name: "M" max_batch_size: 4
input { name: "a" data_type: TYPE_INT32 dims: 2 }
input { name: "b" data_type: TYPE_STRING dims: -1 }
input { name: "c" data_type: TYPE_FP32 dims: 1 optional: true }
"""


def validator(config):
    return Validator(text_format.Parse(config, ModelConfig()))


def ints(name, *shape, datatype="INT32"):
    return WireInput(name, datatype, shape, np.zeros(int(np.prod(shape)), np.int32))


def words(name, raw, *shape):
    return WireInput(name, "BYTES", shape, raw)


def refusal(config, *inputs, outputs=(), request_id=""):
    with pytest.raises(RequestError) as caught:
        validator(config).check(inputs, outputs, request_id)
    return str(caught.value)


def test_tensors_get_the_claimed_shape():
    found = validator(BATCHED).check(
        [ints("a", 3, 2), words("b", b"\x01\0\0\0x" * 6, 3, 2)], (), ""
    )
    assert found["a"].shape == (3, 2)
    assert found["b"].data.tolist() == [[b"x", b"x"]] * 3


NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to "
    "be prepended to each input shape."
)


@pytest.mark.parametrize(
    ("config", "inputs", "text"),
    [
        (FLAT, [], "expected 1 inputs but got 0 inputs for model 'M'. Got input(s) [], but "
         "missing required input(s) ['X']. Please provide all required input(s)."),
        (BATCHED, [ints("a", 1, 2)], "expected number of inputs between 2 and 3 but got 1 "
         "inputs for model 'M'. Got input(s) ['a'], but missing required input(s) ['b']. "
         "Please provide all required input(s)."),
        (BATCHED, [ints("a", 1, 2), ints("c", 1, 1, datatype="FP32")], "expected number of "
         "inputs between 2 and 3 but got 2 inputs for model 'M'. Got input(s) ['a','c'], but "
         "missing required input(s) ['b']. Please provide all required input(s)."),
        (FLAT, [ints("X", 4), ints("X", 4)], "input 'X' already exists in request"),
        (FLAT, [words("X", b"", 4)], "inference input 'X' data-type is 'BYTES', but model 'M' "
         "expects 'INT32'"),
        (FLAT, [ints("X", 5)], "unexpected shape for input 'X' for model 'M'. Expected [4], "
         "got [5]. "),
        (BATCHED, [ints("a", 2, 3), words("b", b"", 2, 0)], "unexpected shape for input 'a' "
         "for model 'M'. Expected [-1,2], got [2,3]. " + NOTE),
        (BATCHED, [ints("a", 5, 2), words("b", b"", 5, 0)], "inference request batch-size must "
         "be <= 4 for 'M'"),
        (BATCHED, [ints("a", 1, 2), words("b", b"", 2, 0)], "input 'b' batch size does not "
         "match other inputs for 'M'"),
        (BATCHED, [WireInput("a", "INT32", (), b""), words("b", b"", 2, 0)], "input 'a' has no "
         "shape but model requires batch dimension for 'M'"),
        (FLAT, [WireInput("X", "INT32", (4,), bytes(15))], "input byte size mismatch for input "
         "'X' for model 'M'. Expected 16, got 15"),
        (BATCHED, [ints("a", 1, 2), words("b", b"\x01\0\0\0x" * 2, 1, 1)], "unexpected number "
         "of string elements 2 for inference input 'b' for model 'M', expecting 1"),
        (BATCHED, [ints("a", 1, 2), words("b", b"", 1, 1)], "expected 1 string elements for "
         "inference input 'b' for model 'M', got 0"),
        (BATCHED, [ints("a", 1, 2), words("b", b"\x01\0", 1, 1)], "incomplete string length "
         "indicator for inference input 'b'"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_with_the_request_id(config, inputs, text):
    assert refusal(config, *inputs).startswith("[request id: <id_unknown>] " + text)
    assert refusal(config, *inputs, request_id="r").startswith("[request id: r] " + text)


def test_a_cut_string_is_refused_without_the_request_id():
    text = (
        "incomplete string data for inference input 'b', expecting string of length 9 but only"
    )
    found = refusal(BATCHED, ints("a", 1, 2), words("b", b"\x09\0\0\0xy", 1, 1))
    assert found == f"{text} 2 bytes available"


def test_strings_are_counted_before_many_of_them_take_memory():
    raw = b"\x01\0\0\0x" * 100_000
    tracemalloc.start()
    found = refusal(BATCHED, ints("a", 1, 2), words("b", raw, 1, 1))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "unexpected number of string elements 100000 for inference input 'b'" in found
    assert most < 1 << 20


def test_millions_of_strings_are_refused():
    text = f"input 'b' has more than {MAX_STRINGS} strings. Send several requests."
    count = MAX_STRINGS + 1
    for expected in (1, count):
        raw = b"\0\0\0\0" * count
        assert text in refusal(BATCHED, ints("a", 1, 2), words("b", raw, 1, expected))


def test_many_strings_are_read_as_few_are():
    raw = b"".join(b"\x02\0\0\0%02d" % (number % 100) for number in range(20_000))
    found = validator(BATCHED).check([ints("a", 1, 2), words("b", raw, 1, 20_000)], (), "")
    assert found["b"].data.tolist()[0] == [b"%02d" % (n % 100) for n in range(20_000)]
    cut = refusal(BATCHED, ints("a", 1, 2), words("b", raw[:-1], 1, 20_000))
    assert "incomplete string data for inference input 'b'" in cut


def test_unknown_names_are_refused_without_the_requests_id():
    assert refusal(FLAT, ints("Z", 4)) == "unexpected inference input 'Z' for model 'M'"
    assert refusal(FLAT, ints("X", 4), outputs=["Q"]) == (
        "unexpected inference output 'Q' for model 'M'"
    )

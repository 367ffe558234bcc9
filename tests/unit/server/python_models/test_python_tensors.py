"""The tensors that a Python model's code works with."""

import numpy as np
import pytest

from trimaran.comm.messages.bulk import BulkSender
from trimaran.server.python_models import utils as pb_utils
from trimaran.server.python_models.tensors import Tensor, TritonModelException
from trimaran.server.python_models.wire import (
    FrameBuffer,
    Respond,
    encode,
    open_tensors,
    released,
)


def there_and_back(tensor, datatype=None):
    """Over the wire and back, as a response's tensor."""
    bulk = BulkSender()
    sent = Respond(key=1, tensors=[tensor.to_packed(datatype)])
    (received,) = FrameBuffer().feed(encode(sent, bulk))
    release = open_tensors(received)
    if release is not None:
        released(release, bulk)
    assert not bulk.num_held
    return Tensor.from_packed(received.tensors[0])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.array([[True, False]]),
        np.array(1.5, np.float16),
        np.zeros((0, 4), np.uint64),
        np.arange(1 << 17, dtype=np.float32).reshape(2, -1),
        np.array([["größer".encode(), b"a\0"]], dtype=object),
        np.array([b"%d" % number for number in range(1 << 15)], dtype=object).reshape(2, -1),
        np.array([b"a" * (2 << 20), b"", b"\0b"], dtype=object),
    ],
)
def test_a_tensor_keeps_its_values_and_is_writable(array):
    tensor = there_and_back(Tensor("x", array))
    found = tensor.as_numpy()
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tolist() == array.tolist()
    assert found.flags.writeable
    assert tensor.triton_dtype() == pb_utils.numpy_to_triton_type(array.dtype)


def test_large_tensors_do_not_enlarge_messages():
    bulk = BulkSender()
    for array in (
        np.zeros(1 << 20, np.float32),
        np.array([b"many"] * (1 << 15), dtype=object),
        np.array([b"long" * (1 << 15)], dtype=object),
    ):
        sent = Respond(key=1, tensors=[Tensor("x", array).to_packed()])
        assert len(encode(sent, bulk)) < 100
    assert bulk.num_held == 3


def test_texts_and_fixed_width_strings_become_bytes():
    for array in (np.array(["größer"]), np.array(["größer"], dtype=object)):
        found = there_and_back(Tensor("x", array)).as_numpy()
        assert found.tolist() == ["größer".encode()]


def test_bf16_tensors_may_be_given_as_bit_patterns():
    tensor = there_and_back(Tensor("x", np.array([0x3F80], np.uint16)), "BF16")
    assert tensor.triton_dtype() == 14
    assert tensor.as_numpy().tolist() == [0x3F80]


def test_tensors_of_other_libraries_are_shared_and_not_copied():
    array = np.arange(4.0)
    tensor = Tensor.from_dlpack("x", array)
    assert np.shares_memory(tensor.as_numpy(), array)
    assert np.shares_memory(Tensor.from_dlpack("x", tensor.to_dlpack()).as_numpy(), array)
    with pytest.raises(TritonModelException, match="not contiguous"):
        Tensor.from_dlpack("x", array[::2])


def test_values_that_are_no_tensors_are_refused_by_name():
    for value, text in (
        ([1], "'x' is given a list, not a numpy array"),
        (np.array([1j]), "'x' has the numpy type complex128"),
    ):
        with pytest.raises(TritonModelException, match=text):
            Tensor("x", value)
    with pytest.raises(TritonModelException, match=r"'x' is FP64, but .* says FP32"):
        Tensor("x", np.array([1.0])).to_packed("FP32")


def test_texts_of_clients_need_not_be_valid_utf8():
    sent = Respond(key=1, tensors=[], parameters={"gr\udcfcn": "\udcff"})
    (received,) = FrameBuffer().feed(encode(sent, BulkSender()))
    assert received.parameters == sent.parameters


@pytest.mark.parametrize("value", [None, [1], b"x", 1 << 63, np.int64(3)])
def test_a_response_with_an_unsendable_parameter_is_refused(value):
    fine = pb_utils.InferenceResponse([], parameters={"a": -(1 << 63), "b": True, "c": 0.5})
    assert fine.message(1, {}, is_final=True).parameters == {
        "a": -(1 << 63),
        "b": True,
        "c": 0.5,
    }
    for parameters in ({"k": value}, {3: "x"}):
        response = pb_utils.InferenceResponse([], parameters=parameters)
        with pytest.raises(TritonModelException, match="but parameters have texts as names"):
            response.message(1, {}, is_final=True)


def test_serialized_strings_are_returned_flat():
    array = np.array([[b"a", b""], [b"b\0", "größer".encode()]], dtype=object)
    raw = pb_utils.serialize_byte_tensor(array)
    assert pb_utils.deserialize_bytes_tensor(raw).tolist() == array.ravel().tolist()

"""Tensors in memory that clients share, with tritonclient's own shared memory."""

import asyncio
import os
import secrets
from contextlib import contextmanager

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException, serialize_byte_tensor
from tritonclient.utils import shared_memory as shm

from tests.unit.server.conftest import RunningServer
from trimaran.comm.errors import RequestError
from trimaran.server.inference.request import InferRequest
from trimaran.server.inference.validation import WireInput
from trimaran.server.protocol.infer_json import ParsedInfer
from trimaran.server.shared_memory.region_specs import RegionSlice, RegionSpec
from trimaran.server.shared_memory.regions import SharedRegions

MAX_BYTES = 1 << 20


@pytest.fixture(scope="module")
def sharing():
    running = RunningServer(
        allow_client_shm=True, http_max_input_bytes=MAX_BYTES, grpc_max_message_bytes=MAX_BYTES
    )
    yield running
    running.close()


@pytest.fixture(params=[http, grpc], ids=["http", "grpc"])
def wire(request, sharing):
    """A module of tritonclient with a client of the server."""
    url = sharing.http_url if request.param is http else sharing.grpc_url
    client = request.param.InferenceServerClient(url)
    yield request.param, client
    client.unregister_system_shared_memory()
    client.close()


@contextmanager
def memory(num_bytes):
    """A region of tritonclient's, and its key."""
    key = "/test_" + secrets.token_hex(6)
    region = shm.create_shared_memory_region("local", key, num_bytes)
    try:
        yield region, key
    finally:
        shm.destroy_shared_memory_region(region)


def in_region(module, name, shape, datatype, num_bytes, offset=0):
    tensor = module.InferInput(name, shape, datatype)
    tensor.set_shared_memory("r", num_bytes, offset)
    return tensor


def out_region(module, name, num_bytes, offset):
    output = module.InferRequestedOutput(name)
    output.set_shared_memory("r", num_bytes, offset)
    return output


def test_inputs_and_outputs_stay_in_the_clients_memory(wire):
    module, client = wire
    numbers = np.arange(8, dtype=np.float32)
    with memory(4096) as (region, key):
        shm.set_shared_memory_region(region, [numbers], offset=128)
        client.register_system_shared_memory("r", key, 4096 - 64, offset=64)
        result = client.infer(
            "echo",
            [in_region(module, "FP32", [8], "FP32", 32, offset=64)],
            outputs=[out_region(module, "OUT_FP32", 32, offset=1024)],
        )
        assert shm.get_contents_as_numpy(region, np.float32, [8], 1024 + 64).tolist() == (
            numbers.tolist()
        )
    output = result.get_output("OUT_FP32")
    assert (output["shape"] if isinstance(output, dict) else list(output.shape)) == [8]


def test_strings_have_their_lengths_in_the_clients_memory(wire):
    module, client = wire
    with memory(4096) as (region, key):
        texts = np.array([b"one", "zw\u00f6lf".encode()], dtype=object)
        shm.set_shared_memory_region(region, [serialize_byte_tensor(texts)])
        client.register_system_shared_memory("r", key, 4096)
        client.infer(
            "echo",
            [in_region(module, "TEXT", [2], "BYTES", 4 + 3 + 4 + 6)],
            outputs=[out_region(module, "OUT_TEXT", 64, offset=512)],
        )
        found = shm.get_contents_as_numpy(region, np.object_, [2], 512)
        assert found.tolist() == texts.tolist()


def test_regions_have_a_status_until_they_are_unregistered(wire):
    module, client = wire
    with memory(64) as (_, key):
        client.register_system_shared_memory("r", key, 48, offset=16)
        status = client.get_system_shared_memory_status("r")
        if module is http:
            facts = [(e["name"], e["key"], e["offset"], e["byte_size"]) for e in status]
        else:
            regions = status.regions.values()
            facts = [(e.name, e.key, e.offset, e.byte_size) for e in regions]
        assert facts == [("r", key, 16, 48)]
        with pytest.raises(InferenceServerException, match="'r' already in manager"):
            client.register_system_shared_memory("r", key, 8)
        client.unregister_system_shared_memory("r")
        with pytest.raises(InferenceServerException, match="Unable to find system shared"):
            client.get_system_shared_memory_status("r")
        client.unregister_system_shared_memory("r")


def test_an_output_that_does_not_fit_its_place_is_an_error_that_writes_nothing(wire):
    module, client = wire
    with memory(64) as (region, key):
        shm.set_shared_memory_region(region, [np.full(16, 7.0, np.float32)])
        client.register_system_shared_memory("r", key, 64)
        output = out_region(module, "OUT_FP32", 4, offset=32)
        text = r"output 'OUT_FP32' \(4 bytes\) should be at least 8 bytes to hold the results"
        with pytest.raises(InferenceServerException, match=text):
            client.infer("echo", [in_region(module, "FP32", [2], "FP32", 8)], outputs=[output])
        assert set(shm.get_contents_as_numpy(region, np.float32, [16])) == {7.0}


def test_a_file_that_its_client_shortens_ends_no_server(wire):
    module, client = wire
    with memory(4096) as (_, key):
        client.register_system_shared_memory("r", key, 4096)
        os.truncate("/dev/shm" + key, 0)
        given = in_region(module, "FP32", [8], "FP32", 32, offset=2048)
        with pytest.raises(InferenceServerException, match="has become shorter"):
            client.infer("echo", [given])
        tensor = module.InferInput("FP32", [1], "FP32")
        tensor.set_data_from_numpy(np.zeros(1, np.float32))
        with pytest.raises(InferenceServerException, match="has become shorter"):
            client.infer("echo", [tensor], outputs=[out_region(module, "OUT_FP32", 8, 8)])
        assert os.path.getsize("/dev/shm" + key) == 0
        assert client.is_server_live()


def test_a_client_cannot_have_more_read_than_a_request_may_hold(wire):
    module, client = wire
    with memory(MAX_BYTES * 2) as (_, key):
        client.register_system_shared_memory("r", key, MAX_BYTES * 2)
        count = MAX_BYTES // 4
        client.infer(
            "echo", [in_region(module, "FP32", [count], "FP32", MAX_BYTES)],
            outputs=[out_region(module, "OUT_FP32", MAX_BYTES, MAX_BYTES)],
        )  # fmt: skip
        given = in_region(module, "FP32", [count + 1], "FP32", MAX_BYTES + 4)
        with pytest.raises(InferenceServerException, match="--http-max-input-size"):
            client.infer("echo", [given])


def test_keys_lead_nowhere_but_to_files_of_clients(wire, tmp_path):
    _, client = wire
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 64)
    name = "test_" + secrets.token_hex(6)
    os.symlink(secret, f"/dev/shm/{name}")
    os.mkfifo(f"/dev/shm/{name}-pipe")
    os.mkdir(f"/dev/shm/{name}-folder")
    try:
        keys = [f"/../{secret}", str(secret), "..", "", f"/{name}", f"{name}-pipe",
                f"{name}-folder", "x" * 300, "/absent", f"{name}-folder/x"]  # fmt: skip
        for key in keys:
            with pytest.raises(InferenceServerException, match="Unable to open shared memory"):
                client.register_system_shared_memory("r", key, 8)
    finally:
        os.unlink(f"/dev/shm/{name}")
        os.unlink(f"/dev/shm/{name}-pipe")
        os.rmdir(f"/dev/shm/{name}-folder")
    for key in ("triton_python_backend_shm_region_1", "/trimaran-x", "/nccl-abc"):
        with pytest.raises(InferenceServerException, match="contains the reserved prefix"):
            client.register_system_shared_memory("r", key, 8)


def test_cuda_memory_is_refused_where_there_is_no_gpu(wire):
    _, client = wire
    handle = b"QUFB" * 21 + b"QQ=="
    with pytest.raises(InferenceServerException, match="'c', GPUs not supported"):
        client.register_cuda_shared_memory("c", handle, 0, 8)
    client.unregister_cuda_shared_memory("c")


def test_a_long_body_may_have_inputs_in_regions(sharing):
    client = http.InferenceServerClient(sharing.http_url)
    with memory(64) as (region, key):
        shm.set_shared_memory_region(region, [np.arange(2, dtype=np.int64)])
        client.register_system_shared_memory("r", key, 64)
        body = {
            "inputs": [
                {"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": ["x" * 400_000]},
                {"name": "INT64", "datatype": "INT64", "shape": [2],
                 "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 16}},
            ],
            "outputs": [{"name": "OUT_INT64"}],
        }  # fmt: skip
        (output,) = sharing.post("/v2/models/echo/infer", body).json["outputs"]
        assert output["data"] == [0, 1]
        client.unregister_system_shared_memory("r")


def test_other_requests_take_their_turn_while_many_places_are_read(sharing):
    async def scenario(key):
        num_turns, is_over = 0, False

        async def others():
            nonlocal num_turns
            while not is_over:
                num_turns += 1
                await asyncio.sleep(0)

        service, place = sharing.service, RegionSlice("many", 0, 8)
        spec = RegionSpec(kind="system", name="many", key=key, num_bytes=8)
        await service.register_region(spec)
        wires = [WireInput(str(n), "FP32", (2,), b"", place) for n in range(1600)]
        task = asyncio.ensure_future(others())
        await service.find_slices(ParsedInfer(InferRequest(model_name="m"), wires), MAX_BYTES)
        is_over = True
        await task
        await service.unregister_region("system", "many")
        assert all(wire.data == b"12345678" for wire in wires)
        return num_turns

    with memory(8) as (region, key):
        shm.set_shared_memory_region(region, [np.frombuffer(b"12345678", np.uint8)])
        assert sharing.run(scenario(key)) > 100


def test_the_name_of_a_region_has_a_limit(wire):
    _, client = wire
    with memory(8) as (_, key):
        with pytest.raises(InferenceServerException, match=r"name has 5000 bytes, .* at most"):
            client.register_system_shared_memory("x" * 5000, key, 8)


def test_a_request_keeps_its_region_when_that_is_unregistered():
    async def scenario(key):
        regions = SharedRegions(is_allowed=True)
        await regions.register(RegionSpec(kind="system", name="r", key=key, num_bytes=64))
        place = await regions.find(RegionSlice("r", 4, 8))
        regions.unregister("system", "")
        with pytest.raises(RequestError, match="Unable to find shared memory region: 'r'"):
            await regions.find(RegionSlice("r", 4, 8))
        return await place.read()

    with memory(64) as (region, key):
        shm.set_shared_memory_region(region, [np.arange(4, dtype=np.int32)])
        assert np.frombuffer(asyncio.run(scenario(key)), np.int32).tolist() == [1, 2]

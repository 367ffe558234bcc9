"""Memory of a client on a GPU, opened by a process without torch."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import torch

SERVER = """
import asyncio, sys
import numpy as np
from trimaran.comm.errors import RequestError
from trimaran.server.shared_memory.region_specs import RegionSlice, RegionSpec
from trimaran.server.shared_memory.regions import SharedRegions

async def main():
    regions, handle = SharedRegions(is_allowed=True), bytes.fromhex(sys.argv[1])
    def spec(name, **facts):
        facts = {"num_bytes": 4096, "raw_handle": handle, **facts}
        return RegionSpec(kind="cuda", name=name, **facts)
    for refused in (spec("big", num_bytes=1 << 50), spec("wrong", raw_handle=bytes(64)),
                    spec("absent", device_id=64), spec("empty", num_bytes=0)):
        try:
            await regions.register(refused)
        except RequestError as error:
            print(refused.name, error)
    await regions.register(spec("r"))
    await regions.register(spec("again"))
    source = await regions.find(RegionSlice("r", 16, 32))
    target = await regions.find(RegionSlice("again", 1024, 4096 - 1024))
    values = np.frombuffer(await source.read(), np.float32)
    print(values.tolist())
    await target.write("OUT", [(values * 2).tobytes(), b"end!"])
    regions.unregister("cuda", "")
    print("torch" in sys.modules)

asyncio.run(main())
"""


def _handle(tensor: torch.Tensor) -> bytes:
    runtime = ctypes.CDLL(None)
    if not hasattr(runtime, "cudaIpcGetMemHandle"):
        runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '12').split('.')[0]}")
    handle = (ctypes.c_byte * 64)()
    address = ctypes.c_void_p(tensor.data_ptr())
    assert runtime.cudaIpcGetMemHandle(ctypes.byref(handle), address) == 0
    return bytes(handle)


def test_a_front_end_reads_and_writes_cuda_memory_of_a_client_without_torch():
    # An allocation of its own: a handle names the whole allocation.
    memory = torch.zeros(16 << 20, dtype=torch.float32, device="cuda")
    memory[4:12] = torch.arange(8, dtype=torch.float32)
    torch.cuda.synchronize()
    found = subprocess.run(
        [sys.executable, "-c", SERVER, _handle(memory).hex()],
        capture_output=True, text=True, timeout=120, env=dict(os.environ),
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        "big failed to register shared memory region 'big': invalid args",
        "wrong failed to register shared memory region: invalid args",
        "absent failed to register shared memory region: invalid args",
        "empty failed to register shared memory region 'empty': invalid args",
        "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]",
        "False",
    ]
    torch.cuda.synchronize()
    written = memory[256:265].cpu()
    assert written[:8].tolist() == [2.0 * value for value in range(8)]
    assert written[8:].view(torch.uint8).numpy().tobytes() == b"end!"

"""The host's memory for KV blocks is locked by CUDA, in all its pieces."""

import pytest
import torch

from trimaran.worker.kv_cache.host_memory import CudaLocks, HostMemory

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
ROW_BYTES = 3 << 19


@pytest.fixture
def memory():
    """Several pieces, locked by several threads."""
    memory = HostMemory(40, ROW_BYTES, CudaLocks(DEVICE), num_threads=3, chunk_bytes=1 << 22)
    yield memory
    memory.close()


def test_every_row_is_copied_to_the_device_and_back(memory):
    rows = memory.rows(torch.int32)
    values = torch.arange(rows.numel(), dtype=torch.int32, device=DEVICE).view_as(rows)

    for row, value in zip(rows, values, strict=True):
        row.copy_(value, non_blocking=True)
    back = torch.zeros_like(values)
    for row, value in zip(rows, back, strict=True):
        value.copy_(row, non_blocking=True)
    torch.cuda.synchronize()

    assert torch.equal(rows, values.cpu())
    assert torch.equal(back, values)
    assert all(row.is_pinned() for row in rows)


@pytest.mark.parametrize("to_host", [True, False])
def test_a_copy_does_not_wait_for_the_device(memory, to_host):
    row = memory.rows(torch.uint8)[7]
    there = torch.full((ROW_BYTES,), 5, dtype=torch.uint8, device=DEVICE)
    target, source = (row, there) if to_host else (there, row)
    torch.cuda.synchronize()

    torch.cuda._sleep(400_000_000)
    target.copy_(source, non_blocking=True)

    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), source.cpu())


def test_closed_host_memory_is_not_locked():
    memory = HostMemory(9, ROW_BYTES, CudaLocks(DEVICE), chunk_bytes=1 << 22)
    rows = memory.rows(torch.uint8)
    assert rows[0].is_pinned() and rows[-1].is_pinned()

    memory.close()

    assert not any(row.is_pinned() for row in rows)

"""Host memory for KV blocks: locking, freeing and refusals."""

import gc
import mmap
import resource
import weakref
from pathlib import Path

import pytest
import torch

from trimaran.comm.errors import ConfigError
from trimaran.worker.kv_cache import host_memory
from trimaran.worker.kv_cache.host_memory import HostMemory

PAGE = mmap.PAGESIZE


class Locks:
    """Locks ranges like the driver: whole pages, no page twice. The first ``room`` calls
    succeed."""

    def __init__(self, room=1000):
        self.room = room
        self.ranges = {}
        self.resident = []

    def lock(self, address, num_bytes):
        assert address % PAGE == num_bytes % PAGE == 0
        assert all(
            address + num_bytes <= first or first + held <= address
            for first, held in self.ranges.items()
        )
        if len(self.resident) >= self.room:
            return 2
        self.resident.append(resident_bytes(address, num_bytes))
        self.ranges[address] = num_bytes
        return 0

    def unlock(self, address):
        del self.ranges[address]


def resident_bytes(address, num_bytes):
    """Bytes of a range for which the kernel has allocated pages."""
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(address // PAGE * 8)
        entries = memoryview(pages.read(num_bytes // PAGE * 8)).cast("Q")
    return sum(entry >> 63 for entry in entries) * PAGE


@pytest.mark.parametrize("row_bytes", [1, 24, 1000, PAGE, 3 * PAGE, PAGE + 512])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_row_is_touched_and_locked_and_lies_within_one_locked_range(
    row_bytes, num_threads
):
    locks = Locks()
    num_rows = 20000 if row_bytes < PAGE else 70
    memory = HostMemory(
        num_rows, row_bytes, locks, num_threads=num_threads, chunk_bytes=5 * PAGE
    )
    rows = memory.rows(torch.uint8)

    begin, size = rows.data_ptr(), num_rows * row_bytes
    assert rows.shape == (num_rows, row_bytes)
    assert begin in locks.ranges
    assert sum(locks.ranges.values()) == -(-size // PAGE) * PAGE
    assert sorted(locks.resident) == sorted(locks.ranges.values())
    assert all((first - begin) % row_bytes == 0 for first in locks.ranges)
    if row_bytes in (PAGE, 3 * PAGE):
        assert len(locks.ranges) > 7
    memory.close()
    assert locks.ranges == {}


def test_rows_of_every_dtype_start_as_zeros():
    rows = HostMemory(5, 12, None).rows(torch.bfloat16)

    assert rows.shape == (5, 6)
    assert rows.dtype is torch.bfloat16
    assert not rows.any()
    rows[3] = torch.arange(6)
    assert rows[3].tolist() == list(range(6))
    assert rows[4].tolist() == [0] * 6


def test_memory_without_locks_is_not_touched():
    memory = HostMemory(64, PAGE)

    assert resident_bytes(memory.rows(torch.uint8).data_ptr(), 64 * PAGE) == 0


def test_host_memory_is_freed_after_its_last_view():
    locks = Locks()
    memory = HostMemory(100, PAGE, locks)
    view = memory.rows(torch.int32)[7]
    view.fill_(7)
    mapping = weakref.ref(memory._mapping)

    memory.close()
    del memory
    gc.collect()
    assert view.sum() == 7 * PAGE // 4

    del view
    gc.collect()
    assert mapping() is None


def test_a_forked_process_does_not_inherit_host_memory():
    memory = HostMemory(64, PAGE, Locks())
    address = memory.rows(torch.uint8).data_ptr()
    lines = Path("/proc/self/smaps").read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if _holds(line.split()[0], address))
    flags = next(line for line in lines[place:] if line.startswith("VmFlags"))

    assert "dc" in flags.split()


def _holds(word, address):
    first, dash, end = word.partition("-")
    return bool(dash) and int(first, 16) <= address < int(end, 16)


@pytest.mark.parametrize("room", [0, 1, 4])
def test_refused_memory_locks_name_bytes_limit_and_remedy_and_leave_nothing_locked(
    room,
):
    locks = Locks(room)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "without a limit" if limit == resource.RLIM_INFINITY else f"up to {limit} bytes"

    with pytest.raises(ConfigError) as refusal:
        HostMemory(100, PAGE, locks, chunk_bytes=PAGE)

    text = str(refusal.value)
    assert f"kv_cache_host_memory_bytes: {100 * PAGE} bytes" in text
    assert "cannot be locked (CUDA error 2)" in text
    assert f"may lock memory {allowed} (RLIMIT_MEMLOCK). Lower it, raise" in text
    assert locks.ranges == {}


def test_more_memory_than_is_free_is_refused_before_a_page_is_touched(monkeypatch):
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: 9 * PAGE)
    locks = Locks()

    with pytest.raises(ConfigError, match=f"{10 * PAGE} bytes .* but {9 * PAGE} are free"):
        HostMemory(10, PAGE, locks)
    assert locks.resident == []
    HostMemory(9, PAGE, locks).close()


@pytest.mark.parametrize(
    ("size", "reason"), [(1 << 40, "Cannot allocate memory"), (1 << 50, "int too large")]
)
def test_more_memory_than_can_be_mapped_is_refused(size, reason):
    with pytest.raises(ConfigError, match=rf"cannot be mapped \(.*{reason}.*\)"):
        HostMemory(1 << 20, size)

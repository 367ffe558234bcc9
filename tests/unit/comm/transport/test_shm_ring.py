"""The control ring between real processes."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from trimaran.comm.deadlines import wait_for
from trimaran.comm.errors import ConfigError, PeerLostError
from trimaran.comm.transport.shared_memory import Futex, SharedSegment
from trimaran.comm.transport.shm_ring import RingReader, RingWriter, ShmRing

READER = """
import hashlib, sys
from trimaran.comm.transport.shared_memory import SharedSegment
from trimaran.comm.transport.shm_ring import RingReader
handle = tuple(int(part) for part in sys.argv[1].split(","))
readers, reader, slot_bytes, num_slots = (int(part) for part in sys.argv[2:6])
ring = RingReader(SharedSegment.attach(handle), readers, reader, slot_bytes, num_slots)
print("attached", flush=True)
digest = hashlib.sha256()
while (payload := ring.read(60.0)) != b"end":
    digest.update(len(payload).to_bytes(8, "little") + payload)
print(digest.hexdigest(), flush=True)
"""


def start_reader(segment: SharedSegment, shape: tuple[int, int, int, int]) -> subprocess.Popen:
    handle = ",".join(str(part) for part in segment.handle)
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", READER, handle, *map(str, shape)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "attached\n"
    return process


def make_pair(slot_bytes: int, num_slots: int) -> tuple[RingWriter, RingReader]:
    segment = SharedSegment.create(ShmRing.segment_bytes(1, slot_bytes, num_slots))
    return RingWriter(segment, 1, slot_bytes, num_slots), RingReader(
        segment, 1, 0, slot_bytes, num_slots
    )


def test_every_reader_process_gets_every_message_whole_and_in_order():
    slot_bytes, num_slots = 256, 8
    segment = SharedSegment.create(ShmRing.segment_bytes(2, slot_bytes, num_slots))
    writer = RingWriter(segment, 2, slot_bytes, num_slots)
    readers = [start_reader(segment, (2, r, slot_bytes, num_slots)) for r in range(2)]
    rng = random.Random(7)
    digest = hashlib.sha256()

    for _ in range(500):
        payload = rng.randbytes(rng.choice((0, 1, 255, 256, 257, 512, 5000)))
        digest.update(len(payload).to_bytes(8, "little") + payload)
        writer.write(payload, timeout_s=30.0)
    writer.write(b"end", timeout_s=30.0)

    assert [reader.communicate()[0].strip() for reader in readers] == [digest.hexdigest()] * 2


def test_a_message_larger_than_the_ring_passes_while_the_reader_reads():
    writer, reader = make_pair(slot_bytes=64, num_slots=4)
    payload = random.Random(1).randbytes(10_000)
    thread = threading.Thread(target=writer.write, args=(payload, 30.0))
    thread.start()

    received = reader.read(30.0)
    thread.join()

    assert received == payload


def test_a_reader_that_falls_behind_is_named():
    writer, _ = make_pair(slot_bytes=64, num_slots=2)
    writer.write(b"1", 1.0)
    writer.write(b"2", 1.0)

    with pytest.raises(PeerLostError, match=r"reader\(s\) \[0\]"):
        writer.write(b"3", 0.05)


def test_a_read_without_a_message_in_time_returns_none():
    _, reader = make_pair(slot_bytes=64, num_slots=2)

    assert reader.read(0.01) is None


def test_a_message_cut_off_by_the_writers_death_is_an_error():
    segment = SharedSegment.create(ShmRing.segment_bytes(1, 64, 4))
    writer = RingWriter(segment, 1, 64, 4)
    with pytest.raises(PeerLostError):
        writer.write(bytes(1000), timeout_s=0.0)
    reader = RingReader(segment, 1, 0, 64, 4)

    with pytest.raises(PeerLostError, match="inside a message"):
        reader.read(0.05)


def test_a_waiting_reader_process_uses_no_processor_time():
    segment = SharedSegment.create(ShmRing.segment_bytes(1))
    process = start_reader(segment, (1, 0, 16 << 10, 64))

    # The wake-up may still be on its way when the ring is first read.
    is_asleep = wait_for(lambda: _ticks_of_half_a_second(process.pid) <= 1, 200.0)
    RingWriter(segment, 1).write(b"end", 5.0)
    process.communicate()

    assert is_asleep


def test_a_killed_process_leaves_no_file_behind():
    code = (
        "import os, time\n"
        "from trimaran.comm.transport.shared_memory import SharedSegment\n"
        "segment = SharedSegment.create(1 << 20)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()

    assert not [n for n in set(os.listdir("/dev/shm")) - before if "trimaran" in n]


def test_shared_memory_of_a_dead_process_cannot_be_attached():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()

    with pytest.raises(ConfigError, match="shared memory of rank process"):
        SharedSegment.attach((process.pid, 3, 4096))


def test_a_futex_wait_returns_at_once_when_the_word_already_changed():
    segment = SharedSegment.create(4096)
    segment.words()[0] = 5
    start = time.monotonic()

    Futex(segment.address).wait(expected=4, timeout_s=60.0)

    assert time.monotonic() < start + 30


def _ticks_of_half_a_second(pid: int) -> int:
    """Processor time of a process in the next half second; a tick is 10 ms."""
    before = _cpu_ticks(pid)
    time.sleep(0.5)
    return _cpu_ticks(pid) - before


def _cpu_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])

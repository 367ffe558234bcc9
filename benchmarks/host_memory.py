"""Seconds to lock host memory for KV blocks, and the speed of copies from and to it.

python benchmarks/host_memory.py --gib 32 --threads 1 4 8 --rounds 2 --json hostmem.jsonl

``torch`` is memory of ``pin_memory``, ``registered`` is ordinary memory that one call locks,
``mapped N`` is `worker/kv_cache/host_memory.py` with N threads. Every other round runs the
kinds in reverse order, because the first access to a page of a virtual machine may be slow.
Copies are of one block each on a separate stream, as `worker/kv_cache/host_copies.py` makes
them. ``launch`` is the host's time to start a copy. If the host waited for the copy, ``launch``
would be about the time of the copy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimaran.bench.results.results import append, environment
from trimaran.worker.kv_cache.host_memory import CudaLocks, HostMemory
from trimaran.worker.serving.rank_process import pin_near

Close = Callable[[], None]


def torchs(num_rows: int, row_bytes: int) -> tuple[Tensor, Close]:
    """Memory of torch's pinned allocator, which keeps the memory until its cache is emptied."""
    rows = torch.empty((num_rows, row_bytes), dtype=torch.uint8, pin_memory=True)
    return rows, torch._C._host_emptyCache  # type: ignore[attr-defined]


def registered(num_rows: int, row_bytes: int) -> tuple[Tensor, Close]:
    """Ordinary memory, locked at once by this thread."""
    rows = torch.empty((num_rows, row_bytes), dtype=torch.uint8)
    locks = CudaLocks(torch.device("cuda", 0))
    error = locks.lock(rows.data_ptr(), rows.nbytes)
    if error:
        raise RuntimeError(f"CUDA error {error}")
    # The allocator keeps the rows until then.
    return rows, lambda: locks.unlock(rows.data_ptr())


def mapped(num_rows: int, row_bytes: int, threads: int, chunk: int) -> tuple[Tensor, Close]:
    """The KV blocks' own."""
    locks = CudaLocks(torch.device("cuda", 0))
    memory = HostMemory(num_rows, row_bytes, locks, num_threads=threads, chunk_bytes=chunk)
    return memory.rows(torch.uint8), memory.close


def copy_speeds(host: Tensor, copied_bytes: int) -> dict[str, float]:
    """GB/s of copies of whole rows in each direction, and the microseconds to start one."""
    num_rows = min(len(host), max(1, copied_bytes // host.shape[1]))
    step = len(host) // num_rows
    device = torch.ones((min(num_rows, 256), host.shape[1]), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    facts = {}
    for name in ("to_host", "to_device"):
        for _ in range(2):
            torch.cuda.synchronize()
            begin = time.monotonic()
            with torch.cuda.stream(stream):
                for number in range(num_rows):
                    there, here = host[number * step], device[number % len(device)]
                    target, source = (there, here) if name == "to_host" else (here, there)
                    target.copy_(source, non_blocking=True)
            launched = time.monotonic()
            stream.synchronize()
            seconds = time.monotonic() - begin
        facts[f"{name}_gb_s"] = round(num_rows * host.shape[1] / seconds / 1e9, 2)
        facts[f"{name}_launch_us"] = round((launched - begin) / num_rows * 1e6, 1)
        facts[f"{name}_us"] = round(seconds / num_rows * 1e6, 1)
    if not bool((host[0] == 1).all()):
        raise RuntimeError("what was copied to the host is not there")
    return facts


def huge_gib() -> float:
    """This process's memory in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "AnonHuge" in line) / 2**20


def measure(make: Callable[[], tuple[Tensor, Close]], copied_bytes: int) -> dict[str, Any]:
    """Allocate, measure and free one kind of memory."""
    begin = time.monotonic()
    rows, close = make()
    facts: dict[str, Any] = {"bytes": rows.nbytes, "seconds": time.monotonic() - begin}
    facts["huge_gib"] = round(huge_gib(), 2)
    facts["is_pinned"] = rows.is_pinned() and rows[-1].is_pinned()
    facts.update(copy_speeds(rows, copied_bytes))
    begin = time.monotonic()
    del make, rows
    close()
    del close
    facts["close_seconds"] = round(time.monotonic() - begin, 3)
    facts["seconds"] = round(facts["seconds"], 3)
    return facts


def main() -> None:
    """Measure each kind in turn; print a line each, and append one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=32)
    parser.add_argument("--block-mib", type=float, default=4, help="bytes of one copy")
    parser.add_argument("--copied-gib", type=float, default=8)
    parser.add_argument("--piece-mib", type=int, nargs="+", default=[1024])
    parser.add_argument("--threads", type=int, nargs="+", default=[8])
    parser.add_argument("--only-mapped", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", default="", help="append the result to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here: run this on a machine with one")
    device = torch.device("cuda", 0)
    pin_near(device)
    torch.cuda.init()
    shape = (int(args.gib * 2**30) // int(args.block_mib * 2**20), int(args.block_mib * 2**20))
    kinds: dict[str, Callable[[], tuple[Tensor, Close]]] = {}
    if not args.only_mapped:
        kinds = {"torch": lambda: torchs(*shape), "registered": lambda: registered(*shape)}
    for threads in args.threads:
        for chunk in args.piece_mib:
            kinds[f"mapped {threads}, {chunk} MiB"] = (
                lambda threads=threads, chunk=chunk: mapped(*shape, threads, chunk << 20)  # type: ignore[misc]
            )
    lines = []
    for number in range(args.rounds):
        # In reverse order: each kind is first once.
        for name in list(kinds)[:: 1 if number % 2 else -1]:
            facts = measure(kinds[name], int(args.copied_gib * 2**30))
            lines.append({"round": number + 1, "memory": name, **facts})
            print(lines[-1], flush=True)
    if args.json:
        append(
            args.json, {"benchmark": "host_memory", "lines": lines, **environment(device, None)}
        )


if __name__ == "__main__":
    main()

"""The work of a GPU in a trace of `--profile`: idle time, and time by kernel."""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Work(NamedTuple):
    """One kernel or copy; microseconds."""

    start: float
    end: float
    name: str


def read_work(path: Path) -> list[Work]:
    """All that ran on GPUs, in order of start."""
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    found = [
        Work(event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _DEVICE
    ]
    return sorted(found)


def gaps_of(work: list[Work]) -> list[tuple[float, Work, Work]]:
    """Each idle period, with the kernels before and after it."""
    gaps = []
    last = work[0]
    for one in work[1:]:
        if one.start > last.end:
            gaps.append((one.start - last.end, last, one))
        if one.end > last.end:
            last = one
    return gaps


def report(work: list[Work], num_rows: int) -> str:
    """Idle share, the largest gaps, and the kernels that took longest."""
    span = max(one.end for one in work) - work[0].start
    gaps = gaps_of(work)
    idle = sum(gap for gap, _, _ in gaps)
    lines = [
        f"{len(work)} kernels and copies in {span / 1e3:.2f} ms, idle {idle / 1e3:.3f} ms "
        f"({100 * idle / span:.2f} %) in {len(gaps)} gaps"
    ]
    lines.append("largest gaps, microseconds, after and before:")
    for gap, before, after in sorted(gaps, reverse=True)[:num_rows]:
        lines.append(f"{gap:10.1f}  {before.name[:60]}  |  {after.name[:60]}")
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for one in work:
        seconds[one.name] += one.end - one.start
        counts[one.name] += 1
    lines.append("longest, percent of the span, times, microseconds each:")
    for name in sorted(seconds, key=lambda name: -seconds[name])[:num_rows]:
        each = seconds[name] / counts[name]
        lines.append(
            f"{100 * seconds[name] / span:6.2f} % {counts[name]:6d} {each:9.1f}  {name[:90]}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the report of one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="a .trace.json.gz")
    parser.add_argument("--rows", type=int, default=12, help="rows of each table")
    args = parser.parse_args()
    work = read_work(args.trace)
    if not work:
        parser.error(f"{args.trace} holds no work of a GPU: it was traced on a CPU")
    print(report(work, args.rows))


if __name__ == "__main__":
    main()

"""The work of a GPU in a trace of `--profile`: idle time, time by kernel, parts of a step."""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

_FIRST = ("_prepare_kernel", "decode_inputs")
"""The kernels with which steps begin: they make a step's inputs."""


class Work(NamedTuple):
    """One kernel or copy; microseconds."""

    start: float
    end: float
    name: str
    grid: str = ""
    """A kernel's numbers of thread blocks."""


def read_work(path: Path) -> list[Work]:
    """All that ran on GPUs, in order of start."""
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    found = [
        Work(event["ts"], event["ts"] + event["dur"], event["name"], _grid_of(event))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _DEVICE
    ]
    return sorted(found)


def _grid_of(event: dict[str, Any]) -> str:
    return "x".join(str(count) for count in event.get("args", {}).get("grid", ()))


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


class Share(NamedTuple):
    """Launches of one kernel in a step, and the time that all of them add to the step:
    microseconds from the end of all work before each of them to its own end."""

    name: str
    count: int
    added: float
    idle: float
    """Of ``added``, while nothing ran."""


def shares_of(work: list[Work]) -> tuple[int, float, list[Share]]:
    """The number of steps of the most frequent kind, their mean time in microseconds without
    what precedes the first kernel's end, and the kernels' shares of that, largest first.

    Kernels overlap, so that the sum of their durations is more than a step takes. Copies run
    beside the steps and do not count.
    """
    kernels = [one for one in work if not one.name.startswith("Memcpy")]
    firsts = [place for place, one in enumerate(kernels) if one.name.startswith(_FIRST)]
    kinds = defaultdict(list)
    for begin, end in pairwise(firsts):
        step = kernels[begin:end]
        kinds[tuple((one.name, one.grid) for one in step)].append(step)
    if not kinds:
        return 0, 0.0, []
    steps = max(kinds.values(), key=len)
    added: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for step in steps:
        last = step[0].end
        for one in step[1:]:
            share = added[f"{one.name[:70]} {one.grid}"]
            share[0] += 1
            share[1] += max(one.end - last, 0.0)
            share[2] += max(one.start - last, 0.0)
            last = max(last, one.end)
    count = len(steps)
    shares = [
        Share(name, round(number / count), time / count, idle / count)
        for name, (number, time, idle) in added.items()
    ]
    shares.sort(key=lambda share: -share.added)
    return count, sum(share.added for share in shares), shares


def report_step(work: list[Work]) -> str:
    """The parts of a step of the most frequent kind."""
    count, time, shares = shares_of(work)
    lines = [f"{count} steps of one kind, {time:.1f} us; times, added, of that idle, each:"]
    for share in shares:
        each = share.added / share.count
        lines.append(
            f"{share.count:6d} {share.added:9.1f} {share.idle:8.1f} {each:8.2f}  {share.name}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the report of one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="a .trace.json.gz")
    parser.add_argument("--rows", type=int, default=12, help="rows of each table")
    parts = "the parts of a step of the most frequent kind instead"
    parser.add_argument("--step", action="store_true", help=parts)
    args = parser.parse_args()
    work = read_work(args.trace)
    if not work:
        parser.error(f"{args.trace} holds no work of a GPU: it was traced on a CPU")
    print(report_step(work) if args.step else report(work, args.rows))


if __name__ == "__main__":
    main()

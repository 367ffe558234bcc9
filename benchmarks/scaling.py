"""Tokens a second and memory of each rank against the number of ranks, beside the limit.

    .venv/bin/python benchmarks/scaling.py --json benchmarks/results/scaling_cpu.jsonl

Each layout is a word such as ``tp2``, ``pp2``, ``tp2pp2``, ``tp4ep2`` or ``dp2ep2``:
tensor-parallel ranks, pipeline stages, expert-parallel parts, data-parallel ranks. Each layout
is a separate job: a `trimaran bench throughput` over these ranks, started by mpirun, with
random weights. The limit is that of all devices of the layout together, measured while all
devices work, without any communication between devices. The table and the charts show lines of
earlier runs (``--known``) beside new lines; new lines are optional. Unknown flags are passed to
`trimaran bench throughput`, such as ``--load 128/128x64``. A layout that fails, is refused or
exceeds its time is reported, the other layouts are measured, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trimaran.bench.results import results
from trimaran.bench.results.svg import Bar, Group, bar_chart
from trimaran.comm.errors import ConfigError
from trimaran.launcher.config import MpiConfig
from trimaran.launcher.starters.mpi_launch import compose, find_mpi, starter_env

AXES = {"tp": "--tp-size", "pp": "--pp-size", "dp": "--dp-size", "ep": "--moe-ep-size"}
COMMAND = (
    "import sys; from trimaran.launcher.cli.main import main; sys.exit(main(sys.argv[1:]))",
    "bench",
    "throughput",
)
Line = dict[str, Any]
_GRACE_S = 10.0
"""Time for ranks to end after the signal."""


def sizes_of(layout: str) -> dict[str, int]:
    """The sizes in a layout's name, 1 for unnamed sizes; raises ConfigError."""
    found = re.fullmatch(r"((?:tp|pp|dp|ep)\d+)+", layout)
    named = re.findall(r"(tp|pp|dp|ep)(\d+)", layout)
    if found is None or len(dict(named)) < len(named) or "0" in dict(named).values():
        raise ConfigError(f"{layout!r} is not a layout such as tp2, pp2, tp2pp2 or tp4ep2")
    return {**dict.fromkeys(AXES, 1), **{axis: int(size) for axis, size in named}}


def command_of(layout: str, passed: list[str], output: str) -> list[str]:
    """The command line of one layout."""
    sizes = sizes_of(layout)
    command = [sys.executable, "-c", *COMMAND, *passed, "--output", output]
    for axis, size in sizes.items():
        command += [AXES[axis], str(size)]
    world_size = sizes["tp"] * sizes["pp"] * sizes["dp"]
    if world_size == 1:
        return command
    return compose(find_mpi(MpiConfig()), world_size, command, oversubscribe=True)


def measure(layout: str, passed: list[str], timeout_s: float) -> tuple[list[Line], str]:
    """The result lines of one layout's job, one for each load, and its error.

    A job that fails at a later load, or takes too long, keeps its earlier lines.
    """
    with tempfile.TemporaryDirectory(prefix="trimaran-scaling-") as folder:
        output = Path(folder, "lines.jsonl")
        problem = _run(command_of(layout, passed, str(output)), timeout_s)
        text = output.read_text(encoding="utf-8") if output.exists() else ""
    # Commands name the file, not the folder of this run.
    lines = text.replace(str(output), output.name).splitlines()
    return [{**json.loads(line), "layout": layout} for line in lines], problem


def _run(command: list[str], timeout_s: float) -> str:
    """The error, if any; the job's output is printed as it arrives."""
    env = {**starter_env(os.environ), "PYTHONSAFEPATH": "1"}
    with subprocess.Popen(command, env=env) as job:
        try:
            code = job.wait(timeout_s)
            return f"it ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            # Unlike a kill, this lets mpirun end its ranks, which hold the GPUs.
            job.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(_GRACE_S)
            job.kill()
            return f"it took more than {timeout_s:g} s (--timeout)"


def known_lines(paths: list[str]) -> list[Line]:
    """The lines of earlier runs, of one shape; among equal lines the last; raises
    ConfigError.
    """
    lines = [line for line in results.read(paths) if "layout" in line]
    if len(shapes := {line["shape"] for line in lines}) > 1:
        raise ConfigError(f"--known: one chart holds one shape, not {', '.join(shapes)}")
    return list({(line["layout"], load_of(line)): line for line in lines}.values())


def load_of(line: Line) -> str:
    """The load's own notation."""
    return f"{line['isl']}/{line['osl']}x{line['requests']}"


def table(lines: list[Line]) -> list[str]:
    """Rows of Markdown; each figure beside that of the load's first layout."""
    rows = [
        "| load | layout | ranks | tokens/s | of the first | limit | GB a rank: weights, "
        "KV cache, all |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        first = next(each for each in lines if load_of(each) == load_of(line))
        most = {
            name: max(each[name] for each in line["memory_gb"])
            for name in ("weights", "kv_cache", "used")
        }
        limit = ""
        if "limit_pct" in line:
            limit = f"{line['limit_pct']} % of {line['limit_tok_s']:,.0f}"
        rows.append(
            f"| {load_of(line)} | {line['layout']} | {len(line['memory_gb'])} "
            f"| {line['out_tok_s']:,.0f} | {line['out_tok_s'] / first['out_tok_s']:.2f} "
            f"| {limit} "
            f"| {most['weights']}, {most['kv_cache']}, {most['used']} |"
        )
    return rows


def charts(lines: list[Line], folder: Path, name: str) -> None:
    """Two SVG files a load: tokens a second with the limit, and memory of a rank."""
    for load in dict.fromkeys(map(load_of, lines)):
        own = [line for line in lines if load_of(line) == load]
        rates, memory = [], []
        for line in own:
            bars = [
                Bar(
                    series="measured", value=line["out_tok_s"], text=f"{line['out_tok_s']:,.0f}"
                )
            ]
            if "limit_tok_s" in line:
                text = f"{line['limit_tok_s']:,.0f} ({line['limit_pct']} %)"
                bars.append(Bar(series="limit", value=line["limit_tok_s"], text=text))
            rates.append(Group(line["layout"], bars))
            parts = [
                (part, max(each[part] for each in line["memory_gb"]))
                for part in ("weights", "kv_cache")
            ]
            memory.append(
                Group(
                    line["layout"],
                    [Bar(series=part, value=size, text=f"{size} GB") for part, size in parts],
                )
            )
        where, device = load.replace("/", "_"), own[0]["device"]
        title = f"{own[0]['shape']}, {load}, {device}"
        for kind, groups in (("tokens a second", rates), ("memory of a rank", memory)):
            path = folder / f"{name}_{where}_{kind.split()[0]}.svg"
            path.write_text(bar_chart(f"{kind}: {title}", groups), encoding="utf-8")


def main() -> int:
    """Measure the layouts in turn, print one table, keep the lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layouts", nargs="*", default=["tp1", "tp2", "tp4"], metavar="WORD")
    add("--known", nargs="+", default=[], metavar="FILE", help="lines of earlier runs")
    add("--json", metavar="FILE", help="append the results as JSON lines")
    add("--charts", metavar="FOLDER", help="write bar charts there")
    add("--timeout", type=float, default=900.0, metavar="S", help="of one layout")
    args, passed = parser.parse_known_args()
    lines = known_lines(args.known)
    has_failed = False
    order = dict.fromkeys([*(line["layout"] for line in lines), *args.layouts])
    for layout in args.layouts:
        print(f"-- {layout}", flush=True)
        try:
            found, problem = measure(layout, passed, args.timeout)
        except ConfigError as error:
            found, problem = [], str(error)
        if problem:
            print(f"scaling.py: {layout}: {problem}", file=sys.stderr)
            has_failed = True
        lines += found
        for line in found if args.json else ():
            results.append(args.json, line)
    lines.sort(key=lambda line: (load_of(line), list(order).index(line["layout"])))
    print("\n".join(table(lines)))
    if args.charts:
        Path(args.charts).mkdir(parents=True, exist_ok=True)
        charts(lines, Path(args.charts), "scaling")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())

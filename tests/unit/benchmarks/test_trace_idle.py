"""`benchmarks/trace_idle.py`: the parts of a step in a trace."""

from __future__ import annotations

import gzip
import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "trace_idle.py"


@pytest.fixture
def trace(tmp_path):
    """Two equal steps, in which a norm overlaps a product, and the beginning of a third."""
    path, events = tmp_path / "rank.trace.json.gz", []

    def add(name, start, length, category="kernel", grid=(1, 1, 1)):
        event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length}
        events.append({**event, "args": {"grid": list(grid)}})

    for first in (0.0, 20.0):
        add("_prepare_kernel", first, 2)
        add("gemm", first + 3, 4, grid=(132, 1, 1))
        add("_norm_kernel", first + 4, 5)
        add("Memcpy DtoH (Device -> Pinned)", first + 4, 9, "gpu_memcpy")
        add("gemm", first + 9, 4, grid=(132, 1, 1))
    add("_prepare_kernel", 40.0, 2)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def test_kernels_of_a_step_count_from_the_end_of_those_before_them(trace):
    script = runpy.run_path(str(SCRIPT))

    count, time, shares = script["shares_of"](script["read_work"](trace))

    assert (count, time) == (2, 11.0)
    found = {share.name: (share.count, share.added, share.idle) for share in shares}
    assert found == {"gemm 132x1x1": (2, 9.0, 1.0), "_norm_kernel 1x1x1": (1, 2.0, 0.0)}


def test_a_trace_without_whole_steps_has_no_parts(trace):
    script = runpy.run_path(str(SCRIPT))

    assert script["shares_of"](script["read_work"](trace)[:3]) == (0, 0.0, [])


def test_the_program_prints_the_parts_of_a_step(trace, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trace_idle.py", str(trace), "--step"])

    runpy.run_path(str(SCRIPT), run_name="__main__")

    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("2 steps of one kind, 11.0 us")
    assert printed[1].split() == ["2", "9.0", "1.0", "4.50", "gemm", "132x1x1"]

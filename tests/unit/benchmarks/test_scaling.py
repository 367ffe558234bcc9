"""`benchmarks/scaling.py`: layouts in turn, beside the lines of earlier runs."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "scaling.py"


def run(*flags):
    command = [sys.executable, str(SCRIPT), *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def line_of(layout, rate, size=1):
    return {
        "layout": layout, "shape": "llama8b", "device": "a card", "isl": 128, "osl": 128,
        "requests": 1024, "out_tok_s": rate, "limit_tok_s": 2e4 * size,
        "limit_pct": round(rate / 200 / size, 1),
        "memory_gb": [{"weights": 16.0 / size, "kv_cache": 100.0, "used": 120.0}] * size,
    }  # fmt: skip


def test_earlier_results_are_read_and_the_last_of_a_layout_counts(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = line_of("tp1", 5.0), line_of("tp1", 19000.0), line_of("tp2", 34200.0, 2)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    done = run("--known", path, "--layouts", "--charts", tmp_path)

    assert done.returncode == 0, done.stderr
    row = "| 128/128x1024 | tp2 | 2 | 34,200 | 1.80 | 85.5 % of 40,000 | 8.0, 100.0, 120.0 |"
    assert row in done.stdout
    assert "| 5 |" not in done.stdout
    assert "34,200" in (tmp_path / "scaling_128_128x1024_tokens.svg").read_text()


def test_a_failed_layout_does_not_stop_other_layouts(tmp_path):
    done = run("--layouts", "tp0", "pp0", "--json", tmp_path / "lines.jsonl")
    assert done.returncode == 1
    assert all(f"{layout!r} is not a layout" in done.stderr for layout in ("tp0", "pp0"))


@pytest.mark.parametrize(
    ("end", "complaint"),
    [("sys.exit(3)", "it ended with exit code 3"), ("", "")],
)
def test_a_failed_job_keeps_its_written_lines(monkeypatch, end, complaint):
    scaling = runpy.run_path(str(SCRIPT))
    job = "import sys; path = sys.argv[sys.argv.index('--output') + 1]; "
    job += f"print('{{\"isl\": 5}}', file=open(path, 'w'), flush=True); {end}"
    monkeypatch.setitem(scaling["command_of"].__globals__, "COMMAND", (job,))

    lines, problem = scaling["measure"]("tp1", [], 60.0)

    assert lines == [{"isl": 5, "layout": "tp1"}]
    assert problem == complaint

"""`trimaran bench throughput` over several ranks: one rank reports for all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimaran.launcher.cli.main import main

MODEL = Path(__file__).parents[2] / "examples" / "demo_models" / "moe"
FLAGS = ("--model", str(MODEL), "--device", "cpu", "--runs", "1", "--load", "9/4x3")


@pytest.mark.ranks(2)
def test_rank_0_reports_the_figures_and_the_memory_of_all_ranks(world, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("bench") / "lines") if world.rank == 0 else ""
    path = world.comm.bcast(path)
    size = str(world.size)

    sizes = ("--tp-size", size, "--moe-ep-size", size, "--ceiling-seconds", "0")
    sizes += ("--moe-rebalance-steps", "2")
    code = main(["bench", "throughput", *FLAGS, *sizes, "--output", path])
    world.comm.Barrier()

    (line,) = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
    assert code == 0
    assert (line["tp_size"], line["pp_size"], line["moe_ep_size"]) == (
        world.size,
        1,
        world.size,
    )
    assert len(line["memory_gb"]) == world.size
    assert (line["paused_sequences"], line["recomputed_tokens"]) == (0, 0)
    weights = [each["weights"] for each in line["memory_gb"]]
    assert max(weights) == min(weights)
    whole = (MODEL / "model.safetensors").stat().st_size / 1e9
    assert weights[0] < 0.8 * whole

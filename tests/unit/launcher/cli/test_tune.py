"""`trimaran tune` where it cannot measure: refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trimaran.kernels.tables.tuned_choices import FILE_NAME
from trimaran.launcher.cli import main as cli

DEMO = Path(__file__).parents[4] / "examples" / "demo_models" / "base"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("model", [["--shape", "llama1b"], ["--engine", str(DEMO)]])
def test_a_machine_without_a_gpu_is_told_so(capsys, model):
    assert cli.main(["tune", *model]) == 2

    said = capsys.readouterr()
    assert "torch finds no GPU here: run trimaran tune on the machine that serves" in said.err
    assert not (DEMO / FILE_NAME).exists()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--engine", "/none"], "/none"),
        (["--shape", "qwen3_30b", "--moe-ep-size", "3", "--tp-size", "3"], "num_experts"),
    ],
)
def test_wrong_sizes_are_refused_before_the_gpu_is_looked_for(capsys, flags, reason):
    assert cli.main(["tune", *flags]) == 2
    assert reason in capsys.readouterr().err

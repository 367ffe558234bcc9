"""The kernel for decode steps makes the inputs that Triton's kernels make."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.cuda.decode_steps import SWITCH, check_decodes, make_inputs
from trimaran.kernels.cuda.decode_inputs import MAX_ROWS

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
NUM_ROWS = 300


@pytest.mark.parametrize("switch_at", [0, SWITCH])
def test_inputs_of_decodes_are_those_of_the_general_kernels(switch_at):
    ours, others = (make_inputs(NUM_ROWS, switch_at, DEVICE) for _ in range(2))
    assert ours._decodes is not None
    others._decodes = None

    check_decodes(
        ours, others, [(1, 1), (3, 4), (60, 64), (MAX_ROWS, MAX_ROWS), (255, 256), (70, 0)]
    )

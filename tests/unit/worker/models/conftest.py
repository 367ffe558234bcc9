"""The operators with which the tests of models run."""

from __future__ import annotations

import pytest

from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.kernels.torch_ops import TorchOps

OPS = {
    "torch": lambda dtype: TorchOps(),
    "cpu kernels": lambda dtype: CpuOps(load_library(), dtype, 1),
}


@pytest.fixture(params=list(OPS))
def ops_of(request):
    """The operators under test, by dtype."""
    return OPS[request.param]

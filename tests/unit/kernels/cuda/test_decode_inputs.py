"""The kernel for the inputs of decodes makes those of the general kernels: its source, run by
a CPU."""

from __future__ import annotations

import ctypes
import subprocess
from types import SimpleNamespace

import pytest
import torch

from tests.unit.kernels.cuda.decode_steps import SWITCH, check_decodes, make_inputs
from trimaran.kernels.cuda import decode_inputs
from trimaran.kernels.cuda.build import SOURCES

CPU = torch.device("cpu")
NUM_ROWS = 12

HOST = """
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)
static struct { int x; } threadIdx;
static void __syncthreads() {}
#define DECODE_INPUTS_PRIMITIVES
static void wait_for_previous_kernels() {}
#include "%s"
extern "C" void run(const Arguments* step) {
    // What a thread writes depends on no result of the kernel but the new blocks, which all
    // threads have written in the first round.
    for (int round = 0; round < 2; ++round) {
        for (threadIdx.x = 0; threadIdx.x < MAX_ROWS; ++threadIdx.x) decode_inputs(*step);
    }
}
"""


class HostKernel:
    """The kernel's source in a library of the CPU."""

    def __init__(self, folder):
        source, library = folder / "host.cpp", folder / "host.so"
        source.write_text(HOST % (SOURCES / "decode_inputs.cu"))
        sizes = (
            f"-DMAX_ROWS={decode_inputs.MAX_ROWS}", f"-DMAX_BLOCKS={decode_inputs.MAX_BLOCKS}",
        )  # fmt: skip
        command = ["g++", "-std=c++17", "-shared", "-fPIC", *sizes, "-o", library, source]
        subprocess.run(command, check=True)
        self.num_launches = 0
        self._run = ctypes.CDLL(str(library)).run

    def launch(self, num_blocks, stream, arguments):
        assert num_blocks == 1
        self.num_launches += 1
        self._run(ctypes.byref(arguments))


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    made = HostKernel(tmp_path)
    monkeypatch.setattr(decode_inputs, "_kernel", lambda device: made)
    active = SimpleNamespace(get_current_stream=lambda index: 0)
    monkeypatch.setattr(decode_inputs, "driver", SimpleNamespace(active=active))
    return made


@pytest.mark.parametrize("switch_at", [0, SWITCH])
def test_inputs_of_decodes_are_those_of_the_general_kernels(kernel, switch_at):
    ours, others = (make_inputs(NUM_ROWS, switch_at, CPU) for _ in range(2))
    ours._decodes = decode_inputs.DecodeInputs(ours.token_table, ours.block_tables, ours.target)
    sizes = [(1, 1), (3, 4), (12, 12), (7, 0), (5, 20)]

    check_decodes(ours, others, sizes)

    assert kernel.num_launches == len(sizes)


def test_arguments_fit_any_driver():
    assert ctypes.sizeof(decode_inputs._Arguments) <= 4096

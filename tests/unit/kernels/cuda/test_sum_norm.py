"""Sums of ranks with the norm behind them: the CUDA kernel's source, run by a CPU's threads."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from trimaran.kernels.cuda.build import SOURCES
from trimaran.kernels.cuda.sum_norm import (
    DTYPES,
    MAX_ROWS,
    SumNorm,
    macros,
    num_threads,
    region_bytes,
)
from trimaran.kernels.reference import rms_norm
from trimaran.kernels.triton.norm import norm_warps

EPS = 1e-5
LAUNCHES = 8
SUMS = SumNorm([0, 0], 0, 64, torch.device("cpu"))
ADMITTED = [
    (dtype, padded)
    for dtype in DTYPES
    for padded in (2**n for n in range(20))
    if SUMS.takes(torch.zeros(1, padded, dtype=dtype))
]
"""Dtypes and padded widths of the rows that it takes."""


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize(
    ("num_ranks", "dtype", "parts", "first_count"),
    [
        (2, torch.bfloat16, 4, 2**32 - 5),  # epochs go round
        (3, torch.float32, 0, 0),
    ],
    ids=str,
)
def test_every_launch_adds_the_inputs_of_all_ranks(
    tmp_path, num_ranks, dtype, parts, first_count
):
    max_rows, width = 2, 256
    generator = torch.Generator().manual_seed(num_ranks + parts)
    rows = torch.randint(1, max_rows + 1, (LAUNCHES,), generator=generator, dtype=torch.int32)
    rows[:4] = max_rows
    shape = (num_ranks, LAUNCHES, max_rows, width)
    x = torch.randn((*shape[:2], max(parts, 1), *shape[2:]), generator=generator)
    x = x if parts else x.to(dtype)
    before = torch.randn(shape[1:], generator=generator).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    run = Run(tmp_path, x, before, weight, parts)

    run(rows, first_count)

    own = x[:, :, 0].float()
    for part in range(1, parts):
        own = own + x[:, :, part].float()
    total = torch.zeros_like(own[0])
    for addend in own.to(dtype):
        total = total + addend.float()
    # Rows that a launch does not have keep their residual and have no output.
    is_row = torch.arange(max_rows)[None, :, None] < rows[:, None, None]
    expected = torch.where(is_row, (total.to(dtype).float() + before.float()).to(dtype), before)
    normed = torch.where(is_row, rms_norm(expected, weight, EPS), 0)
    for rank in range(num_ranks):
        assert torch.equal(run.residual[rank], expected)
        assert torch.equal(run.output[rank], run.output[0])
        torch.testing.assert_close(run.output[rank], normed)


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        (torch.bfloat16, 256), (torch.bfloat16, 1000), (torch.bfloat16, 4096),
        (torch.bfloat16, 8192), (torch.float32, 1024), (torch.float32, 4096),
    ],
    ids=str,
)  # fmt: skip
def test_squares_are_summed_in_the_order_of_the_triton_kernel(tmp_path, dtype, width):
    generator = torch.Generator().manual_seed(width)
    # One row on one rank: each thread of a block is one of the system's.
    x = torch.zeros(1, 8, 1, 1, width, dtype=dtype)
    before = torch.randn(8, 1, width // 4, 4, generator=generator).mul(2).exp()
    # The order shows the most where few threads have anything to add.
    share = 0.5 ** torch.arange(8.0)[:, None, None, None]
    before *= torch.rand(8, 1, width // 4, 1, generator=generator) < share
    before = before.view(8, 1, width).to(dtype)
    run = Run(tmp_path, x, before, torch.ones(width, dtype=dtype), 0)

    run(torch.ones(8, dtype=torch.int32))

    expected = [sum_of_squares_by_triton(row) for row in before[:, 0].float()]
    assert run.sums.flatten().tolist() == expected


def sum_of_squares_by_triton(row):
    """The sum that a thread of `triton_norm.rms_norm` sees on an NVIDIA GPU.

    A thread adds up the squares of neighbouring elements by fused multiplications; its first
    addition adds the second square to the first. Then threads of a warp, and then warps, add
    each other's sums, the most distant first.
    """
    padded = 1 << (len(row) - 1).bit_length()
    values = torch.zeros(padded, dtype=torch.float64)
    values[: len(row)] = row
    values = values.view(norm_warps(padded), 32, -1)
    sums = (values[..., 1] ** 2).float()
    for i in (0, *range(2, values.shape[2])):
        sums = (values[..., i] ** 2 + sums).float()
    for dim in (1, 0):
        while sums.shape[dim] > 1:
            first, second = sums.chunk(2, dim)
            sums = first + second
    return sums.item()


class Run:
    """Launches of a kernel by all ranks: arguments, and what they make of them.

    ``x`` is [ranks, launches, parts or 1, rows, width], ``before`` each rank's residual.
    """

    def __init__(self, folder, x, before, weight, parts):
        self._x, self._weight, self._parts = x, weight, parts
        self.residual = before.expand(x.shape[0], *before.shape).clone()
        self.output = torch.zeros_like(self.residual)
        self.sums = torch.zeros(self.residual.shape[:-1])
        padded = 1 << (before.shape[-1] - 1).bit_length()
        self._threads = num_threads(before.dtype, padded)
        self._library = compile_for_cpu(folder, macros(x.shape[0], before.dtype, padded))

    def __call__(self, rows, first_count=0):
        _, launches, max_rows, width = self.residual.shape
        tensors = (self._x, self.residual, self._weight, self.output, self.sums)
        self._library.run_ranks(
            launches, ctypes.c_void_p(rows.data_ptr()), max_rows, width, self._parts,
            self._threads, ctypes.c_uint(first_count),
            *(ctypes.c_void_p(each.data_ptr()) for each in tensors), ctypes.c_float(EPS),
        )  # fmt: skip


def compile_for_cpu(folder, defines):
    """A shared library of the kernel's source."""
    library = folder / "sum_norm.so"
    source = Path(__file__).with_name("sum_norm_host.cpp")
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", f"-I{SOURCES}"]
    options += [f"-D{each}" for each in defines]
    subprocess.run(["g++", *options, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def test_threads_process_whole_chunks_of_every_supported_row():
    assert {padded for _, padded in ADMITTED} == {256, 512, 1024, 2048, 4096, 8192}
    for dtype, padded in ADMITTED:
        sizes = dict(each.split("=") for each in macros(2, dtype, padded) if "=" in each)
        chunk = 16 // dtype.itemsize
        threads = num_threads(dtype, padded)
        assert threads % 32 == 0
        assert threads * chunk * int(sizes["ROW_CHUNKS"]) == padded
        # The threads of the norm alone have parts of a chunk.
        assert chunk % int(sizes["NORM_VALUES"]) == 0
        assert 32 * norm_warps(padded) * int(sizes["NORM_VALUES"]) == padded


def test_only_residuals_of_supported_shapes_are_accepted():
    assert SUMS.takes(torch.zeros(64, 4096))
    assert SUMS.takes(torch.zeros(1, 8192, dtype=torch.bfloat16))
    assert SUMS.takes(torch.zeros(8, 5120, dtype=torch.float16))
    assert not SUMS.takes(torch.zeros(65, 4096))
    assert not SUMS.takes(torch.zeros(1, 8192))
    assert not SUMS.takes(torch.zeros(1, 128))
    assert not SUMS.takes(torch.zeros(1, 4092, dtype=torch.bfloat16))
    assert not SUMS.takes(torch.zeros(2, 4099, dtype=torch.bfloat16)[:, :4096])
    assert not SUMS.takes(torch.zeros(1, 512, dtype=torch.float64))
    with pytest.raises(ValueError, match=f"max_rows is {MAX_ROWS + 1} and may be {MAX_ROWS}"):
        SumNorm([0, 0], 0, MAX_ROWS + 1, torch.device("cpu"))


def test_a_shared_region_has_two_slots_for_the_rows_of_all_ranks():
    assert region_bytes(2, 256) == 32 << 20

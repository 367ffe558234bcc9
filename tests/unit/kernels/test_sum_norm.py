"""Sums of ranks with the norm behind them: the CUDA kernel's source, run by a CPU's threads."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from trimaran.kernels.cuda_build import SOURCES
from trimaran.kernels.reference import rms_norm
from trimaran.kernels.sum_norm import MAX_ROWS, SumNorm, region_bytes

ROWS, WIDTH, LAUNCHES, EPS = 2, 64, 24, 1e-5


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "parts", "first_count"),
    [
        (2, torch.bfloat16, 4, 2**32 - 9),  # epochs go round
        (3, torch.float32, 0, 0),
    ],
    ids=str,
)
def test_every_launch_adds_what_all_ranks_gave_to_it(
    tmp_path, num_ranks, dtype, parts, first_count
):
    library = compile_for_cpu(tmp_path, num_ranks, dtype)
    generator = torch.Generator().manual_seed(num_ranks + parts)
    rows = torch.randint(1, ROWS + 1, (LAUNCHES,), generator=generator, dtype=torch.int32)
    rows[:4] = ROWS
    shape = (num_ranks, LAUNCHES, ROWS, WIDTH)
    x = torch.randn((*shape[:2], max(parts, 1), *shape[2:]), generator=generator)
    x = x if parts else x.to(dtype)
    before = torch.randn(shape[1:], generator=generator).to(dtype)
    weight = torch.randn(WIDTH, generator=generator).to(dtype)
    residual = before.expand(shape).clone()
    output = torch.zeros(shape, dtype=dtype)

    library.run_ranks(
        LAUNCHES, ctypes.c_void_p(rows.data_ptr()), ROWS, WIDTH, parts, 4,
        ctypes.c_uint(first_count), *(ctypes.c_void_p(each.data_ptr()) for each in (
            x, residual, weight, output)), ctypes.c_float(EPS),
    )  # fmt: skip

    own = x[:, :, 0].float()
    for part in range(1, parts):
        own = own + x[:, :, part].float()
    total = torch.zeros_like(own[0])
    for addend in own.to(dtype):
        total = total + addend.float()
    # Rows that a launch does not have keep their residual and have no output.
    is_row = torch.arange(ROWS)[None, :, None] < rows[:, None, None]
    expected = torch.where(is_row, (total.to(dtype).float() + before.float()).to(dtype), before)
    normed = torch.where(is_row, rms_norm(expected, weight, EPS), 0)
    for rank in range(num_ranks):
        assert torch.equal(residual[rank], expected)
        assert torch.equal(output[rank], output[0])
        torch.testing.assert_close(output[rank], normed)


def compile_for_cpu(folder, num_ranks, dtype):
    """A shared library of the kernel's source."""
    library = folder / "sum_norm.so"
    defines = [f"-DELEMENT_BYTES={dtype.itemsize}", "-DROW_CHUNKS=4", f"-DRANKS={num_ranks}"]
    if dtype.itemsize == 2:
        defines[1] = "-DROW_CHUNKS=2"
    source = Path(__file__).with_name("sum_norm_host.cpp")
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", f"-I{SOURCES}"]
    subprocess.run(["g++", *options, *defines, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def test_only_residuals_that_fit_are_taken():
    sums = SumNorm([0, 0], 0, 64, torch.device("cpu"))

    assert sums.takes(torch.zeros(64, 4096))
    assert sums.takes(torch.zeros(1, 8192, dtype=torch.bfloat16))
    assert sums.takes(torch.zeros(8, 5120, dtype=torch.float16))
    assert not sums.takes(torch.zeros(65, 4096))
    assert not sums.takes(torch.zeros(1, 8192))
    assert not sums.takes(torch.zeros(1, 128))
    assert not sums.takes(torch.zeros(1, 4092, dtype=torch.bfloat16))
    assert not sums.takes(torch.zeros(2, 4099, dtype=torch.bfloat16)[:, :4096])
    assert not sums.takes(torch.zeros(1, 512, dtype=torch.float64))
    with pytest.raises(ValueError, match=f"max_rows is {MAX_ROWS + 1} and may be {MAX_ROWS}"):
        SumNorm([0, 0], 0, MAX_ROWS + 1, torch.device("cpu"))


def test_a_region_has_two_slots_of_all_ranks_rows():
    assert region_bytes(2, 256) == 32 << 20

"""The cuts of products of many rows of bytes."""

from __future__ import annotations

import pytest

from trimaran.kernels.cuda import byte_gemm, paired_cuts


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_the_kernel_supports_every_tile(kind):
    for columns in paired_cuts.widths(kind):
        paired_cuts.tile_of(columns).check(kind)


@pytest.mark.parametrize(
    ("rows", "outputs", "kind", "columns"),
    [
        # 2 pairs of tiles of rows times 32 of columns fill the 66 pairs of processors once.
        (512, 6144, "plain", 192),
        (512, 4096, "plain", 128),
        (1024, 4096, "plain", 256),
        # 3 times 39 take two turns, and narrower tiles take three.
        (768, 6144, "plain", 160),
        (256, 28672, "gated", 224),
        # Tiles of fewer columns would take as long as these.
        (129, 4096, "plain", 96),
    ],
)
def test_the_tile_is_the_one_that_the_processors_multiply_soonest(rows, outputs, kind, columns):
    assert paired_cuts.choose(rows, outputs, 132, kind).columns == columns


@pytest.mark.parametrize("kind", ["plain", "gated"])
@pytest.mark.parametrize("outputs", [96, 4096, 28672])
def test_all_tiles_are_known_before_the_rows_are(outputs, kind):
    known = {
        paired_cuts.choose(rows, outputs, 132, kind) for rows in paired_cuts.NUMBERS_OF_ROWS
    }
    for rows in (129, 255, 257, 1000, 8191, 16384, 20000, 100_000):
        assert paired_cuts.choose(rows, outputs, 132, kind) in known


@pytest.mark.parametrize("rows", [1, 32, 65, 128, 129, 1000])
@pytest.mark.parametrize(("outputs", "inner"), [(4096, 4096), (4096, 14336), (544, 1552)])
def test_no_blocks_share_inputs_where_a_result_must_not_depend_on_the_cut(rows, outputs, inner):
    def cut(kind, *, is_fixed):
        product = byte_gemm._Product((outputs, inner), 132, kind, "INT8", is_fixed=is_fixed)
        return byte_gemm._cut_of(rows, product)

    assert cut("plain", is_fixed=True).split == 1
    assert cut("parts", is_fixed=True) is None
    if 64 < rows <= 128:
        assert cut("plain", is_fixed=False).split > 1

"""Cuts of products by integer weights that the Hopper kernel supports."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels.cuda import integer_choice, integer_skinny
from trimaran.kernels.cuda.integer_gemm import Cut, choose_cut
from trimaran.kernels.cuda.integer_units import Units

WEIGHTS = [(1, 1), (4, 3), (96, 32), (64, 112), (448, 32), (2004, 32)]
"""Tiles of 64 outputs, steps of 128 inputs."""

ROWS = (1, 8, 9, 31, 33, 64, 65, 96, 129, 255, 511, 4096)


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize(("tiles", "steps"), WEIGHTS)
def test_cuts_are_served(tiles, steps, is_fixed):
    for rows in ROWS:
        cut = choose_cut(rows, tiles, steps, is_fixed=is_fixed)
        assert cut.rows in (8, 16, 32, 64, 96, 128)
        assert 2 <= cut.tiles <= (4 if cut.rows < 48 else 3 if cut.rows < 96 else 2)
        assert cut.split in (1, 2, 4, 8)
        assert cut.split <= steps
        assert cut.split * cut.sharing <= 8
        assert cut.rows // cut.sharing % 8 == 0


@pytest.mark.parametrize(("tiles", "steps"), WEIGHTS)
def test_a_fixed_split_does_not_depend_on_rows(tiles, steps):
    cuts = [choose_cut(rows, tiles, steps, is_fixed=True) for rows in ROWS]
    assert len({(cut.split, cut.tiles) for cut in cuts}) == 1


def test_the_processors_are_busy_with_one_token():
    for tiles, steps in WEIGHTS[2:]:
        cut = choose_cut(1, tiles, steps, is_fixed=False)
        assert cut.split * -(-tiles // cut.tiles) >= 88


@pytest.mark.parametrize(("tiles", "steps"), WEIGHTS)
@pytest.mark.parametrize("rows", [33, 64, 100, 129, 255, 511, 1024, 4096, 8192])
def test_cuts_of_rounded_weights_are_served(tiles, steps, rows):
    choose = integer_choice.choose
    for cut in (
        choose(rows, tiles, steps, has_maps=False),
        choose(rows, tiles, steps, has_maps=True),
    ):
        assert cut.rows % 16 == 0 and cut.rows <= 256
        assert cut.rows // cut.sharing % 8 == 0
        if isinstance(cut, Cut):
            assert cut.is_scaled
            assert cut.tiles == 2 or (cut.tiles == 3 and cut.rows <= 128)
            assert cut.split * cut.sharing <= 8 and cut.split <= steps
        else:
            assert cut.rows * cut.depth <= (256 if cut.tiles == 2 else 128)
    assert isinstance(choose(rows, tiles, steps, has_maps=False), Cut)
    deep = integer_choice.choose_gated(rows, tiles, steps)
    assert (deep.tiles, deep.depth) == (2, 2) and deep.rows <= 128


PROCESSORS = 132


def few_units(tiles, steps, bits):
    values = torch.empty((tiles, steps, 64 * 128 * bits // 8 + 128), device="meta").byte()
    return Units(values, 64 * tiles, bits, 1, False, 0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("tiles", "steps"), WEIGHTS)
def test_cuts_of_few_rows_fit_a_block(tiles, steps, is_gated, bits):
    units = few_units(tiles, steps, bits)
    for rows in range(1, integer_skinny.MAX_ROWS + 1):
        cut = integer_skinny.choose_cut(rows, units, is_gated=is_gated, processors=PROCESSORS)
        own = cut.slices // cut.warps_n
        assert own * cut.warps_n == cut.slices and own <= 32 // bits
        assert cut.warps == 8 or (cut.warps == 16 and cut.slices <= 3)
        assert (cut.warps_n == 2) == is_gated
        assert cut.slices // (2 if is_gated else 1) <= units.outputs // (32 if is_gated else 16)
        ring = cut.ring_bytes(rows, units.unit_bytes)
        assert cut.stages >= 1 and ring + cut.sums_bytes <= 227 << 10


@pytest.mark.parametrize(
    ("is_gated", "tiles", "steps"),
    [(False, 96, 32), (True, 448, 32), (False, 64, 32), (False, 64, 112)],
)
def test_the_processors_are_busy_with_few_rows(is_gated, tiles, steps):
    units = few_units(tiles, steps, 4)
    for rows in (1, 8):
        cut = integer_skinny.choose_cut(rows, units, is_gated=is_gated, processors=PROCESSORS)
        assert 0.95 * PROCESSORS <= 4 * tiles / cut.slices <= PROCESSORS


@pytest.mark.parametrize(
    ("bits", "tiles", "is_gated", "is_taken"),
    [(4, 448, True, True), (4, 2004, False, True), (8, 96, False, True),
     (8, 448, True, False), (8, 2004, False, False)],
)  # fmt: skip
def test_eight_bits_are_taken_where_blocks_have_one_tile(bits, tiles, is_gated, is_taken):
    units = few_units(tiles, 32, bits)
    can_multiply = integer_skinny.can_multiply
    assert can_multiply(units, is_gated=is_gated, processors=PROCESSORS) == is_taken
    odd = units._replace(outputs=units.outputs - 8)
    assert not can_multiply(odd, is_gated=is_gated, processors=PROCESSORS)

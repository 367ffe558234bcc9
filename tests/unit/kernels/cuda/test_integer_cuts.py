"""Cuts of products by integer weights that the Hopper kernel supports."""

from __future__ import annotations

import pytest

from trimaran.kernels.cuda.integer_gemm import choose_cut

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

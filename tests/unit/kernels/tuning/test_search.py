"""The search for the fastest kernel, by clocks that are functions."""

from __future__ import annotations

from trimaran.kernels.tables.grouped_table import GroupedShape, TritonCut
from trimaran.kernels.tables.product_table import GemmShape
from trimaran.kernels.tuning.expert_candidates import MixtureSizes, likely_cuts
from trimaran.kernels.tuning.product_candidates import Product
from trimaran.kernels.tuning.product_timing import numbers_of
from trimaran.kernels.tuning.search import best_pair, best_product

CUTS = [GemmShape(64, 64), GemmShape(64, 128, 2), GemmShape(128, 128)]


def test_the_fastest_tile_shape_is_found_with_its_pace():
    def time_us(cut):
        if cut is None:
            return 10.0
        return 8.0 - (cut.columns == 128) - (cut.rows == 64) - 0.5 * (cut.max_early == 3)

    best, derived_us, best_us = best_product(time_us, CUTS)

    assert best == GemmShape(64, 128, 2, max_early=3)
    assert (derived_us, best_us) == (10.0, 5.5)
    assert numbers_of(best) == [64, 128, 2, 1, 16, 3]


def test_the_rule_stays_unless_a_candidate_is_faster_twice():
    assert best_product(lambda cut: 10.0 if cut is None else 9.95, CUTS)[0] is None
    times = iter([10.0, 9.0, 10.0, 10.0, 11.0, 11.0])
    # The first candidate was faster in one comparison of two.
    assert best_product(lambda _: next(times), CUTS) == (None, 10.0, 10.0)


def test_both_products_of_experts_are_of_the_same_kernel():
    own = [GroupedShape(64, 16), GroupedShape(128, 16)]
    triton = [TritonCut(16, 32, 128, 4, 4), TritonCut(16, 64, 128, 4, 3)]

    def time_us(pair):
        if pair is None:
            return 50.0
        assert len({type(cut) for cut in pair}) == 1
        times = [40.0 - 2 * (cut in (own[1], triton[0])) for cut in pair]
        return sum(times) / 2 - 3 * isinstance(pair[0], TritonCut)

    assert best_pair(time_us, [*own, *triton]) == ((triton[0], triton[0]), 50.0, 35.0)
    assert best_pair(lambda pair: 50.0 + (pair is not None), own) == (None, 50.0, 50.0)
    assert best_pair(lambda _: 7.0, []) == (None, 7.0, 7.0)


def test_candidates_of_any_product_are_valid():
    for outputs, inner in ((576, 2048), (2048, 2816), (64, 64), (37888, 3584)):
        for kind in ("plain", "gated", "parts"):
            product = Product(outputs, inner, kind)
            for rows in (1, 64, 256):
                cuts = product.likely_cuts(rows, 4)
                assert cuts
                for cut in cuts:
                    cut.check(kind)
                    assert cut.split <= -(-inner // 64)


def test_candidates_of_experts_hold_an_experts_rows():
    sizes = MixtureSizes(experts=128, chosen=8, hidden=2048, inner=768)
    for tokens in (1, 16, 64, 512, 4096):
        cuts = list(likely_cuts(tokens, sizes))
        assert cuts
        for cut in cuts:
            if isinstance(cut, GroupedShape):
                cut.check(sizes.experts)
    assert sizes.names == ("128x1536x2048 gated", "128x2048x768 plain")
    assert sizes.average_rows(64) == 4

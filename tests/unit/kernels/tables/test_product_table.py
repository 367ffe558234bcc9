"""Which cut a product gets: from the measured table, or fixed for equal results."""

from __future__ import annotations

import json

import pytest

from trimaran.kernels.tables.product_table import (
    TABLES,
    GemmShape,
    ProductTable,
    SkinnyShape,
    fixed_choice,
)


def test_a_row_count_gets_the_first_entry_that_reaches_it():
    table = ProductTable(
        {"4096x1024 plain": [(16, [64, 128, 4, 1]), (64, None), (256, [256, 96, 2, 2])]}
    )

    assert table.pick(1, 4096, 1024, "plain") == GemmShape(64, 128, 4)
    assert table.pick(16, 4096, 1024, "plain") == GemmShape(64, 128, 4)
    assert table.pick(17, 4096, 1024, "plain") is None
    assert table.pick(65, 4096, 1024, "plain") == GemmShape(256, 96, 2, 2)
    assert table.choices(4096, 1024, "plain") == [
        GemmShape(64, 128, 4), GemmShape(256, 96, 2, 2),
    ]  # fmt: skip


def test_a_negative_number_of_rows_is_that_of_the_tokens_of_a_tile_of_few_rows():
    table = ProductTable({"2048x8192 parts": [(8, [-8, 16]), (64, [-64, 64, 4])]})
    table.check()
    assert table.pick(3, 2048, 8192, "parts") == SkinnyShape(8, 16)
    assert table.pick(64, 2048, 8192, "parts") == SkinnyShape(64, 64, 4)
    wrong = ProductTable({"2048x8192 plain": [(64, [-64, 64, 4])]})
    with pytest.raises(ValueError, match="a split of 1"):
        wrong.check()


def test_weights_without_measurements_are_multiplied_by_torch():
    table = ProductTable({"4096x1024 plain": [(16, [64, 128, 4, 1])]})

    assert table.pick(17, 4096, 1024, "plain") is None
    assert table.pick(1, 4096, 1024, "gated") is None
    assert table.pick(1, 4096, 512, "plain") is None
    assert (
        ProductTable.of_device("a GPU without measurements").pick(1, 4096, 1024, "plain")
        is None
    )


PATHS = sorted(set(TABLES.glob("*.json")) - set(TABLES.glob("*_experts.json")))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_committed_tables_hold_valid_tile_shapes(path):
    entries = json.loads(path.read_text(encoding="utf-8"))
    table = ProductTable(entries)

    for name, steps in entries.items():
        bounds = [most for most, _ in steps]
        assert bounds == sorted(set(bounds)), name
        sizes, _, kind = name.partition(" ")
        outputs, _, inner = sizes.partition("x")
        for cut in table.choices(int(outputs), int(inner), kind):
            cut.check(kind)
            if isinstance(cut, SkinnyShape):
                continue
            assert cut.stages >= 3 and cut.cluster(kind) <= 8
            assert cut.columns % 16 == 0 and cut.rows // cut.sharing % 8 == 0


@pytest.mark.parametrize(
    "outputs, inner", [(8, 64), (4096, 4096), (6144, 4096), (128256, 4096)]
)
def test_the_split_of_a_fixed_tile_shape_depends_on_the_weight_alone(outputs, inner):
    cuts = [fixed_choice(rows, outputs, inner) for rows in (1, 64, 65, 200, 5000)]

    assert len({cut.split for cut in cuts}) == 1
    assert cuts[0].split * 64 <= inner
    assert all(cut.columns == 128 and cut.sharing == 1 for cut in cuts)


def test_a_tile_shape_with_oversized_partial_sums_is_refused():
    with pytest.raises(ValueError, match="bytes of shared memory for partial sums"):
        GemmShape(256, 192, 4).check("plain")
    GemmShape(256, 192, 4).check("parts")


def test_blocks_that_share_weights_take_whole_slices():
    table = ProductTable({"4096x1024 parts": [(256, [128, 128, 2, 2, 16, 0, 1])]})

    cut = table.pick(200, 4096, 1024, "parts")

    assert cut == GemmShape(128, 128, 2, 2, shares_weights=True)
    cut.check("parts")
    with pytest.raises(ValueError, match="shares 56 columns among 2 blocks"):
        GemmShape(128, 112, 1, 2, shares_weights=True).check("gated")
    with pytest.raises(ValueError, match="shares 128 columns among 1 blocks"):
        GemmShape(128, 128, shares_weights=True).check("plain")
    with pytest.raises(ValueError, match="adds up in clusters, which must share rows of x"):
        GemmShape(128, 128, 2, 2, shares_weights=True).check("plain")


def test_weight_prefetch_is_64_kib_unless_the_table_sets_a_size():
    table = ProductTable(
        {"4096x1024 plain": [(16, [64, 128, 4, 1]), (64, [64, 224, 1, 1, 16, 5])]}
    )

    default = table.pick(1, 4096, 1024, "plain")
    told = table.pick(17, 4096, 1024, "plain")

    assert default is not None and told is not None
    assert default.early_tiles * default.columns * 128 == 64 << 10
    assert (told.stages, told.early_tiles) == (6, 5)

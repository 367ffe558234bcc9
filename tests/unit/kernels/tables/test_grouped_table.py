"""The choice of cuts for grouped products."""

from __future__ import annotations

import json

import pytest

from trimaran.kernels.tables.grouped_table import (
    GroupedShape,
    GroupedTable,
    TritonCut,
    derived_shape,
    derived_shapes,
    stack_name,
)
from trimaran.kernels.tables.product_table import TABLES

TABLE = GroupedTable(
    {
        "8x256x128 gated": [
            (1, [16, 32, 128, 4, 3]),
            (16, [64, 16, 1]),
            (64, None),
            (512, [256, 192, 2]),
        ]
    }
)


@pytest.mark.parametrize(
    ("rows", "cut"),
    [(1, TritonCut(16, 32, 128, 4, 3)), (2, GroupedShape(64, 16)),
     (16, GroupedShape(64, 16)), (17, None),
     (65, GroupedShape(256, 192, 2)), (513, None)],
)  # fmt: skip
def test_the_first_entry_that_holds_the_rows_is_chosen(rows, cut):
    assert TABLE.pick(rows, (8, 256, 128), "gated") == cut


def test_where_no_measured_tile_shape_is_faster_the_rule_chooses():
    entries = {
        "8x256x128 gated": [(16, [64, 16, 1]), (64, None), (128, [16, 32, 128, 4, 3])],
        "8x128x128 plain": [(16, [128, 16, 1]), (64, None), (128, [16, 64, 128, 4, 4])],
    }
    table, shape = GroupedTable(entries), (8, 256, 128)

    assert table.pair(16, shape, has_own=True) == (GroupedShape(64, 16), GroupedShape(128, 16))
    assert table.pair(17, shape, has_own=True) == (None, None)
    rule = derived_shape(64, 8)
    assert rule is not None
    assert table.pair(64, shape, has_own=True) == (rule, rule)
    assert table.pair(64, shape, has_own=False) == (None, None)
    triton = TritonCut(16, 32, 128, 4, 3), TritonCut(16, 64, 128, 4, 4)
    assert table.pair(65, shape, has_own=True) == triton
    for other in ((8, 256, 132), (8, 260, 128), (600, 256, 128)):
        assert table.pair(2000, other, has_own=True) == (None, None)
    beyond = derived_shape(129, 8)
    assert table.pair(129, shape, has_own=True) == (beyond, beyond)


def test_weights_without_measurements_have_no_tile_shape():
    assert TABLE.pick(1, (8, 256, 128), "plain") is None
    assert TABLE.pick(1, (4, 256, 128), "gated") is None


def test_the_table_lists_the_kernels_of_a_model_width():
    assert TABLE.kernels(128) == [
        (GroupedShape(256, 192, 2), "gated", 8), (GroupedShape(64, 16), "gated", 8)
    ]  # fmt: skip
    assert not TABLE.kernels(4096)


@pytest.mark.parametrize("experts", [8, 128, 256, 512])
def test_the_stages_and_the_plan_of_a_kernel_fit_into_shared_memory(experts):
    for weights, rows in ((64, 16), (128, 256), (256, 192)):
        shape = GroupedShape(weights, rows, 2)
        shape.check(experts)
        assert shape.stages(experts) >= 3
    assert GroupedShape(256, 192, 2).stages(256) == 4


@pytest.mark.parametrize(
    ("shape", "experts"),
    [(GroupedShape(192, 64), 8), (GroupedShape(256, 256), 8), (GroupedShape(64, 24), 8),
     (GroupedShape(64, 64, 3), 8), (GroupedShape(64, 64), 513)],
)  # fmt: skip
def test_unsupported_tile_shapes_are_refused(shape, experts):
    with pytest.raises(ValueError, match=r"is no cut|are above 512"):
        shape.check(experts)


@pytest.mark.parametrize(
    "path", sorted(TABLES.glob("*_experts.json")), ids=lambda path: path.stem
)
def test_committed_tables_hold_valid_tile_shapes(path):
    entries = json.loads(path.read_text(encoding="utf-8"))
    table = GroupedTable(entries)

    for name, steps in entries.items():
        sizes, _, kind = name.partition(" ")
        experts, outputs, inner = map(int, sizes.split("x"))
        assert stack_name((experts, outputs, inner), kind) == name
        bounds = [most for most, _ in steps]
        assert bounds == sorted(set(bounds)), name
        assert kind in ("plain", "gated")
        for cut, _, count in table.kernels(inner):
            cut.check(count)
            assert cut.stages(count) >= 3


def test_tiles_by_rule_are_close_to_those_measured():
    entries = json.loads((TABLES / "nvidia_h200_experts.json").read_text(encoding="utf-8"))
    compared = 0
    for name, steps in entries.items():
        num_experts = int(name.partition("x")[0])
        for rows, numbers in steps:
            derived = derived_shape(rows, num_experts)
            # Tiles of Triton's kernel have five numbers.
            if derived is None or numbers is None or len(numbers) > 3:
                continue
            assert derived in derived_shapes()
            derived.check(num_experts)
            assert derived.stages(num_experts) >= 3
            assert derived.rows / 3 <= numbers[1] <= 3 * derived.rows, (name, rows)
            compared += 1
    assert compared > 20


def test_few_rows_of_many_experts_are_not_sorted_into_tiles_by_rule():
    assert derived_shape(3 * 128, 128) is None
    assert derived_shape(4 * 128, 128) == GroupedShape(256, 16)
    assert derived_shape(65536, 128) == GroupedShape(256, 192, 2)

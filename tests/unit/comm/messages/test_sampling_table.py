"""The table of sampling fields is complete, and agrees with the code and the page."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from trimaran.comm.errors import RequestError
from trimaran.comm.messages import sampling_fields
from trimaran.comm.messages.sampling_fields import FIELDS, check_values, refuse_unserved
from trimaran.comm.messages.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[4]
VOCAB = 150
HEADER = (
    "| field | inputs of the token model | type | range | default | served by |",
    "| --- | --- | --- | --- | --- | --- |",
)
TYPES = {"tuple[tuple[int, ...], ...]": "lists of ids"}


def _page_row(row):
    ranges = [each.allowed.format(vocab_size="V") for each in row.ranges]
    default = "" if row.default in ("", b"", ()) else f"`{row.default}`"
    inputs = ", ".join(f"`{name}`" for name in row.inputs)
    served = {None: "refused", "": "no effect"}.get(row.served_by, f"`{row.served_by}`")
    cells = (
        f"`{row.name}`",
        inputs,
        TYPES.get(row.type_name, row.type_name),
        "; ".join(ranges) or row.contents,
        default,
        served,
    )
    return "| " + " | ".join(cells).replace("|  |", "| |") + " |"


def test_the_page_has_the_table():
    page = (ROOT / "docs/decoding.md").read_text(encoding="utf-8").splitlines()
    start = page.index(HEADER[0])
    table = itertools.takewhile(lambda line: line.startswith("|"), page[start:])

    assert [*table] == [*HEADER, *map(_page_row, FIELDS.values())]


def test_each_field_has_a_row_in_the_order_of_declaration():
    assert [*FIELDS] == [field.name for field in dataclasses.fields(SamplingParams)]


def test_no_two_fields_have_the_same_input():
    inputs = [name for row in FIELDS.values() for name in row.inputs]

    assert len(set(inputs)) == len(inputs)


@pytest.mark.parametrize("row", FIELDS.values(), ids=FIELDS)
def test_a_default_is_valid(row):
    row.check(row.default, VOCAB)


@pytest.mark.parametrize(
    "row", [row for row in FIELDS.values() if row.served_by], ids=lambda row: row.name
)
def test_the_code_named_in_a_row_of_the_table_exists(row):
    path, _, name = row.served_by.partition(": ")
    source = (ROOT / path).read_text(encoding="utf-8")

    assert f"def {name}(" in source or f"class {name}" in source


def test_a_refusal_names_the_field_its_value_the_range_and_the_input():
    with pytest.raises(RequestError) as got:
        check_values({"temperature": 0.5, "top_k": -1}, VOCAB)

    assert str(got.value) == (
        "'top_k' is -1 but must be 0 (all) or more (also called runtime_top_k)"
    )


def test_a_field_without_code_that_serves_it_is_refused_once_it_is_set(monkeypatch):
    served = sampling_fields.SERVED_FIELDS - {"min_p"}
    monkeypatch.setattr(sampling_fields, "SERVED_FIELDS", served)

    refuse_unserved(SamplingParams(top_p=0.5))
    with pytest.raises(RequestError, match=r"'min_p' \(value 0.5\) is not served by this"):
        refuse_unserved(SamplingParams(min_p=0.5))


if __name__ == "__main__":
    print("\n".join([*HEADER, *map(_page_row, FIELDS.values())]))

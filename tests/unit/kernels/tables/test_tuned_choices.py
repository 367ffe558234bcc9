"""Choices that `trimaran tune` measured: kept in a file, used on the same machine alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.kernels.tables.grouped_table import GroupedShape, TritonCut
from trimaran.kernels.tables.product_table import GemmShape
from trimaran.kernels.tables.tuned_choices import (
    FILE_NAME,
    TunedChoices,
    Tuning,
    TuningKey,
    read_tunings,
    tuned_files,
    write_tuning,
)

CARD = "NVIDIA H200"
KEY = TuningKey.of(CARD)
STACK = (96, 1536, 2048)
TUNING = Tuning(
    KEY,
    {"1000x2048 plain": [[8, [64, 96, 1, 1]], [64, None]]},
    {"96x1536x2048 gated": [[64, [64, 16, 1]], [512, [16, 64, 128, 4, 3]]]},
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / FILE_NAME
    write_tuning(path, TUNING)
    return path


def test_measured_choices_go_before_rules_and_shipped_tables(path):
    choices = TunedChoices(CARD, [path])

    assert choices.products.pick(1, 1000, 2048, "plain") == GemmShape(64, 96)
    assert choices.products.pick(9, 1000, 2048, "plain") is None
    assert choices.experts.pick(64, STACK, "gated") == GroupedShape(64, 16)
    assert choices.experts.pick(65, STACK, "gated") == TritonCut(16, 64, 128, 4, 3)
    assert str(choices) == (
        "kernels are chosen as measured by trimaran tune for 1 products and 1 products of "
        f"experts on NVIDIA H200: {path}"
    )
    # Weights that were not measured keep the choices that the package ships.
    shipped = TunedChoices(CARD)
    assert shipped.products.pick(1, 1000, 2048, "plain") is None
    assert shipped.products.pick(64, 4096, 14336, "parts") is not None
    assert choices.products.pick(64, 4096, 14336, "parts") == shipped.products.pick(
        64, 4096, 14336, "parts"
    )
    assert (
        str(shipped) == "kernels are chosen by rule: trimaran tune has not measured on " + CARD
    )


@pytest.mark.parametrize("field", ["card", "kernels", "torch"])
def test_choices_of_another_machine_are_not_used(tmp_path, field):
    path = tmp_path / FILE_NAME
    write_tuning(path, replace(TUNING, key=replace(KEY, **{field: "another"})))

    choices = TunedChoices(CARD, [path])

    assert choices.products.pick(1, 1000, 2048, "plain") is None
    assert choices.experts.pick(64, STACK, "gated") is None
    is_told = "Run trimaran tune again" in str(choices) and str(path) in str(choices)
    assert is_told == (field != "card")


def test_the_file_holds_several_cards_and_the_newest_choices_of_each(path):
    other = replace(TUNING, key=replace(KEY, card="NVIDIA H100 80GB HBM3"))
    old = replace(TUNING, key=replace(KEY, card="NVIDIA A100", kernels="older"))
    new = replace(old, key=replace(old.key, kernels="newer"))
    for each in (other, old, new):
        write_tuning(path, each)
    more = {"1000x2048 plain": [[8, [64, 64, 1, 1]]], "1000x1000 parts": [[1, [64, 64, 2, 1]]]}

    write_tuning(path, replace(TUNING, products=more, experts={}))

    by_key = {each.key: each for each in read_tunings(path)}
    assert set(by_key) == {KEY, other.key, new.key}
    assert by_key[KEY].products == more
    assert by_key[KEY].experts == TUNING.experts
    assert [each.name for each in path.parent.iterdir()] == [FILE_NAME]


def test_the_choices_of_the_engines_folder_go_before_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engine = tmp_path / "engine"
    engine.mkdir()
    assert tuned_files(engine) == []
    users = tmp_path / "cache" / "trimaran" / "tuned" / FILE_NAME
    write_tuning(users, TUNING)
    write_tuning(
        engine / FILE_NAME,
        replace(TUNING, products={"1000x2048 plain": [[8, [64, 128, 1, 1]]]}, experts={}),
    )

    choices = TunedChoices(CARD, tuned_files(engine))

    assert tuned_files(engine) == [users, engine / FILE_NAME]
    assert choices.products.pick(1, 1000, 2048, "plain") == GemmShape(64, 128)
    assert choices.experts.pick(64, STACK, "gated") == GroupedShape(64, 16)


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.update(format=2),
        lambda values: values.pop("tunings"),
        lambda values: values["tunings"][0]["key"].pop("card"),
        lambda values: values["tunings"][0]["key"].update(more=1),
        lambda values: values["tunings"][0]["products"].update({"3x plain": [[1, None]]}),
        lambda values: values["tunings"][0]["products"].update(
            {"8x64 plain": [[1, [65, 64, 1, 1]]]}
        ),
        lambda values: values["tunings"][0]["products"].update({"8x64 plain": [[1, [64]]]}),
        lambda values: values["tunings"][0]["products"].update(
            {"8x64 plain": [[8, None], [1, None]]}
        ),
        lambda values: values["tunings"][0]["experts"].update(
            {"8x64x64 plain": [[1, [63, 16, 1]]]}
        ),
    ],
)  # fmt: skip
def test_a_file_that_was_edited_wrongly_is_refused_with_its_name(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))

    with pytest.raises(
        ConfigError, match="Delete the file and run trimaran tune again"
    ) as error:
        TunedChoices(CARD, [path])

    assert str(path) in str(error.value)


def test_half_a_file_is_refused(path):
    path.write_text(path.read_text()[:40])
    with pytest.raises(ConfigError, match="holds no choices of kernels"):
        read_tunings(path)

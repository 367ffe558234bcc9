"""Every key of every model's config.pbtxt that changes nothing says why, or is refused."""

from __future__ import annotations

import logging
import re

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.server.repository.model_repository import ModelRepository
from trimaran.server.repository.parameter_table import (
    BLS_PARAMETERS,
    POSTPROCESSING_PARAMETERS,
    PREPROCESSING_PARAMETERS,
    TOKEN_PARAMETERS,
    Effect,
)

TABLES = {
    "token": ("tensorrt_llm", TOKEN_PARAMETERS),
    "preprocessing": ("preprocessing", PREPROCESSING_PARAMETERS),
    "postprocessing": ("postprocessing", POSTPROCESSING_PARAMETERS),
    "text": ("tensorrt_llm_bls", BLS_PARAMETERS),
}
VALUES = {"str": "some", "int": "3", "float": "0.5", "bool": "true", "loose_bool": "yes"}


def with_effect(effect):
    """A case for each section and its keys of this effect, marked for them."""
    cases = []
    for section, (model, table) in TABLES.items():
        keys = [key for key, known in table.items() if known.effect is effect]
        if keys:
            marks = pytest.mark.feature(*(f"parameter:{key}" for key in keys), of=section)
            cases.append(pytest.param(model, table, keys, id=section, marks=marks))
    return pytest.mark.parametrize(("model", "table", "keys"), cases)


def setter(root, model):
    """Sets one key of a model and keeps the other keys."""
    path = root / model / "config.pbtxt"
    text = path.read_text()

    def set_key(key, value):
        # Works for keys with and without an entry in the template: the first entry of a key no
        # longer counts.
        entry = rf'parameters \{{\s*key: "{key}"\s*value [^}}]*\}}\s*\}}\n?'
        added = f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
        path.write_text(re.sub(entry, "", text) + "\n" + added)

    return set_key


@with_effect(Effect.ACCEPTED)
def test_keys_without_effect_are_accepted_with_the_reason(
    write_repository, caplog, model, table, keys
):
    root = write_repository()
    set_key = setter(root, model)
    for key in keys:
        set_key(key, value := VALUES[table[key].kind])
        caplog.clear()
        with caplog.at_level(logging.INFO):
            ModelRepository.load(root)
        told = f"'{key}' = {value} is accepted without effect: {table[key].reason}"
        assert (told in caplog.text) is bool(table[key].reason), key
        assert f"parameter '{key}' is not known" not in caplog.text


@with_effect(Effect.REFUSED)
def test_keys_of_unsupported_features_are_refused(write_repository, model, table, keys):
    root = write_repository()
    set_key = setter(root, model)
    for key in keys:
        known = table[key]
        set_key(key, VALUES[known.kind])
        with pytest.raises(ConfigError, match=rf"'{key}' is '.*', but .*\. Leave it unset"):
            ModelRepository.load(root)
        for neutral in known.neutral:
            set_key(key, neutral)
            ModelRepository.load(root)


@pytest.mark.feature(
    "setting:triton_backend",
    "setting:preprocessing_instance_count",
    "setting:postprocessing_instance_count",
    "setting:bls_instance_count",
    "setting:encoder_input_features_data_type",
    of="request",
)
def test_settings_without_effect_do_not_change_the_models(write_repository):
    models = ModelRepository.load(
        write_repository(
            triton_backend="python",
            preprocessing_instance_count="3",
            postprocessing_instance_count="4",
            bls_instance_count="5",
            encoder_input_features_data_type="TYPE_BF16",
        )
    ).models
    assert {name: model.role.value for name, model in models.items()} == {
        "ensemble": "ensemble",
        "preprocessing": "preprocessing",
        "tensorrt_llm": "token model",
        "postprocessing": "postprocessing",
        "tensorrt_llm_bls": "bls",
    }

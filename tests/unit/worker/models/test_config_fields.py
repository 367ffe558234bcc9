"""Every key of transformers' configurations is honoured, refused, or known to be unused."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from tests.models.families import family_configs
from tests.models.field_cases import REFUSED, SERVED, SIZES, WITHOUT_EFFECT
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.config.pretrained_families import FAMILIES

CONFIGS = family_configs()
ARCHITECTURES = {family.model_type: name for name, family in reversed(FAMILIES.items())}


def values_of(name):
    """The keys of a model of the tests, as config.json has them."""
    values = json.loads(json.dumps(CONFIGS[name].to_dict()))
    return {**values, "architectures": [ARCHITECTURES[values["model_type"]]]}


def config_of(values):
    """Our configuration, without token ids, which requests name."""
    config = PretrainedConfig.from_huggingface(values, "config.json")
    return replace(config, bos_token_id=None, eos_token_ids=(), pad_token_id=None)


def names_of(name):
    """The keys of a model's configuration class."""
    return [field.name for field in fields(type(CONFIGS[name]))]


@pytest.mark.parametrize("name", list(SERVED))
def test_no_key_of_a_configuration_class_is_unknown(name):
    refused = [changes for model, changes, _ in REFUSED if model == name]
    tried = {key for changes in (*SERVED[name].values(), *refused) for key in changes}
    inherited = {field.name for field in fields(type(CONFIGS[name]).__base__)}

    unknown = set(names_of(name)) - inherited - tried - SIZES - WITHOUT_EFFECT

    assert not unknown, f"{name}: add them to tests/models/field_cases.py"


@pytest.mark.parametrize("name", list(SERVED))
def test_an_omitted_key_has_the_default_of_transformers(name):
    whole = values_of(name)
    for key in set(names_of(name)) & set(whole):
        left = {each: value for each, value in whole.items() if each != key}
        try:
            ours = config_of(left)
        except ConfigError:
            continue
        try:
            theirs = AutoConfig.for_model(**json.loads(json.dumps(left))).to_dict()
        except StrictDataclassError:
            # The default of these keys does not match the other sizes.
            continue
        assert ours == config_of({**theirs, "architectures": whole["architectures"]}), key


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED)
def test_keys_that_are_not_served_are_refused_by_name(name, changes, words):
    with pytest.raises(ConfigError, match=words):
        config_of({**values_of(name), **changes})

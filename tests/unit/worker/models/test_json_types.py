"""A value of the wrong JSON type in a folder's files is refused by file, key and value."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from tests.models.families import family_configs
from trimaran.client.vocabulary import Vocabulary
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.json_types import JsonType
from trimaran.server.models.tokenizer import Tokenizer
from trimaran.worker.config.engine_folder import BuildConfig, EngineFolder
from trimaran.worker.config.huggingface_keys import _NEVER_NULL, _ROPE_TYPES, _TYPES
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.config.pretrained_families import FAMILIES

WRONG = (
    5, 1.5, 0, -1.5, 1e400, float("nan"), 2**31, -(2**63), "x", True, [1.5], [0.0], ["x"],
    {"a": 1},
)  # fmt: skip
CONFIGS = family_configs()
ARCHITECTURES = {family.model_type: name for name, family in reversed(FAMILIES.items())}


def huggingface_values(name):
    values = json.loads(json.dumps(CONFIGS[name].to_dict()))
    return {**values, "architectures": [ARCHITECTURES[values["model_type"]]]}


def from_huggingface(values):
    return lambda: PretrainedConfig.from_huggingface(values, "config.json")


def wrong_for(kind):
    return [value for value in WRONG if not kind.fits(value)]


def refused(load, key, value):
    """A refusal that names the file, the key and the value."""
    with pytest.raises(ConfigError) as caught:
        load()
    assert re.search(
        rf"config\.json: (.*\.)?{key} is {re.escape(repr(value))}", str(caught.value)
    )


@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_key_of_a_hugging_face_folder_has_a_type(name):
    values = huggingface_values(name)
    for key in _TYPES.keys() & values.keys():
        for wrong in wrong_for(_TYPES[key]):
            changed = {**values, key: wrong}
            refused(from_huggingface(changed), key, wrong)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_null_is_refused_where_it_means_nothing(name):
    values = huggingface_values(name)
    inner = values.get("text_config", values)
    for key in sorted(_NEVER_NULL & inner.keys()):
        changed = {**inner, key: None}
        if inner is not values:
            changed = {**values, "text_config": changed}
        refused(from_huggingface(changed), key, None)


@pytest.mark.parametrize("inside", ["rope_parameters", "rope_scaling"])
def test_every_key_of_the_rope_parameters_has_a_type(inside):
    values = huggingface_values("llama")
    for key, kind in _ROPE_TYPES.items():
        for wrong in wrong_for(kind):
            changed = {**values, inside: {key: wrong}}
            refused(from_huggingface(changed), key, wrong)


def test_a_wrong_type_in_a_nested_object_is_named_with_its_path():
    values = huggingface_values("gemma3-of-images")
    values["text_config"]["rope_parameters"] = {"full_attention": {"factor": "8"}}
    with pytest.raises(ConfigError) as caught:
        PretrainedConfig.from_huggingface(values, "config.json")
    assert str(caught.value) == (
        "config.json: text_config.rope_parameters.full_attention.factor is '8' but must be a "
        "finite number above 0"
    )


ENGINE = {
    "format_version": 1,
    "version": "test",
    "pretrained_config": {
        **PretrainedConfig.from_huggingface(huggingface_values("llama"), "x").to_dict(),
        "mapping": {"pp_partition": [CONFIGS["llama"].num_hidden_layers]},
    },
    "build_config": BuildConfig(max_seq_len=128).to_dict(),
}


def loader(tmp_path, section, key, value):
    config = json.loads(json.dumps(ENGINE))
    at = config
    for name in section:
        at = at[name]
    at[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    return lambda: EngineFolder.load(tmp_path, check_weights=False)


def test_an_engine_folder_of_the_right_types_is_loaded(tmp_path):
    loader(tmp_path, (), "version", "test")()


@pytest.mark.parametrize(
    ("section", "owner"),
    [("pretrained_config", PretrainedConfig), ("build_config", BuildConfig)],
)
def test_every_field_of_an_engine_folder_has_a_type(tmp_path, section, owner):
    kinds = {
        "int": JsonType.INTEGER, "float": JsonType.NUMBER, "str": JsonType.TEXT,
        "bool": JsonType.FLAG, "dict[str, Any]": JsonType.OBJECT,
        "tuple[int, ...]": JsonType.INTEGERS, "QuantizationConfig": JsonType.OBJECT,
    }  # fmt: skip
    for field in fields(owner):
        if field.name == "architecture":
            continue
        # TensorRT-LLM's folders hold the KV cache's dtype in the section of the weights.
        inner = ("quantization",) if field.name == "kv_cache_quant_algo" else ()
        for wrong in wrong_for(kinds[field.type.removesuffix(" | None")]):
            load = loader(tmp_path, (section, *inner), field.name, wrong)
            refused(load, field.name, wrong)


def test_list_fields_of_an_engine_folder_refuse_other_types(tmp_path):
    section = ("pretrained_config", "mapping")
    refused(loader(tmp_path, section, "pp_partition", 5), "pp_partition", 5)
    loader(tmp_path, (), "shards", ["rank0"])
    with pytest.raises(ConfigError, match=r"shards is .* must be a list of objects"):
        EngineFolder.load(tmp_path)


@pytest.mark.parametrize("load", [Tokenizer, Vocabulary])
@pytest.mark.parametrize("file_name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("wrong", [5, True, ["</s>"], {"content": 5}])
def test_special_tokens_must_be_strings(tmp_path, load, file_name, wrong):
    folder = demo_tokenizer(tmp_path)
    (folder / file_name).write_text(json.dumps({"eos_token": wrong}))
    with pytest.raises(ConfigError) as caught:
        load(str(folder))
    words = f"{folder / file_name}: eos_token is {wrong!r} but must be a string"
    assert words in str(caught.value)


@pytest.mark.parametrize("load", [Tokenizer, Vocabulary])
def test_files_of_special_tokens_must_be_objects(tmp_path, load):
    folder = demo_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: holds a list, not an obj"):
        load(str(folder))
    (folder / "tokenizer_config.json").write_text('{"eos_token": null}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert load(str(folder)).end_id == 1


def demo_tokenizer(tmp_path):
    source = Path(__file__).parents[4] / "examples" / "demo_models" / "base"
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    shutil.copy(source / "tokenizer.json", folder)
    return folder

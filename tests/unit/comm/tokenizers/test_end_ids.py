"""The ids that end a model's output, of the files in its folder."""

from __future__ import annotations

import json

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.comm.tokenizers.end_ids import model_end_ids


@pytest.fixture
def ends(tmp_path):
    """The end ids of a folder with these two files."""

    def read(generation=None, config=None):
        for name, values in (("generation_config.json", generation), ("config.json", config)):
            if values is not None:
                (tmp_path / name).write_text(json.dumps(values))
        return model_end_ids(tmp_path)

    return read


@pytest.mark.parametrize(
    ("generation", "config", "found"),
    [
        ({"eos_token_id": [5, 7, 5]}, {"eos_token_id": 1}, (5, 7)),
        ({"eos_token_id": 6}, None, (6,)),
        ({"do_sample": True}, {"eos_token_id": [1, 2]}, (1, 2)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": []}, {"text_config": {"eos_token_id": 3}}, (3,)),
        (None, {"model_type": "llama"}, ()),
        (None, None, ()),
    ],
)
def test_generation_config_counts_before_config(ends, generation, config, found):
    assert ends(generation, config) == found


@pytest.mark.parametrize("wrong", [-1, "</s>", True, [2, 1.5], [None], 1 << 31])
def test_what_is_no_id_is_refused_with_file_and_value(ends, wrong):
    with pytest.raises(
        ConfigError, match=r"generation_config\.json: eos_token_id is .* must be"
    ):
        ends({"eos_token_id": wrong})


def test_more_ids_than_a_request_carries_are_refused(ends):
    with pytest.raises(ConfigError, match="names 9 ids, but at most 8 can end an output"):
        ends({"eos_token_id": list(range(9))})

"""The flags of `trimaran serve` for speculative decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launcher_repository import resolve, write_engine, write_model

from trimaran.comm.errors import ConfigError


@pytest.fixture
def repository(tmp_path):
    """A model repository with one model."""
    write_engine(tmp_path / "engine", tp_size=1)
    write_model(tmp_path / "repo" / "a", gpt_model_path=str(tmp_path / "engine"))
    return tmp_path / "repo"


def test_the_drafter_is_the_one_of_the_flags(repository):
    def speculation(*flags):
        config = resolve(repository, *flags)
        return config.groups[0].engine.scheduler.speculation

    assert not speculation().is_on
    found = speculation("--speculative-decoding", "ngram", "--max-draft-tokens", "7")
    assert (found.drafter, found.max_draft_tokens, found.is_adaptive) == ("ngram", 7, True)
    assert not speculation("--speculative-decoding=ngram", "--verify-all-drafts").is_adaptive


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--max-draft-tokens", "4"), "--max-draft-tokens is set but no draft tokens"),
        (("--verify-all-drafts",), "--verify-all-drafts is set but no draft tokens"),
        (
            ("--speculative-decoding", "draft_tokens", "--verify-all-drafts"),
            "but the drafter is draft_tokens",
        ),
        (
            ("--speculative-decoding", "ngram", "--max-draft-tokens", "65"),
            "--max-draft-tokens is 65 but must be 1 to 64",
        ),
    ],
)
def test_flags_of_drafts_without_effect_are_refused(repository, flags, complaint):
    with pytest.raises(ConfigError) as caught:
        resolve(repository, *flags)

    assert complaint in str(caught.value)


def test_an_engine_with_a_head_drafts_with_it(repository, tmp_path):
    config = tmp_path / "engine" / "config.json"
    values = json.loads(config.read_text())
    build = {"speculative_decoding_mode": "eagle", "max_draft_len": 3}
    values["build_config"].update(build)
    config.write_text(json.dumps(values))

    found = resolve(repository).groups[0].engine.scheduler.speculation

    folder = str(tmp_path / "engine" / "draft_head")
    assert (found.drafter, found.draft_dir, found.max_draft_tokens) == ("eagle", folder, 3)
    flags = ("--draft-model", "other", "--verify-all-drafts")
    found = resolve(repository, *flags).groups[0].engine.scheduler.speculation
    assert (found.draft_dir, found.is_adaptive) == (str(Path("other").absolute()), False)


def test_a_network_of_the_flags_needs_its_folder(repository):
    flags = ("--speculative-decoding", "draft_model")
    with pytest.raises(ConfigError, match="needs the folder of a network"):
        resolve(repository, *flags)

    found = resolve(repository, *flags, "--draft-model", "/x").groups[0].engine.scheduler
    assert found.speculation.draft_dir == "/x"


def test_a_decoding_mode_must_be_that_of_the_engine(tmp_path):
    write_engine(tmp_path / "engine", tp_size=1)
    keys = {"gpt_model_path": str(tmp_path / "engine"), "decoding_mode": "medusa"}
    write_model(tmp_path / "repo" / "a", **keys)

    with pytest.raises(ConfigError, match="decoding_mode is medusa but the drafter is none"):
        resolve(tmp_path / "repo")

"""The flags of `trimaran serve` for speculative decoding."""

from __future__ import annotations

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

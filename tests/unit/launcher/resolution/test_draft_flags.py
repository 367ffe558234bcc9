"""The flags of `trimaran serve` for speculative decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launcher_repository import resolve, write_engine, write_model

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.draft_tree import DynamicTreeLimits


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


@pytest.mark.parametrize(
    ("mode", "drafter"),
    [
        ("eagle", "eagle"), ("medusa", "medusa"), ("mtp", "mtp"),
        ("explicit_draft_tokens", "redrafter"),
    ],
)  # fmt: skip
def test_an_engine_with_a_head_drafts_with_it(repository, tmp_path, mode, drafter):
    config = tmp_path / "engine" / "config.json"
    values = json.loads(config.read_text())
    build = {"speculative_decoding_mode": mode, "max_draft_len": 3}
    values["build_config"].update(build)
    config.write_text(json.dumps(values))

    found = resolve(repository).groups[0].engine.scheduler.speculation

    folder = str(tmp_path / "engine" / "draft_head")
    assert (found.drafter, found.draft_dir, found.max_draft_tokens) == (drafter, folder, 3)
    flags = ("--draft-model", "other", "--verify-all-drafts")
    found = resolve(repository, *flags).groups[0].engine.scheduler.speculation
    assert (found.draft_dir, found.is_adaptive) == (str(Path("other").absolute()), False)


def test_a_layer_for_prediction_is_in_the_folder_of_the_target(tmp_path, repository):
    folder = Path(__file__).parents[4] / "examples" / "demo_models" / "base"
    write_model(tmp_path / "other" / "a", gpt_model_path=str(folder))
    flags = ("--speculative-decoding", "mtp")

    found = resolve(tmp_path / "other", *flags).groups[0].engine.scheduler.speculation
    assert (found.drafter, found.draft_dir) == ("mtp", str(folder))
    # An engine that was built without the layer does not have it.
    with pytest.raises(ConfigError, match="needs the folder of a network"):
        resolve(repository, *flags)


def test_a_network_of_the_flags_needs_its_folder(repository):
    flags = ("--speculative-decoding", "draft_model")
    with pytest.raises(ConfigError, match="needs the folder of a network"):
        resolve(repository, *flags)

    found = resolve(repository, *flags, "--draft-model", "/x").groups[0].engine.scheduler
    assert found.speculation.draft_dir == "/x"


@pytest.mark.parametrize("mode", ["auto", "redrafter"])
def test_the_decoding_mode_of_an_engine_may_be_named(tmp_path, mode):
    build = {"speculative_decoding_mode": "explicit_draft_tokens", "max_draft_len": 3}
    write_engine(tmp_path / "engine", tp_size=1, **build)
    keys = {"gpt_model_path": str(tmp_path / "engine"), "decoding_mode": mode}
    write_model(tmp_path / "repo" / "a", **keys)

    found = resolve(tmp_path / "repo").groups[0].engine.scheduler.speculation
    assert found.drafter == "redrafter"


def test_a_decoding_mode_must_be_that_of_the_engine(tmp_path):
    write_engine(tmp_path / "engine", tp_size=1)
    keys = {"gpt_model_path": str(tmp_path / "engine"), "decoding_mode": "medusa"}
    write_model(tmp_path / "repo" / "a", **keys)

    with pytest.raises(ConfigError, match="decoding_mode is medusa but the drafter is none"):
        resolve(tmp_path / "repo")


SIZES = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")


def with_lookahead(tmp_path, **keys):
    """A repository with an engine that is built for lookahead decoding, and these keys."""
    build = {"speculative_decoding_mode": "lookahead_decoding", "max_draft_len": 64}
    write_engine(tmp_path / "engine", tp_size=1, **build)
    write_model(tmp_path / "repo" / "a", gpt_model_path=str(tmp_path / "engine"), **keys)
    return tmp_path / "repo"


@pytest.mark.feature(*(f"parameter:{name}" for name in SIZES))
def test_an_engine_for_lookahead_has_the_sizes_of_the_repository(tmp_path):
    for number, (keys, sizes) in enumerate(
        [
            ({}, (7, 7, 7)),
            (dict(zip(SIZES, "435", strict=True)) | {"decoding_mode": "lookahead"}, (4, 3, 5)),
        ]
    ):
        repository = with_lookahead(tmp_path / str(number), **keys)
        found = resolve(repository).groups[0].engine.scheduler.speculation
        assert (found.drafter, found.lookahead, found.max_draft_tokens) == (
            "lookahead", sizes, 64,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"decoding_mode": "lookahead"}, "needs all of lookahead_window_size, lookahead_ng"),
        ({SIZES[0]: "4"}, "needs all of lookahead_window_size, lookahead_ngram_size"),
        (dict(zip(SIZES, "417", strict=True)), "'lookahead_ngram_size' is 1 but must be at "),
    ],
)
def test_incomplete_sizes_of_lookahead_are_refused(tmp_path, keys, complaint):
    with pytest.raises(ConfigError, match=complaint):
        resolve(with_lookahead(tmp_path, **keys))


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        (dict.fromkeys(SIZES, "4"), "lookahead_verification_set_size are set but the drafter "),
        (
            {"decoding_mode": "lookahead"},
            "Build the engine with --speculative_decoding_mode lo",
        ),
    ],
)
def test_lookahead_needs_an_engine_that_is_built_for_it(tmp_path, keys, complaint):
    write_engine(tmp_path / "engine", tp_size=1)
    write_model(tmp_path / "repo" / "a", gpt_model_path=str(tmp_path / "engine"), **keys)

    with pytest.raises(ConfigError, match=complaint):
        resolve(tmp_path / "repo")


def with_head(tmp_path, kind, keys, **build):
    """A repository with an engine that is built for a head of this kind, and these keys."""
    write_engine(tmp_path / "engine", tp_size=1, speculative_decoding_mode=kind, **build)
    write_model(tmp_path / "repo" / "a", gpt_model_path=str(tmp_path / "engine"), **keys)
    return tmp_path / "repo"


@pytest.mark.feature("parameter:medusa_choices", "parameter:eagle_choices")
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_head_drafts_the_tree_of_the_repository_or_of_the_build(tmp_path, kind):
    built = {"max_draft_len": 9, "draft_choices": "{0}, {0, 0}"}
    for number, (keys, tree) in enumerate(
        [
            ({}, ((0,), (0, 0))),
            ({f"{kind}_choices": "{0, 0, 0}, {1}"}, ((0,), (0, 0), (0, 0, 0), (1,))),
        ]
    ):
        repository = with_head(tmp_path / str(number), kind, keys, **built)
        found = resolve(repository).groups[0].engine.scheduler.speculation
        assert (found.tree, found.max_draft_tokens) == (tree, len(tree))


def test_an_eagle_head_grows_trees_if_it_was_built_so(tmp_path):
    built = {"max_draft_len": 9, "draft_width": 3, "draft_depth": 4}
    found = []
    for number, keys in enumerate([{}, {"eagle_choices": "{0}, {1}"}]):
        repository = with_head(tmp_path / str(number), "eagle", keys, **built)
        found.append(resolve(repository).groups[0].engine.scheduler.speculation)

    assert (found[0].dynamic_limits, found[0].tree) == (DynamicTreeLimits(3, 4, 9), ())
    # Choices of the repository replace the tree of the build.
    assert (found[1].dynamic_limits, found[1].tree) == (None, ((0,), (1,)))


@pytest.mark.parametrize(
    ("kind", "keys", "complaint"),
    [
        ("eagle", {"medusa_choices": "{0}"}, "is '{0}' but the drafter is eagle"),
        ("medusa", {"eagle_choices": "{0}"}, "is '{0}' but the drafter is medusa"),
        ("eagle", {"eagle_choices": "0, 1"}, "eagle_choices is '0, 1' but must be a tree such"),
        ("eagle", {"eagle_choices": "{0}, {0}"}, "has the node [0] twice"),
        ("medusa", {"medusa_choices": "{99}"}, "a node is a list of ranks from 0 to 63"),
        (
            "medusa",
            {"medusa_choices": "{0}, {1}, {2}, {3}"},
            "has 4 nodes but at most 3 draft tokens are verified in a step. Raise",
        ),
    ],
)  # fmt: skip
def test_trees_that_cannot_be_drafted_are_refused(tmp_path, kind, keys, complaint):
    repository = with_head(tmp_path, kind, keys, max_draft_len=3)

    with pytest.raises(ConfigError) as caught:
        resolve(repository)

    assert complaint in str(caught.value)

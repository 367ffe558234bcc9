"""A front end's successor serves restorable models, and shows the states of other models."""

from __future__ import annotations

from dataclasses import replace

import pytest
from controlled_frontend import starting_over

from trimaran.server.loading.group_requests import SavedState
from trimaran.server.repository.config_pbtxt import read_config


@pytest.fixture
def start(tmp_path):
    """Starts successive front ends in explicit mode over one repository."""
    with starting_over(tmp_path) as start:
        yield start


def break_tokenizer(folder, state):
    """Its files are links that go around in a circle."""
    (folder / "tokenizer").symlink_to("again")
    (folder / "again").symlink_to("tokenizer")
    config = read_config(folder / "config.pbtxt")
    config.name = folder.name
    config.parameters["tokenizer_dir"].string_value = f"{folder}/tokenizer"
    return change(state, config=config.SerializeToString())


def change(state, **fields):
    """The state with other fields of the preprocessing model."""
    models = [
        replace(model, **fields) if model.name == "preprocessing" else model
        for model in state.models
    ]
    return replace(state, models=tuple(models))


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (break_tokenizer, "Name in tokenizer_dir a folder"),
        (lambda folder, state: change(state, config=b"\xff"), "DecodeError: "),
        (
            lambda folder, state: change(state, folder=f"{folder.parent}\0/preprocessing"),
            "embedded null byte",
        ),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_restored_is_unavailable_with_the_reason(start, damage, reason):
    before = start()
    for name in ("preprocessing", "postprocessing"):
        assert before.load(name)[0] == 200
    before.wait_until(lambda: len(saved_state_of(before).models) == 2)
    before.process.kill()
    before.process.wait()
    state = damage(before.repository / "preprocessing", saved_state_of(before))

    after = start(saved_state=state.to_bytes())

    assert after.index()["postprocessing"] == ("READY", None)
    shown, told = after.index()["preprocessing"]
    assert shown == "UNAVAILABLE"
    assert reason in told
    assert not after.is_ready()


def test_a_restarted_front_end_shows_the_state_of_models_that_do_not_serve(start):
    frontend = start()
    assert frontend.load("preprocessing")[0] == 200
    assert frontend.unload("preprocessing")[0] == 200
    frontend.failing["tensorrt_llm"] = "rank 0 (pid 7): out of memory"
    assert frontend.load("tensorrt_llm")[0] == 500
    before = frontend.index()
    assert before["preprocessing"] == ("UNAVAILABLE", "unloaded")
    frontend.wait_until(lambda: b"out of memory" in frontend.saved["state"])
    frontend.process.kill()
    frontend.process.wait()
    after = start(saved_state=frontend.saved["state"])
    assert after.index() == before
    assert not after.is_ready()
    assert after.unload("tensorrt_llm")[0] == 200
    assert after.is_ready()


def test_a_restarted_front_end_does_not_wait_for_a_dead_group(start):
    frontend = start()
    assert frontend.load("ensemble")[0] == 200
    frontend.wait_until(lambda: frontend.saved.get("groups") == ["tensorrt_llm"])
    saved_state = frontend.saved["state"]
    frontend.process.kill()
    frontend.process.wait()
    after = start(saved_state=saved_state, down=["tensorrt_llm"])
    assert after.tokenize()[0] == 200
    assert after.generate()[0] == 503
    after.release("tensorrt_llm")
    after.wait_until(lambda: after.generate()[0] == 200)


def saved_state_of(frontend):
    """The state that a front end has saved so far."""
    return SavedState.from_bytes(frontend.saved["state"])

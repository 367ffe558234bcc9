"""A front end's successor serves what it can: one model's failure is that model's alone."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from controlled_frontend import ControlledFrontend
from started_frontend import write_repository

from trimaran.server.config_pbtxt import read_config
from trimaran.server.remembered import Remembered


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
def test_a_model_that_cannot_be_restored_is_unavailable_with_the_reason(
    tmp_path, damage, reason
):
    write_repository(tmp_path / "repository")
    with contextlib.ExitStack() as stack:
        before = ControlledFrontend(stack, tmp_path)
        before.wait_ready()
        for name in ("preprocessing", "postprocessing"):
            assert before.load(name)[0] == 200
        before.wait_until(lambda: len(remembered_by(before).models) == 2)
        before.process.kill()
        before.process.wait()
        state = damage(tmp_path / "repository" / "preprocessing", remembered_by(before))

        after = ControlledFrontend(stack, tmp_path, remembered=state.to_bytes())
        after.wait_ready()

        assert after.index()["postprocessing"] == ("READY", None)
        shown, told = after.index()["preprocessing"]
        assert shown == "UNAVAILABLE"
        assert reason in told
        assert not after.is_ready()


def remembered_by(frontend):
    """What a front end has left so far."""
    return Remembered.from_bytes(frontend.remembered["state"])

"""Files that come with loads: they lie on the server for as long as a model needs them."""

import pytest
from controlled_frontend import with_nothing_loaded


@pytest.fixture
def frontend(tmp_path):
    """A server in explicit mode with nothing loaded."""
    with with_nothing_loaded(tmp_path) as frontend:
        yield frontend


def load_ensemble(frontend):
    """Load the ensemble with a file, and its steps; returns the file's path."""
    assert frontend.load_with_file(frontend.repository / "ensemble") == (200, None)
    (note,) = frontend.files("note")
    return note


def is_down(frontend, model):
    return frontend.index()[model][0] == "UNAVAILABLE"


def test_files_of_an_ensemble_are_kept_when_its_step_is_reloaded(frontend):
    note = load_ensemble(frontend)
    (frontend.repository / "preprocessing" / "config.pbtxt").touch()
    assert frontend.load("preprocessing")[0] == 200
    frontend.unload("postprocessing")
    frontend.wait_until(lambda: is_down(frontend, "ensemble"))
    assert frontend.load("postprocessing")[0] == 200
    assert frontend.index()["ensemble"][0] == "READY"
    assert note.exists()
    frontend.unload("ensemble")
    frontend.wait_until(lambda: not note.exists())


def test_files_of_an_ensemble_waiting_for_a_step_are_deleted_with_the_ensemble(frontend):
    note = load_ensemble(frontend)
    frontend.unload("preprocessing")
    frontend.wait_until(lambda: is_down(frontend, "ensemble"))
    assert note.exists()
    frontend.unload("ensemble")
    frontend.wait_until(lambda: not note.exists())


def test_files_of_an_ensemble_with_an_unreadable_step_are_deleted_at_once(frontend):
    (frontend.repository / "preprocessing" / "config.pbtxt").write_text("nonsense")
    assert frontend.load_with_file(frontend.repository / "ensemble")[0] == 500
    assert list(frontend.scratch.iterdir()) == []


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("name", ["\\000", "../secret", "1/../../secret", "/etc/hostname"])
def test_label_files_outside_the_model_folder_are_refused_with_the_load(frontend, name):
    (frontend.repository / "secret").write_text("private")
    path = frontend.repository / "postprocessing" / "config.pbtxt"
    path.write_text(
        path.read_text().replace(
            "output [\n  {", f'output [\n  {{\n    label_filename: "{name}"', 1
        )
    )
    assert "label_filename" in path.read_text()
    for status, body in (frontend.load_with_file(path.parent), frontend.load(path.parent.name)):
        assert status == 500
        assert "which names no file below the model's folder" in body["error"]
    assert list(frontend.scratch.iterdir()) == []

"""Traces of chosen steps."""

import dataclasses
import errno
import gzip
import json
import os
from pathlib import Path

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_config import EngineConfig, ProfileConfig, RankConfig


@pytest.fixture
def traced(make_engine, tmp_path):
    """A function that makes an engine which traces the steps ``first`` to ``last``."""

    def make(first: int, last: int, **changes):
        config = ProfileConfig(first=first, last=last, folder=str(tmp_path / "traces"))
        return make_engine(profile=config, **changes)

    return make


def spans(folder) -> list[str]:
    (path,) = folder.iterdir()
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    return [name for name in names if name.startswith("engine: ")]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_trace_holds_exactly_the_requested_steps(traced, tmp_path, prompt_of, depth):
    driver = traced(3, 5, depth=depth)
    driver.submit(prompt_of(10), max_tokens=20)
    driver.run()
    driver.engine.shutdown()
    launches = spans(tmp_path / "traces").count("engine: launch")
    # Steps in flight when the last step's ids arrive were launched as well.
    assert launches == 3 + depth - 1


def test_a_trace_is_written_when_the_engine_ends_during_the_trace(traced, tmp_path, prompt_of):
    driver = traced(2, 1000)
    driver.submit(prompt_of(10), max_tokens=4)
    driver.run()
    driver.engine.shutdown()
    assert spans(tmp_path / "traces").count("engine: launch") == 3


def test_a_trace_that_cannot_be_written_is_logged_and_leaves_no_file(
    traced, tmp_path, prompt_of, monkeypatch, caplog
):
    def export(trace, path):
        (tmp_path / "traces" / Path(path).name).write_bytes(b"the beginning")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", export)
    driver = traced(2, 3)
    driver.submit(prompt_of(10), max_tokens=4)
    driver.run()
    driver.engine.shutdown()
    assert "No space left on device. Free space there, or name another folder" in caplog.text
    assert list((tmp_path / "traces").iterdir()) == []


def test_a_trace_whose_steps_never_run_leaves_no_file_and_is_logged(
    traced, tmp_path, prompt_of, caplog
):
    driver = traced(500, 510)
    driver.submit(prompt_of(10), max_tokens=4)
    driver.run()
    driver.engine.shutdown()
    assert not (tmp_path / "traces").exists()
    assert "no trace was written: the steps 500 to 510 never came" in caplog.text


def test_tracing_changes_no_token(traced, make_engine, prompt_of):
    outputs = []
    for driver in (make_engine(), traced(2, 6)):
        number = driver.submit(prompt_of(10), max_tokens=12)
        driver.run()
        driver.engine.shutdown()
        outputs.append(driver.output(number))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("text", "folder", "words"),
    [
        ("5:9", "logs", "must name the first and the last step"),
        ("steps=9:5", "logs", "not before the first"),
        ("steps=0:5", "logs", "count from 1"),
        ("steps=1:5000", "logs", "at most 1000"),
        ("steps=1:5", "", "--log-dir"),
    ],
)
def test_steps_that_cannot_be_traced_are_refused(text, folder, words):
    with pytest.raises(ConfigError, match=words):
        ProfileConfig.parse(text, folder)


def test_every_rank_gets_the_steps_to_trace():
    profile = ProfileConfig.parse("steps=100:120", "logs")
    config = RankConfig(
        engine=EngineConfig(model="m", engine_dir="d"), group="m", profile=profile
    )
    assert RankConfig.from_wire(config.to_wire()) == config
    without = dataclasses.replace(config, profile=None)
    assert RankConfig.from_wire(without.to_wire()) == without

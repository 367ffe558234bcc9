"""The limit on a server's ranks, from every source of the number."""

from __future__ import annotations

import pytest
from launcher_repository import resolve, write_engine, write_model

from trimaran.comm.errors import ConfigError


@pytest.fixture
def repository(tmp_path):
    """1,024 instances of four ranks and one of one rank."""
    engines = [write_engine(tmp_path / f"engine-{size}", tp_size=size) for size in (4, 1)]
    seats = (";".join(["1,2,3,4"] * 1024), "5")
    for name, engine, participants in zip("ab", engines, seats, strict=True):
        write_model(
            tmp_path / "repo" / name,
            gpt_model_path=str(engine),
            participant_ids=participants,
        )
    with (tmp_path / "repo" / "a" / "config.pbtxt").open("a") as file:
        file.write("instance_group [ { count: 1024 kind: KIND_CPU } ]\n")
    return tmp_path / "repo"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ((), "1025 groups have 4097 ranks in all, but a server has at most 4096"),
        (
            ("--disable-spawn-processes", "--world-size", "4098"),
            "--world-size is 4098, but at most 4096 ranks and the orchestrator's place",
        ),
    ],
)
def test_more_ranks_than_a_server_has_are_refused(repository, flags, complaint):
    with pytest.raises(ConfigError) as caught:
        resolve(repository, "--multi-model", "--device=cpu", *flags)
    assert complaint in str(caught.value)

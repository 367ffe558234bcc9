"""The log of a process, tested in a separate process, because the log set-up replaces the
root logger."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import logging
from trimaran.comm.log import setup_logging
from trimaran.server.settings import LogSettings

setup_logging("frontend", rank={rank}, group="llm", directory={directory!r})
settings = LogSettings()
for level in (0, 1, 0):
    settings.update({{"log_verbose_level": level}})
    logging.debug("told at level %d", level)
settings.update({{"log_info": False}})
logging.info("not told")
logging.warning("always told")
"""


def run(rank, directory=""):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(rank=rank, directory=str(directory))],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.partition("] ")[2] for line in done.stderr.splitlines()]


@pytest.mark.parametrize(("rank", "told"), [(None, ["told at level 1"]), (1, [])])
def test_log_settings_changed_at_run_time_apply_to_stderr(rank, told):
    assert run(rank) == [*told, "always told"]


def test_the_log_file_of_a_rank_holds_lines_that_are_hidden_on_stderr(tmp_path):
    run(1, tmp_path)
    assert "told at level 1" in (tmp_path / "llm-frontend1.log").read_text()


def test_a_full_disk_loses_only_lines_of_the_log_file_and_is_reported_once(tmp_path):
    (tmp_path / "llm-frontend1.log").symlink_to("/dev/full")
    told, *rest = run(1, tmp_path)
    assert told.startswith(f"{tmp_path}/llm-frontend1.log lacks lines from here on")
    assert "No space left on device. Free space there, or name another --log-dir" in told
    assert rest == ["always told"]


def test_a_log_line_with_invalid_utf8_is_written_to_the_file(tmp_path):
    warn = 'import logging; logging.warning("asked for %s", "caf\\udce9")'
    setup = (
        f"import trimaran.comm.log as log; log.setup_logging('x', directory={str(tmp_path)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{setup}; {warn}"],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = done.stderr.splitlines()
    assert line.endswith(r"asked for caf\udce9")
    assert (tmp_path / "x.log").read_text().splitlines() == [line]


def test_a_log_file_that_cannot_be_opened_loses_only_its_lines(tmp_path):
    (tmp_path / "llm-frontend1.log").mkdir()
    told, *rest = run(1, tmp_path)
    assert told == (
        f"{tmp_path}/llm-frontend1.log cannot be opened: Is a directory. Lines of this process "
        "go to the common log alone; mend the folder of --log-dir."
    )
    assert rest == ["always told"]


def test_a_deleted_log_folder_is_created_again(tmp_path):
    assert run(1, tmp_path / "gone") == ["always told"]
    assert "told at level 1" in (tmp_path / "gone" / "llm-frontend1.log").read_text()


CHANGES_STREAM = """
import io, logging
from trimaran.comm.log import setup_logging

setup_logging("supervisor")
logging.warning("lost")
logging.getLogger().handlers[0].setStream(io.StringIO())
print("changed")
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_process_changes_its_log_stream_after_lines_were_lost_on_a_full_disk(unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", CHANGES_STREAM],
            env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": unbuffered},
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
        )
    assert done.stdout == "changed\n"

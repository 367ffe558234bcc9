"""Commands, flags, targets, files and links in the pages exist."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "features"))

import commands

from tests.unit.project.rules import tracked_files
from trimaran.launcher.cli import main as cli

ROOT = commands.ROOT
PAGES = tracked_files(
    ":(glob)*.md", ":(glob)docs/*.md", ":(glob)benchmarks/*.md", "examples/*.md"
)
MANIFESTS = [
    path
    for path in tracked_files("deploy", "slurm/templates")
    if path.suffix in ("", ".yaml", ".tpl", ".sbatch", ".dockerignore")
]
# Flags of other programs that the pages name.
FOREIGN = {
    "--bls-composing-models", "--collect-metrics", "--output-shared-memory-size",
    "--request-rate-range", "--shared-memory", "--string-length",  # perf_analyzer
    "--endpoint", "--endpoint-type", "--extra-inputs", "--isl", "--osl", "--request-count",
    "--server-metrics", "--tokenizer", "--url", "--concurrency",  # aiperf
    "--backend", "--output-tokens-mean", "--synthetic-input-tokens-mean",
    "--warmup-request-count",  # genai-perf
    "--build-arg", "--exclusive", "--from-file", "--gpus", "--gres", "--help-all", "--init",
    "--jobs", "--merge", "--overlap", "--pid", "--previous", "--requeue", "--set", "--shm-size",
    "--strict", "--test-only",
}  # fmt: skip


def _lines(page):
    """The indented lines of a page, with continued lines joined: the commands that a reader
    types."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


def _commands(page):
    """The words of each line that runs `trimaran COMMAND`, from there on."""
    for line in _lines(page):
        with contextlib.suppress(ValueError):
            words = shlex.split(line, comments=True)
            for place, word in enumerate(words[:-1]):
                is_ours = Path(word).name == "trimaran" and words[place + 1] in cli.SUBCOMMANDS
                if is_ours and (place == 0 or words[0] in ("mpirun", "srun")):
                    yield words[place + 1], words[place + 2 :]
                    break


def _parsed(name, words):
    """The parser's error, if any."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            cli.parser_of(name).parse(words)
    except SystemExit:
        return errors.getvalue()
    return ""


@functools.cache
def _known_flags():
    known = set(FOREIGN)
    for _, parser in commands.parsers():
        known.update(parser._option_string_actions)
    scripts = [
        *(ROOT / "benchmarks").glob("*.py"),
        *(ROOT / "examples").glob("*/*.py"),
        ROOT / "tests" / "faults" / "fuzz" / "run.py",
    ]
    for script in scripts:
        known.update(re.findall(r'"(--[a-z0-9-]+)"', script.read_text(encoding="utf-8")))
    return {name.replace("_", "-") for name in known}


def test_parsers_accept_every_command_line_of_the_pages():
    found = [(page.name, *each) for page in PAGES for each in _commands(page)]
    # A drawing of processes is no command line.
    found = [each for each in found if each[0] != "architecture.md"]
    assert len(found) > 50
    complaints = [(*each, _parsed(*each[1:])) for each in found]
    assert [each for each in complaints if each[-1]] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_that_a_page_names_exists(page):
    named = re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", page.read_text(encoding="utf-8"))
    assert {name for name in named if name.replace("_", "-") not in _known_flags()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_target_file_and_link_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w%-]*):", makefile, re.M))
    called = re.findall(r"^ +make ([a-z][a-z\d -]*)|`make ([a-z][\w-]*)", text, re.M)
    words = {word for pair in called for word in " ".join(pair).split()}
    words = {re.sub(r"(?<=^test-mpi-)\d+$", "%", word) for word in words}
    assert words - targets == set()

    paths = re.findall(r"(?<![\w/.-])(?:tests|benchmarks|examples|deploy)/[\w./-]+\w", text)
    assert {path for path in paths if not (ROOT / path).exists()} == set()

    links = re.findall(r"\]\(([^)#: ]+)(?:#[^)]*)?\)", text)
    assert {link for link in links if not (page.parent / link).exists()} == set()


def test_every_flag_that_manifests_and_batch_scripts_give_to_serve_exists():
    known = {f.replace("_", "-") for f in cli.parser_of("serve")._option_string_actions}
    calls = [
        call
        for path in MANIFESTS
        for call in re.findall(
            r"trimaran serve((?:[^\n]|\\\n)*)", path.read_text(encoding="utf-8")
        )
    ]
    assert calls
    for call in calls:
        assert {
            f for f in re.findall(r"(?<![\w-])--[a-z][\w-]*", call) if f not in known
        } == set()


def test_every_flag_has_a_help_text():
    bare = [
        (name, action.option_strings or action.dest)
        for name, parser in commands.parsers()
        for action in commands.flags(parser)
        if action.help in (None, "", argparse.SUPPRESS)
    ]
    assert bare == []


def test_every_command_says_what_it_does_with_an_example():
    bare = [
        name
        for name, parser in commands.parsers()
        if not parser.description or "Example:" not in parser.format_help()
    ]
    assert bare == []


def test_every_flag_shows_what_kind_of_value_it_takes_and_its_short_name_first():
    odd = [
        (name, action.option_strings)
        for name, parser in commands.parsers()
        for action in commands.flags(parser)
        if action.option_strings
        and (
            # Without a metavar argparse prints the flag's name in capitals.
            (action.nargs != 0 and not action.choices and action.metavar is None)
            or any(len(short) == 2 for short in action.option_strings[1:])
        )
    ]
    assert odd == []


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("flag", ["--help", "--no-such-flag"])
def test_help_of_a_benchmark_over_ranks_starts_no_measurement(flag):
    done = subprocess.run(
        [sys.executable, "benchmarks/all_reduce.py", flag],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == (0 if flag == "--help" else 2)
    assert "usage: all_reduce.py" in done.stdout + done.stderr
    assert "p50" not in done.stdout


def test_the_page_of_commands_matches_the_parsers():
    assert commands.PAGE.read_text(encoding="utf-8") == commands.page(), (
        "docs/commands.md is old: make features"
    )

"""`--peer`: another engine does the same work in a process of its own."""

from __future__ import annotations

import json

import pytest

from trimaran.bench import peers
from trimaran.launcher.cli import main

FLAGS = ["--shape", "tiny", "--device", "cpu", "--ceiling-seconds", "0", "--runs", "1"]


def test_transformers_does_the_same_work(tmp_path):
    output = tmp_path / "results.jsonl"
    flags = [*FLAGS, "--load", "6/3x2", "--peer", "transformers", "--output", str(output)]
    assert main(["bench", "throughput", *flags]) == 0
    ours, theirs = (json.loads(line) for line in output.read_text().splitlines())
    assert (ours["engine"], theirs["engine"]) == ("trimaran", "transformers")
    assert {ours["requests"], theirs["requests"]} == {2}
    assert theirs["out_tok_s"] > 0
    assert theirs["transformers_version"]


def test_a_peer_that_is_not_installed_is_refused_before_anything_runs():
    with pytest.raises(peers.ConfigError, match=r"--peer no_such_engine: .* is not installed"):
        peers.check_installed("no_such_engine")

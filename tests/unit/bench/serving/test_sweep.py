"""`trimaran bench serve --load` against a scripted server."""

from __future__ import annotations

import json


def test_a_load_whose_outputs_end_early_is_a_failure(http_server, trimaran, tmp_path):
    http_server.events = lambda body: [{"output_ids": [1, 2, 3], "sequence_length": 3}]
    path = tmp_path / "results.jsonl"
    flags = ("--concurrencies", "2", "--warmup", "0", "--output", str(path))

    loads = ("--load", "4/3x2", "--load", "4/5x2")
    code, out, _ = trimaran("bench", "serve", "-u", http_server.url, *loads, *flags)

    assert code == 1
    assert "failed: the output ended after 3 of 5 tokens; does the model's max_seq_len" in out
    whole, short = map(json.loads, path.read_text().splitlines())
    assert (whole["failed_requests"], short["failed_requests"]) == (0, 2)
    assert (whole["out_tok_s"] > 0, short["out_tok_s"]) == (True, 0)

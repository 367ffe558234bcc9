"""Texts that train heads: the target's own outputs."""

from __future__ import annotations

from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[4] / "examples"


def test_rows_of_different_beginnings_go_on_as_the_target_generates_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "draft_heads")
    from target import Target
    from writer import Writer

    target = Target(EXAMPLES / "demo_models" / "base", tmp_path, torch.device("cpu"))
    texts = ("Once upon a time there was a", "The king said to the old man that he", "It")
    beginnings = [target.tokenizer(text)["input_ids"] for text in texts]

    rows, lengths = Writer(target, 4, 32).write(beginnings)

    for row, length, ids in zip(rows.tolist(), lengths.tolist(), beginnings, strict=True):
        generated = target.model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=False, max_new_tokens=32 - len(ids),
        )[0].tolist()  # fmt: skip
        assert row[:length] == generated

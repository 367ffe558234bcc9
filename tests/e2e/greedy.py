"""The greedy output of transformers, checked by one pass over each answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers


def wrong_answers(
    checkpoint: Path,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    num_new: int,
) -> dict[int, str]:
    """By number of the prompt, the answers that differ from transformers' ``num_new`` greedy
    ids.

    An answer is greedy if each of its ids is the likeliest after the prompt and the ids before
    it. One pass over prompt and answer checks all ids, in float32.
    """
    model = _model(checkpoint)
    wrong = {}
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor([[*prompt, *answer]])
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
        likeliest = logits.argmax(-1).tolist()
        if len(answer) != num_new or list(answer) != likeliest:
            wrong[number] = f"{len(prompt)} ids, then {list(answer)} instead of {likeliest}"
    return wrong


@cache
def _model(checkpoint: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model.eval()

"""A request's result by its definition: logits of transformers, in float64, slowly."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

SLACK = 2e-4
"""Tolerance of float32 logits, by which two engines may differ."""


def changed(logits, prompt, output, fields):
    """Logits of the next id after bias, penalties and masks."""
    sequence = prompt + output
    counts = np.bincount(output, minlength=len(logits))
    if fields.get("embedding_bias"):
        logits = logits + np.frombuffer(fields["embedding_bias"], "<f4")
    penalty = fields.get("repetition_penalty", 1.0)
    penalised = np.where(logits > 0, logits / penalty, logits * penalty)
    is_seen = np.bincount(sequence, minlength=len(logits)) > 0
    logits = np.where(is_seen, penalised, logits)
    logits -= fields.get("frequency_penalty", 0.0) * counts
    logits -= fields.get("presence_penalty", 0.0) * (counts > 0)
    logits[forbidden(sequence, fields)] = -np.inf
    if len(output) < fields.get("min_tokens", 1) > 1 and fields.get("end_id", -1) >= 0:
        logits[fields["end_id"]] = -np.inf
    return logits


def forbidden(sequence, fields):
    """Ids that would complete a bad word, or repeat an n-gram."""
    size = fields.get("no_repeat_ngram_size", 0)
    grams = zip(*(sequence[start:] for start in range(size)), strict=False)
    words = [*fields.get("bad_words", ()), *grams]
    return [
        word[-1] for word in words
        if sequence[max(0, len(sequence) - len(word) + 1) :] == list(word[:-1])
    ]  # fmt: skip


def possible(logits, output, fields):
    """Which ids may be chosen, borderline ids included."""
    is_filtered = any(fields.get(name, 0) > 0 for name in ("top_k", "top_p", "min_p"))
    temperature = fields.get("temperature", 1.0)
    is_likely = logits >= logits.max() - SLACK
    if temperature == 0 or fields.get("top_k") == 1 or not is_filtered:
        return is_likely
    order = np.argsort(-logits, kind="stable")
    least = logits[order[: fields.get("top_k") or None]].min() - SLACK
    order = order[logits[order] >= least]
    mass = np.exp((logits[order] - logits.max()) / temperature)
    is_kept = mass >= fields.get("min_p", 0.0) * (1 - 10 * SLACK)
    if fields.get("top_p", 0.0) > 0:
        mass /= mass.sum()
        is_kept &= np.cumsum(mass) - mass <= top_p_after(output, fields) + SLACK
    is_possible = np.zeros(len(logits), bool)
    is_possible[order[is_kept]] = True
    return is_possible & np.isfinite(logits) | is_likely


def top_p_after(output, fields):
    """Top-p, decayed by every id of the output."""
    decay, count = fields.get("top_p_decay", 1.0), len(output)
    if decay == 1 or not count:
        return fields["top_p"]
    return max(fields["top_p"] * decay**count, fields.get("top_p_min", 1e-6))


def end_of(output, fields):
    """The name of the reason why an output of these ids has ended, or None."""
    for word in fields.get("stop_words", ()):
        if tuple(output[-len(word) :]) == word:
            return "STOP_WORDS"
    return "LENGTH" if len(output) == fields["max_tokens"] else ""


def logits_of(model, prompt, output):
    """float64 [len(output) + 1, V]: the logits of each id of the output, and of the next."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 :]
    return logits.double().numpy()


def log_softmax(logits):
    """Log-probabilities of one row."""
    return logits - np.logaddexp.reduce(logits)


def check(model, prompt, fields, output, reason):
    """Fail unless the output is possible for this request, each id and the end."""
    rows = logits_of(model, prompt, output)
    end_id = fields.get("end_id", -1)
    ids = [*output, end_id] if reason == "END_ID" else output
    for place, token_id in enumerate(ids):
        before = output[:place]
        assert place == 0 or not end_of(before, fields), f"goes on after {before}"
        logits = changed(rows[place], prompt, before, fields)
        assert possible(logits, before, fields)[token_id], f"{token_id} at {place} of {ids}"
    assert end_id not in output
    if reason != "END_ID":
        assert reason == end_of(output, fields)


def beams(model, prompt, fields):
    """Outputs and scores of a beam search, and the margin of the closest decision."""
    width, margin, step = fields["beam_width"], np.inf, 0
    live, ended = [([], 0.0)], []
    while live:
        ranked = sorted(
            ((total + log_prob, output, token_id)
             for output, total in live
             for token_id, log_prob in enumerate(continuations(model, prompt, output, fields))
             if np.isfinite(log_prob)),
            key=lambda one: -one[0],
        )  # fmt: skip
        step, live = step + 1, []
        margin = min(margin, *(a[0] - b[0] for a, b in pairwise(ranked[: 4 * width])))
        for rank, (total, output, token_id) in enumerate(ranked):
            is_end = token_id == fields.get("end_id", -1)
            new = output if is_end else [*output, token_id]
            if not is_end and not end_of(new, fields):
                live += [(new, total)] * (len(live) < width)
            elif rank < width:
                ended.append((new, total / step ** fields.get("length_penalty", 0.0)))
        ended = sorted(ended, key=lambda one: -one[1])[:width]
        margin = min([margin, *(a[1] - b[1] for a, b in pairwise(ended))])
        if len(ended) == width:
            break
    return ended[: fields["num_return_sequences"]], margin


def continuations(model, prompt, output, fields):
    """Log-probabilities of the next ids of a hypothesis."""
    logits = changed(logits_of(model, prompt, output)[-1], prompt, output, fields)
    return log_softmax(logits / (fields.get("temperature", 1.0) or 1.0))

"""Log-probabilities of tokens, in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.server.models.text_request import Likeliest, TextChunk, likeliest
from trimaran.server.models.tokenizer import Tokenizer
from trimaran.server.protocol import json_access
from trimaran.server.protocol.json_access import Fragment

_LEAST = -9999.0
"""Stands for minus infinity, which JSON lacks."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probability, and the likeliest tokens of its place."""

    token_id: int
    log_prob: float
    top: Likeliest

    @property
    def alternatives(self) -> Iterator[tuple[int, float]]:
        """The likeliest tokens with finite log-probabilities."""
        return ((token_id, max(log_prob, _LEAST)) for token_id, log_prob in self.top)


def scored(chunk: TextChunk, num_top: int) -> list[ScoredToken]:
    """The tokens of a chunk. Takes time in proportion to the vocabulary with ``num_top``."""
    count = min(len(chunk.token_ids), len(chunk.log_probs))
    tops = [Likeliest()] * count
    if num_top:
        rest = [] if chunk.logits is None else likeliest(chunk.logits, num_top)
        tops = [*chunk.tops, *rest, *tops][:count]
    return [
        ScoredToken(token_id, max(log_prob, _LEAST), top)
        for token_id, log_prob, top in zip(
            chunk.token_ids[:count], chunk.log_probs[:count], tops, strict=True
        )
    ]


def chat_content(tokenizer: Tokenizer, tokens: Sequence[ScoredToken]) -> list[dict[str, Any]]:
    """The members of ``logprobs.content`` of a chat."""
    return [
        {
            **_token(tokenizer, each.token_id, each.log_prob),
            "top_logprobs": [_token(tokenizer, *likely) for likely in each.alternatives],
        }
        for each in tokens
    ]


def chat_fragment(tokenizer: Tokenizer, tokens: Iterable[ScoredToken]) -> Fragment:
    """The object ``logprobs`` of a chat, token by token: the objects of all tokens would take
    several times the size of their JSON."""
    written = [
        json_access.dump(content)
        for each in tokens
        for content in chat_content(tokenizer, (each,))
    ]
    return Fragment(b'{"content":[' + b",".join(written) + b'],"refusal":null}')


def completion_object(
    tokenizer: Tokenizer, tokens: Sequence[ScoredToken], num_top: int, offset: int
) -> dict[str, Any]:
    """The object ``logprobs`` of a completion, whose text begins at ``offset``."""
    texts = [tokenizer.token_text(each.token_id) for each in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = [
        {tokenizer.token_text(token_id): log_prob for token_id, log_prob in each.alternatives}
        for each in tokens
    ]
    return {
        "tokens": texts,
        "token_logprobs": [each.log_prob for each in tokens],
        "top_logprobs": tops if num_top else None,
        "text_offset": offsets,
    }


def _token(tokenizer: Tokenizer, token_id: int, log_prob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": log_prob,
        "bytes": list(raw),
    }

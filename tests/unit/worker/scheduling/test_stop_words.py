"""Stop words of sequences and beams, against a comparison of each word with the end."""

from __future__ import annotations

import random
from array import array

import pytest

from trimaran.comm.messages.messages import FinishReason
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.requests.request import Request
from trimaran.worker.sampling.beam_search import BeamSearch, num_candidates


def _drawn_words(draw):
    return tuple(
        tuple(draw.choices(range(3), k=draw.randint(0, draw.choice((2, 7)))))
        for _ in range(draw.randint(1, 12))
    )


def _ends(words, output):
    return any(w and len(w) <= len(output) and tuple(output[-len(w) :]) == w for w in words)


def _request(words, output=()):
    request = Request(
        source=0,
        request_id=1,
        number=1,
        prompt_ids=array("i", [0, 1, 2, 0, 1]),
        output_ids=array("i", output),
        sampling=SamplingParams(stop_words=words, max_tokens=1000),
    )
    request.start_sequences(1)
    return request


@pytest.mark.parametrize("seed", range(100))
def test_a_sequence_ends_at_a_stop_word(seed):
    draw = random.Random(seed)
    words = _drawn_words(draw)
    (sequence,) = _request(words).sequences
    output = []
    for _ in range(60):
        output.append(draw.randrange(3))
        sequence.token_ids.append(output[-1])
        reason = sequence.ends_by(output[-1])
        assert (reason is FinishReason.STOP_WORDS) == _ends(words, output)


@pytest.mark.parametrize("seed", range(30))
def test_a_replayed_sequence_continues_within_a_stop_word(seed):
    draw = random.Random(seed)
    words = _drawn_words(draw)
    output = draw.choices(range(3), k=20)
    for num_replayed in range(1, len(output)):
        (sequence,) = _request(words, output[:num_replayed]).sequences
        for place in range(num_replayed, len(output) + 1):
            reason = sequence.ends_by(output[place - 1])
            assert (reason is FinishReason.STOP_WORDS) == _ends(words, output[:place])


def test_sequences_with_equal_stop_words_share_the_automaton():
    words = ((1, 2), (3,))
    first = _request(words)
    assert _request(tuple(tuple(w) for w in ([1, 2], [3]))).stop_words is first.stop_words


def test_other_ranks_are_sent_no_stop_words():
    wire = _request(((1, 2), (3,))).row_sampling()
    assert "stop_words" not in wire
    assert wire["max_tokens"] == 1000


@pytest.mark.parametrize("seed", range(40))
def test_the_requested_number_of_candidates_gives_the_beams_of_all_candidates(seed):
    draw = random.Random(seed)
    params = SamplingParams(
        beam_width=draw.randint(2, 5),
        stop_words=_drawn_words(draw),
        end_id=draw.choice((-1, 4)),
        max_tokens=30,
        early_stopping=draw.randrange(3),
        beam_search_diversity_rate=draw.choice((0.0, 0.3)),
    )
    few, everything = BeamSearch(params, 30), BeamSearch(params, 30)
    vocabulary = 40
    while not everything.is_over:
        candidates = []
        for _ in everything.live:
            log_probs = sorted(
                (-draw.expovariate(0.5) for _ in range(vocabulary)), reverse=True
            )
            ids = draw.sample(range(vocabulary), vocabulary)
            # Ids of stop words are likely.
            ids.sort(key=lambda token: token >= 5)
            candidates.append((ids, log_probs))
        count = num_candidates(params)
        parents = few.advance([(i[:count], p[:count]) for i, p in candidates])
        assert parents == everything.advance(candidates)
    assert few.is_over
    found, right = few.best(), everything.best()
    assert [h.token_ids for h in found] == [h.token_ids for h in right]
    assert [h.score for h in found] == [h.score for h in right]


@pytest.mark.parametrize("seed", range(40))
def test_a_beam_ends_at_a_stop_word(seed):
    draw = random.Random(seed)
    words = _drawn_words(draw)
    params = SamplingParams(beam_width=3, stop_words=words, end_id=-1, max_tokens=12)
    search = BeamSearch(params, 12)
    while not search.is_over:
        candidates = []
        for _ in search.live:
            log_probs = sorted((-draw.expovariate(0.5) for _ in range(9)), reverse=True)
            candidates.append((draw.sample(range(9), 9), log_probs))
        search.advance(candidates)
        for each in search.live:
            assert not _ends(words, each.token_ids)
        for each in search.finished:
            is_word = each.reason is FinishReason.STOP_WORDS
            assert _ends(words, each.token_ids) == is_word

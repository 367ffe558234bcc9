"""The automaton of words, against a search through all words at each symbol."""

from __future__ import annotations

import random

import pytest

from trimaran.comm.word_automaton import WordAutomaton, WordState


def plain_ends(words, symbols) -> bool:
    """Whether the symbols end with a word."""
    return any(word and symbols[-len(word) :] == word for word in words)


def plain_depth(words, symbols) -> int:
    """Length of the longest tail that begins a word."""
    lengths = range(len(symbols), 0, -1)
    begins = (n for n in lengths if any(word[:n] == symbols[-n:] for word in words))
    return next(begins, 0)


def drawn_case(seed: int):
    """Words over few symbols, which overlap, and a sequence that is made of parts of them."""
    draw = random.Random(seed)
    alphabet = "abc"[: draw.randint(1, 3)] + "é" * draw.randint(0, 1)
    words = [
        "".join(draw.choices(alphabet, k=draw.randint(0, draw.choice((3, 12)))))
        for _ in range(draw.randint(0, 30))
    ]
    parts = [word[: draw.randint(0, len(word))] for word in draw.choices(words or ["a"], k=12)]
    return words, "".join(parts + draw.choices(alphabet, k=20))


@pytest.mark.parametrize("seed", range(150))
def test_every_state_equals_that_of_a_search_through_all_words(seed):
    words, text = drawn_case(seed)
    automaton = WordAutomaton(words)
    state = automaton.start
    for end, symbol in enumerate(text, 1):
        state = automaton.next(state, symbol)
        assert state.ends_word == plain_ends(words, text[:end])
        assert state.depth == plain_depth(words, text[:end])


@pytest.mark.parametrize("seed", range(50))
def test_the_automaton_matches_ids_like_characters(seed):
    words, text = drawn_case(seed)
    ids = WordAutomaton(tuple(ord(c) - 100 for c in word) for word in words)
    characters = WordAutomaton(words)
    for end in range(len(text)):
        there = ids.after(ord(c) - 100 for c in text[:end])
        here = characters.after(text[:end])
        assert (there.depth, there.ends_word) == (here.depth, here.ends_word)


def test_sequences_of_one_automaton_do_not_disturb_each_other():
    words = WordAutomaton(["abab", "ba", "bb"])
    draw = random.Random(1)
    texts = ["".join(draw.choices("ab", k=40)) for _ in range(8)]
    states = [words.start] * len(texts)
    for place in range(40):
        states = [
            words.next(state, text[place]) for state, text in zip(states, texts, strict=True)
        ]
    fresh = [WordAutomaton(["abab", "ba", "bb"]).after(text) for text in texts]
    assert [(s.depth, s.ends_word) for s in states] == [(s.depth, s.ends_word) for s in fresh]


def test_without_words_the_automaton_stays_in_its_first_state():
    words = WordAutomaton(["", ""])
    assert not words
    assert words.after("any text") is words.start


def _num_states(automaton: WordAutomaton) -> int:
    found: set[int] = set()
    waiting: list[WordState] = [automaton.start]
    while waiting:
        state = waiting.pop()
        if id(state) not in found:
            found.add(id(state))
            waiting += state.following.values()
    return len(found)


@pytest.mark.parametrize(
    "words",
    [
        [f"word number {n} of many" for n in range(10_000)],
        ["a" * n + "b" for n in range(1, 400)],
        ["a" * 50_000],
        ["ab" * 10_000 + "c", "ba" * 10_000 + "d"],
    ],
    ids=["many", "nested", "long", "periodic"],
)
def test_states_are_created_only_when_a_text_reaches_them(words):
    automaton = WordAutomaton(words)
    text = "aab" * 100 + "word number 77" + "a" * 1000 + "ab" * 500
    automaton.after(text)
    assert _num_states(automaton) <= 2 * len(text)

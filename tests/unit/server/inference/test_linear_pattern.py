"""Patterns in linear time find what Python's `re` finds, whatever a client's text is."""

import random
import re

import pytest

from trimaran.server.inference.linear_pattern import LinearPattern

PATTERNS = (
    "", "a", "^a", "a$", "^a$", r"\Aab\Z", "a|b", "(a|bc)*d", "a{2,4}b", "a{3}", "(ab){2,}",
    "a?b??c", "[a-c]x", "[^a-c]x", r"\bab\b", r"\Bab", r"\d+-\w*", r"[\d_]b", "(?i:AB)c", ".b",
    "(^|x-)a", "a(b|)c", "(a*)*b", "(a+)+$", "(?:)", "x-(tenant|user)-id", "()", "(a|)+b",
    "[A-C]{1,2}$",
)  # fmt: skip
TEXTS = (
    "", "a", "ab", "abc", "x-tenant-id", "aab", "aaab", "b_b", "12-a", "AB", "Abc", "x-a",
    "a b", "é",
)  # fmt: skip


@pytest.mark.parametrize("flags", [0, re.IGNORECASE])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_matches_are_those_of_re(pattern, flags):
    linear, backtracking = LinearPattern(pattern, flags), re.compile(pattern, flags)
    rng = random.Random(pattern)
    texts = [
        *TEXTS,
        *("".join(rng.choices("abcxAB-_1 d", k=rng.randrange(9))) for _ in range(400)),
    ]
    found = {text: linear.search(text) for text in texts}
    assert found == {text: backtracking.search(text) is not None for text in texts}
    assert found == {text: linear.search(text) for text in texts}


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|aa)+$",
        "(.*a){20}$",
        "a.*a.*a.*a.*a.*a.*c",
        "(a?){200}a{200}$",
        "(a|b)*a(a|b){60}c",
    ],
)
def test_no_text_of_a_client_takes_the_steps_of_backtracking(pattern):
    """A backtracking match of any of these takes years."""
    linear, rng = LinearPattern(pattern), random.Random(1)
    for _ in range(3):
        text = "".join(rng.choices("aab", k=255)) + "!"
        assert not linear.search(text)
        assert not linear.search("a" * 255 + "!")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "missing"), ("a(?=b)", "ASSERT"), (r"(a)\1", "GROUPREF"), ("(?m)^a", "MULTILINE"),
        ("(a{200}){200}", "more than 10000 states"), ("(?!a)", "ASSERT_NOT"),
    ],
)  # fmt: skip
def test_what_only_backtracking_finds_is_refused(pattern, reason):
    with pytest.raises(ValueError, match=reason):
        LinearPattern(pattern)

"""Calls whose arguments are JSON: read alike however their text is cut."""

import pytest
from cut_calls import JSON_FAMILIES, NUM_CASES, check_calls, check_many_calls


@pytest.mark.parametrize("name", JSON_FAMILIES)
def test_calls_are_the_same_however_their_text_is_cut(name):
    for number in range(2):
        check_calls(name, f"{name} {number}", is_each_pair=True)


@pytest.mark.matrix(keep=0)
@pytest.mark.parametrize("case", range(NUM_CASES))
@pytest.mark.parametrize("name", JSON_FAMILIES)
def test_ten_thousand_calls_of_each_family_survive_each_cut(name, case):
    check_many_calls(name, case)

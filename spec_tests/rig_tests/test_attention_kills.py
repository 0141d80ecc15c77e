"""The table of what usual tests of attention accept: the tests themselves are judged."""

import pytest

from spec_tests import impostors
from spec_tests.impostors.attention_kills import course_test, function_of, tutorial_test


@pytest.mark.parametrize("words", ["plain", "uneven-tiles", "materialised"])
def test_right_code_passes_both(words: str):
    attention = function_of(impostors.find(f"benign.attention-{words}"))
    assert course_test(attention)
    assert tutorial_test(attention)


@pytest.mark.parametrize(
    ("words", "verdicts"),
    [
        ("sum-not-rescaled", (False, False)),
        ("base-2-lse", (False, True)),
        ("backward-always-causal", (False, True)),
        ("causal-top-left", (True, True)),
    ],
)
def test_what_each_of_them_sees(words: str, verdicts: tuple[bool, bool]):
    attention = function_of(impostors.find(f"attention.{words}"))
    assert (course_test(attention), tutorial_test(attention)) == verdicts

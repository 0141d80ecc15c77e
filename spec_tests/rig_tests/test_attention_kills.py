"""The table of what usual tests of attention accept: the tests themselves are judged."""

import pytest

from spec_tests import impostors
from spec_tests.impostors.attention_kills import course_test, function_of, tutorial_test
from spec_tests.target import PACKAGE_ROOT


@pytest.mark.parametrize("words", ["plain", "uneven-tiles", "two-passes"])
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


def test_the_table_that_is_kept_is_of_these_near_misses():
    table = (PACKAGE_ROOT / "benchmarks" / "results" / "attention_kills.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| a")]
    kept = {id: (does, by) for id, does, _, _, by in rows}
    cards = [card for words, card in impostors.CATALOGUE.items() if words.startswith("attention.")]
    clauses = {c.id: ", ".join(i.removeprefix("attention.") for i in c.rejected_by) for c in cards}
    assert kept == {card.id: (card.does, clauses[card.id]) for card in cards}
    assert f"Of {len(cards)} near-misses" in table.splitlines()[-1]

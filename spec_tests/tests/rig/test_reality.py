"""The list of real bugs is well formed, and each that is shown has a card."""

from __future__ import annotations

import pytest

from spec_tests import museum
from spec_tests.museum import matrix
from spec_tests.museum.bugs import FOLDER, bugs, cards

MISSED = {"pytorch-158719", "pytorch-187138", "megatron-bridge-5257"}
"""Bugs that no clause rejects: of a contract that allows what they do."""


@pytest.mark.parametrize("bug", bugs().values(), ids=bugs().keys())
def test_an_entry_names_a_thread_a_chapter_and_clauses_that_exist(bug):
    clauses = matrix.by_id()
    assert bug.link.startswith("https://github.com/")
    assert bug.link.rpartition("/")[2] == bug.id.rpartition("-")[2]
    assert bug.link not in bug.also
    assert {*bug.expected} <= clauses.keys()
    assert {clauses[name].chapter for name in bug.expected} <= {bug.chapter}
    assert bug.chapter in {clause.chapter for clause in clauses.values()}
    assert bug.what.endswith(".")
    assert bool(bug.left_out) != bool(bug.card), "shown, or left out with a reason"


def test_no_thread_is_listed_twice():
    links = [link for bug in bugs().values() for link in (bug.link, *bug.also)]
    assert len(links) == len({*links})


def test_each_bug_that_is_shown_has_a_card_of_its_chapter():
    assert len(cards()) == 73
    for name, card in cards().items():
        bug = bugs()[name.removeprefix("reality.")]
        assert card.is_benign == (bug.id in MISSED), name
        chapters = {clause.partition(".")[0] for clause in card.rejected_by}
        assert chapters <= {bug.chapter}, name
        assert museum.find(name) == card


def test_an_unknown_one_is_refused():
    with pytest.raises(ValueError, match=r"nanogpt-0"):
        museum.find("reality.nanogpt-0")


def test_the_record_of_the_recall_has_a_line_for_every_entry():
    rows = (FOLDER / "RESULTS.md").read_text(encoding="utf-8").splitlines()
    shown = [row.partition("]")[0] for row in rows if row.startswith("| [")]
    assert shown == [f"| [{id}" for id in bugs()]

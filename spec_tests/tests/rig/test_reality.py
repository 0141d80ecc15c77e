"""The list of real bugs is well formed, and some of them are judged."""

from __future__ import annotations

from typing import Any

import pytest

from spec_tests.museum import matrix
from spec_tests.museum.card import CATALOGUE
from spec_tests.museum.reality import FOLDER, bugs, cards, command, find, implemented

FAST = {
    "kempnerforge-57": "data.state.of-a-resumed-pass",
    "burn-4697": "attention.blind-rows.zeros",
    "xtuner-977": "measure.throughput.median",
}


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
    assert bool(bug.left_out) != (bug.id in implemented()), "shown, or left out with a reason"


def test_no_thread_is_listed_twice():
    links = [link for bug in bugs().values() for link in (bug.link, *bug.also)]
    assert len(links) == len({*links})


@pytest.mark.parametrize("id", implemented())
def test_both_behaviours_differ_bring_the_same_and_have_the_link_in_their_story(id):
    wrong, right = implemented()[id]
    functions: list[Any] = [wrong, right]
    assert wrong is not right
    assert len({frozenset(code.functions()) for code in functions}) == 1
    assert bugs()[id].link in (wrong.__doc__ or "")
    assert find(f"reality.{id}").code is wrong
    assert find(f"reality.{id}-fixed").code is right


def test_they_are_no_near_misses():
    assert not [name for name in CATALOGUE if name.startswith("reality.")]
    shown = {
        code for both in implemented().values() for code in both if "reality" in code.__module__
    }
    assert not [name for name, card in CATALOGUE.items() if card.code in shown]


def test_an_unknown_one_is_refused():
    with pytest.raises(ValueError, match=r"nanogpt-0"):
        find("reality.nanogpt-0")


@pytest.mark.parametrize(("id", "clause"), FAST.items())
def test_a_faulty_one_is_rejected_and_its_twin_accepted(worlds, id, clause):
    wrong, right = cards(id)
    assert clause in bugs()[id].expected
    (of_wrong, of_right) = (matrix.probe(matrix.by_id()[clause], c, worlds) for c in (wrong, right))
    assert of_wrong.is_rejected
    assert of_right.results
    assert of_right.decisive is None


def test_the_table_is_that_of_the_results():
    results = command.read()
    assert (FOLDER / "RESULTS.md").read_text(encoding="utf-8") == command.table(results)
    judged = results["before"].keys()
    assert judged == implemented().keys()

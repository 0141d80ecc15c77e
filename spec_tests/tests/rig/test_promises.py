"""The promises of the contract: what is read from docstrings, and that clauses judge each."""

from collections import defaultdict
from collections.abc import Callable

import pytest

from spec_tests.contract import FUNCTIONS
from spec_tests.contract.promises import PROMISES, Promise, promises_of, qualified, read
from spec_tests.rig import ledger
from spec_tests.rig.outcomes import LEVELS, Strength

JUDGED_BY_PROGRAMS: frozenset[str] = frozenset()
"""Ids of promises that no clause judges: generated programs do."""


def listing(*lines: str) -> Callable[[], None]:
    """A function of which the docstring lists these lines."""

    def function() -> None: ...

    function.__doc__ = "\n    ".join(["Do it.", "", *lines])
    function.__qualname__ = "function"
    return function


def test_a_docstring_lists_promises_by_level_and_what_may_be_refused():
    found = read(
        listing(
            *(
                "Args:",
                "    path: a file.",
                "",
                "Level `course`:",
                "    whole: It is read. Once.",
                "",
            ),
            *("Level `production`:", "    fast: It takes a second.", ""),
            *("May be refused:", "    fast: A long file.", "    foreign: A file of others."),
        )
    )
    assert [*found.values()] == [
        Promise("function", "whole", "course", "It is read. Once."),
        Promise("function", "fast", "production", "It takes a second.", "A long file."),
        Promise("function", "foreign", "correct", "", "A file of others."),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("    whole: It is read again.", "'whole' is there twice"),
        ("        and that in two lines.", "expected 'name: Text.', got"),
        ("    no stop: It is read", "expected 'name: Text.', got"),
    ],
)
def test_a_line_that_is_no_promise_is_refused(line: str, said: str):
    with pytest.raises(ValueError, match=said):
        read(listing("Level `correct`:", "    whole: It is read.", line))


def test_a_function_promises_what_the_one_promises_that_it_is_as():
    own = {promise.id for promise in promises_of("ddp_bucketed")}
    assert {promise.id for promise in promises_of("ddp")} | {"ddp_bucketed/bucket-size"} == own
    ids = [promise.id for promise in promises_of("build_fsdp_trainer")]
    assert "build_trainer/frozen" in ids
    assert "build_zero1_trainer/state-divided" in ids


def test_a_source_names_the_promises_of_the_functions_that_are_judged():
    both = ("fully_shard", "fsdp")
    told = "contract: fully_shard/plain-bits, fsdp/plain-bits, fsdp/reused; Zhao et al."
    assert qualified("contract: plain-bits, fsdp/reused; Zhao et al.", both) == told
    assert qualified(told, both) == told
    assert qualified("contract: mean-gradient", ("ddp_bucketed",)) == "contract: ddp/mean-gradient"
    assert qualified("Zhao et al.", both) == "Zhao et al."
    for unknown in ("plain_bits", "ddp/plain-bits", "any-order", "plain-bits and more"):
        with pytest.raises(ValueError, match=f"'{unknown}' is no promise of the contract"):
            qualified(f"contract: {unknown}", both)


def test_every_function_of_the_contract_promises_something():
    assert [name for name in FUNCTIONS if not promises_of(name)] == []
    assert {promise.level for promise in PROMISES.values()} == {*LEVELS}


def test_clauses_judge_every_promise_at_its_level():
    judged = defaultdict(set)
    for clause in ledger.load_all():
        for id in clause.promises if clause.strength is Strength.MUST else ():
            judged[id].add(LEVELS.index(clause.level))
    assert {*PROMISES} - {*judged} == JUDGED_BY_PROGRAMS, "promises without a MUST clause"
    lowest = {id: LEVELS[min(judged[id])] for id in judged}
    assert lowest == {id: PROMISES[id].level for id in judged}


def test_a_source_speaks_of_the_contract_by_names_of_promises_and_first():
    others = {c.id: c.source.removeprefix("contract: ") for c in ledger.load_all()}
    assert [id for id, source in others.items() if "contract:" in source] == []

"""The register of clauses, which all have teeth; the promises of the contract that they judge."""

import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spec_tests import museum
from spec_tests.__main__ import main
from spec_tests.contract import FUNCTIONS
from spec_tests.contract.promises import PROMISES, promises_of, qualified, read
from spec_tests.rig import ledger
from spec_tests.rig.clause import REGISTER, Clause, clause, clause_of, clauses, rows
from spec_tests.rig.outcomes import LEVELS, Strength
from spec_tests.tests.reference import launch
from spec_tests.tests.rig.helpers import ROOT, declared


@pytest.fixture
def register() -> Iterator[dict[str, Clause]]:
    """The register, put back afterwards."""
    ledger.load_all()  # a module that is first imported within a test would be forgotten after it
    kept = dict(REGISTER)
    yield REGISTER
    REGISTER.clear()
    REGISTER.update(kept)


def declare(sentence: str = "This MUST hold.", **changes: Any) -> Any:
    """A test declared as a clause."""

    def test(world: object, subject: object) -> None: ...

    test.__doc__ = sentence
    given = {"id": "ddp.trial.only", "level": "correct", "source": "x"} | changes
    return clause(given.pop("id"), **given)(test)


# --------------------------------------------------------------------------------------- declaring


@pytest.mark.parametrize("strength", Strength)
@pytest.mark.parametrize("id", ["ddp.trial.only", "zero1.trial-run.sends-nothing", "fsdp.a.b.c"])
def test_a_clause_is_registered_with_its_sentence(register, id: str, strength: Strength):
    test = declare(f"This {strength} hold.\n\nWhy it matters.", id=id)
    of_file = clauses(level="course", judges=("ddp",), worlds=(3,))
    of_file(id, source="x", worlds=(4,))(test)  # what a clause says itself wins
    found = register.pop(id)
    assert declared(test) is found
    assert (found.sentence, found.strength) == (f"This {strength} hold.", strength)
    assert (found.level, found.judges, found.worlds) == ("course", ("ddp",), (4,))
    assert found.chapter == id.partition(".")[0]
    assert found.where.startswith("spec_tests/tests/rig/test_clause.py:")
    assert clause_of(len) is None


MALFORMED = ("ddp", "ddp.mean", "Ddp.a.b", "ddp.a.b.c.d", "ddp..b", "d.a_b.c", "d.a.-b", "d.a.b ")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({"id": id}, "expected three or four dotted lower-case words") for id in MALFORMED),
        ({"level": "perfect"}, "level 'perfect' is none of"),
        ({"judges": ("dpd",)}, r"\['dpd'\] are no functions of the contract"),
        ({"needs": ("ddp", "sync")}, r"\['sync'\] are no functions of the contract"),
        ({"source": "contract: any-world"}, "'any-world' is no promise of the contract"),
        ({"sentence": ""}, "the docstring must begin with one sentence"),
        ({"sentence": "This holds."}, "with one of MUST, SHOULD, MAY as its verb"),
        ({"sentence": "This MUST hold"}, "a full stop"),
        ({"sentence": "This MUST hold " + "for very long " * 8 + "."}, "at most 100 characters"),
        ({"sentence": "This MUST or SHOULD hold."}, "with one of MUST, SHOULD, MAY as its verb"),
        ({"sentence": "This\nMUST hold."}, "got 'This'"),
    ],
    ids=str,
)
def test_a_clause_that_is_not_one_is_refused(register, changes: dict[str, Any], said: str):
    before = dict(register)
    with pytest.raises(ValueError, match=said):
        declare(**changes)
    assert register == before


def test_an_id_used_twice_is_refused(register):
    declare()
    elsewhere = declare.__globals__["__name__"]
    register["ddp.trial.only"].test.__module__ = "spec_tests.chapters.ddp.test_elsewhere"
    with pytest.raises(ValueError, match=f"exists twice: .* and {elsewhere}"):
        declare()


def test_a_row_is_a_clause_whose_test_calls_the_law_where_the_row_is(register):
    calls: list[Any] = []

    def law(world: object, subject: object, situation: object, *, looks: bool = False) -> None:
        calls.append((world, subject, situation, looks, sys._getframe(1).f_lineno))

    row = rows(clauses(level="course", judges=("ddp",), worlds=(3,)), law)
    first = inspect.stack()[0].lineno + 1
    one = row("ddp.trial.only", "This MUST hold.", "mlp: step", looks=True, source="x", worlds=(4,))
    lines = {"a": "mlp: step", "b": "tied: step"}
    several = row("ddp.trial.several", "This MUST hold as well.", lines, source="x")
    found, other = declared(one), declared(several)
    assert found is register["ddp.trial.only"]
    assert (found.sentence, found.level, found.worlds) == ("This MUST hold.", "course", (4,))
    assert found.where == f"spec_tests/tests/rig/test_clause.py:{first}"
    assert other.where == f"spec_tests/tests/rig/test_clause.py:{first + 2}"
    assert [*map(found.label, found.cases())] == ["ddp-w4"]
    assert [*map(other.label, other.cases())] == ["ddp-w3-a", "ddp-w3-b"]
    for each in (found, other):
        for case in each.cases():
            each.test(**case)
    each_of_several = [(3, "ddp", line, False, first + 2) for line in lines.values()]
    assert calls == [(4, "ddp", "mlp: step", True, first), *each_of_several]
    no_subject = rows(clauses(level="course"), lambda world, case: calls.append((world, case)))
    alone = declared(no_subject("ddp.trial.alone", "This MUST hold.", [1, 2], source="x"))
    assert [alone.test(**case) or calls.pop() for case in alone.cases()] == [(2, 1), (2, 2)]
    with pytest.raises(TypeError, match="'look'"):  # no option of the law: known without a run
        row("ddp.trial.only", "This MUST hold.", "mlp: step", look=True, source="x")


# ---------------------------------------------------------------------------------- what there is


COLLECTING = """
import pytest, sys
class See:
    def pytest_collection_finish(self, session):
        from spec_tests.rig.clause import clause_of
        for item in session.items:
            found = clause_of(getattr(item, 'function', None))
            if found: print('@', found.id, found.label(item.callspec.params), sep='\\t')
options = ['--collect-only', '-qq', '--level', 'production', '-p', 'no:cacheprovider']
sys.exit(pytest.main([*options, '--assert=plain', *sys.argv[1:]], plugins=[See()]))
"""
"""Prints clause id and case of every test that pytest collects for the reference."""


def test_a_clause_without_pytest_has_the_cases_that_pytest_runs(tmp_path: Path):
    ended = launch.run(COLLECTING, "--rootdir", ROOT, *ledger.chapter_folders(), folder=tmp_path)
    rows = [line.split("\t") for line in ended.out.splitlines() if line.startswith("@\t")]
    collected = Counter((id, case) for _, id, case in rows)
    own = Counter((c.id, c.label(case)) for c in ledger.load_all() for case in c.cases())
    assert own - collected == Counter(), "cases that pytest does not run"
    assert collected - own == Counter(), "cases that only pytest runs"
    assert {*collected.values()} == {1}, "no two cases bear one name"


def test_every_clause_stands_in_the_folder_of_its_chapter_with_a_sentence_of_its_own():
    for found in ledger.load_all():
        assert found.where.startswith(f"spec_tests/chapters/{found.chapter}/"), found.id
    counted = Counter(found.sentence for found in ledger.load_all())
    assert [sentence for sentence, count in counted.items() if count > 1] == []


def test_every_clause_has_either_an_impostor_or_a_reason_why_not():
    rejected = museum.rejected_by()
    found = ledger.load_all()
    neither = [c.id for c in found if bool(rejected.get(c.id)) == bool(c.no_impostor)]
    assert neither == [], (
        "give each an impostor (rejected_by=...) or, for a GPU, a reason, not both"
    )
    without = [c for c in found if not rejected.get(c.id)]
    assert {c.transports for c in without} <= {("cuda",)}, "what a CPU shows has an impostor"


def test_the_ledger_the_museum_and_the_counts_are_fresh(capsys):
    assert main(["ledger", "--check"]) == 0, capsys.readouterr().out


def test_the_ledger_lists_every_clause_and_its_fingerprint_sees_a_change(register):
    before = ledger.load_all()
    text = ledger.render(before, museum.rejected_by())
    lines = text.splitlines()
    for found in before:
        assert sum(f"`{found.id}`" in line and found.sentence in line for line in lines) == 1
    changed = [*before[1:], Clause(**(vars(before[0]) | {"sentence": "Nothing MUST hold."}))]
    assert ledger.fingerprint(before) == ledger.fingerprint(list(reversed(before)))
    assert ledger.fingerprint(changed) != ledger.fingerprint(before)


# ------------------------------------------------------------------------- promises of the contract


def listing(*lines: str) -> Callable[[], None]:
    """A function of which the docstring lists these lines."""

    def function() -> None: ...

    function.__doc__ = "\n    ".join(["Do it.", "", *lines])
    function.__qualname__ = "function"
    return function


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
    for found in ledger.load_all():
        for id in found.promises if found.strength is Strength.MUST else ():
            judged[id].add(LEVELS.index(found.level))
    assert {*PROMISES} - {*judged} == set(), "promises without a MUST clause"
    lowest = {id: LEVELS[min(judged[id])] for id in judged}
    assert lowest == {id: PROMISES[id].level for id in judged}


def test_every_must_clause_follows_from_a_promise():
    """Whoever keeps every promise is right, so no clause may reject for anything else."""
    musts = [found for found in ledger.load_all() if found.strength is Strength.MUST]
    assert [found.id for found in musts if not found.promises] == []


def test_a_source_speaks_of_the_contract_by_names_of_promises_and_first():
    others = {c.id: c.source.removeprefix("contract: ") for c in ledger.load_all()}
    assert [id for id, source in others.items() if "contract:" in source] == []

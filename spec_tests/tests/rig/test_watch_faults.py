"""Faults of real scripts, and the page of what `trainspec watch` says of each."""

import pytest

from spec_tests.tests.rig.watched import SCRIPTS, Fault, faults, told_by
from spec_tests.tests.rig.watched import __main__ as results
from spec_tests.watch.command import norms
from spec_tests.watch.verdict import render

# One of each norm; `python -m spec_tests.tests.rig.watched` tries all of them.
_USABLE = [f for f in reversed(faults()) if not f.needs and not f.missed]
TOLD = {f.check: f for spare in (True, False) for f in _USABLE if f.spare is spare}.values()
PAGE = results.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("fault", TOLD, ids=lambda fault: fault.id)
def test_a_fault_is_named(fault: Fault):
    outcome = results.try_fault(fault)
    shown = f"{render(outcome.verdict)}\nstatus {outcome.status}\n{outcome.output[-3000:]}"
    # How a run that fails is heard of first varies; for all else its own norm must report it.
    is_slow = fault.check in results.SLOW
    others = (*fault.also, "watch.run.ends") if is_slow else ()
    assert {fault.check, *others} & {*outcome.norms}, shown
    first = outcome.verdict.causes[0].finding
    assert "rank" in first.text
    assert first.place or first.likely
    kept = results.rows_of(PAGE)[fault.id]
    again = f"python -m spec_tests.tests.rig.watched --only {fault.id}"
    assert is_slow or said(results.fault_row(fault, outcome)) == said(kept), f"again: {again}"


def said(row: str) -> list[str]:
    """Return whether a fault was told, in which step, and by which norm."""
    _, _, told, step, words, _ = row.split("|", 5)
    return [told, step, words.partition(":")[0]]


def test_the_page_has_a_row_of_each_script_and_each_fault():
    rows = results.rows_of(PAGE)
    assert results.page(rows) == PAGE, "again: python -m spec_tests.tests.rig.watched"
    assert {*SCRIPTS, *(fault.id for fault in faults())} == rows.keys() - {"script", "fault"}
    assert results.summary(rows)[1]


def test_each_norm_is_shown_by_a_fault_or_by_a_small_script():
    assert {norm.id for norm in norms()} == {*told_by()}

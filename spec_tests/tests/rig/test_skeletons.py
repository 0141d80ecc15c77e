"""Learning mode: each skeleton leads through its chapter and fails with words."""

import ast
import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from spec_tests.contract import FUNCTIONS, skeletons
from spec_tests.contract.skeletons.__main__ import main
from spec_tests.impls import parse
from spec_tests.rig import ledger
from spec_tests.rig.clause import Clause
from spec_tests.rig.judge.runner import CaseResult
from spec_tests.rig.outcomes import SILENT, Outcome
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.sim import hooks
from spec_tests.rig.target import Target
from spec_tests.tests.reference import launch
from spec_tests.tests.rig import built
from spec_tests.tests.rig.helpers import clauses, judged

CHAPTERS = {"loader": "data", "trainer": "training"}
"""Of skeletons that are not called like theirs."""


@pytest.fixture(params=skeletons.SUBJECTS)
def subject(request: pytest.FixtureRequest) -> str:
    return request.param


def functions_of(text: str) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]


def clauses_of(subject: str, level: str) -> list[Clause]:
    return clauses(CHAPTERS.get(subject, subject), level)


def matches(clause: Clause, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(clause.id, pattern) for pattern in patterns)


def first_of_all(subject: str, text: str) -> Clause:
    """The easiest clause of the first task that a course or the contract asks for."""
    named = [function.name for function in functions_of(text)]
    begun = [name for name in named if name in FUNCTIONS][:1]  # what the later ones build on
    patterns = skeletons.tasks(text)[0]
    chapter = [c for c in clauses_of(subject, "correct") if {*named}.issuperset(c.needs)]
    chapter.sort(key=lambda c: bool(c.judges) and not {*begun} & {*c.judges})
    return next(clause for clause in chapter if matches(clause, patterns))


LATER = {"ddp": "ddp_bucketed", "attention": "flash_attention_triton"}
"""What a later task adds, which is not offered until it is begun: it keeps no earlier one red."""


def test_a_skeleton_names_itself_and_fails_with_the_step_that_is_to_be_done(
    own: Worlds, subject: str, tmp_path: Path, capsys
):
    assert main([subject, str(tmp_path / "mine")]) == 0

    place = tmp_path / "mine" / f"{subject}.py"
    text, which = place.read_text(), parse(str(place))
    assert "THIS_FILE" not in text
    assert f"make check IMPL={place}" in text
    assert {function.name for function in functions_of(text)} <= FUNCTIONS.keys()
    assert f"python -m spec_tests --impl {place} --clause" in capsys.readouterr().out
    assert len(text) == len(skeletons.text_of(subject, place)), "and nothing besides"
    clause = first_of_all(subject, text)
    world = own.world(clause.worlds[0], which)
    offered = world.offered()
    assert LATER.get(subject) not in offered
    assert world.misfits() == {}
    case = next(c for c in clause.cases() if c.get("subject", offered[0]) in offered)
    result = judged(which, own, clause, case)
    assert result.outcome is Outcome.FAILED, result.message
    assert "ToDo" in result.message
    assert "task 1: " in result.message
    assert {*re.findall(r'File "([^"]+)"', result.message)} <= {str(place)}, "no other's lines"


def test_nothing_is_overwritten_and_an_unknown_subject_is_refused(tmp_path: Path, capsys):
    place = tmp_path / "ddp.py"
    place.write_text("months of work")
    assert main(["ddp", str(tmp_path)]) == 2
    assert place.read_text() == "months of work"
    assert f"expected to write {place}, but there is something" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["pipeline", str(tmp_path)])
    assert "'trainer'" in capsys.readouterr().err


def test_the_tasks_lead_through_the_whole_chapter_once(subject: str):
    text = skeletons.text_of(subject, Path("mine.py"))
    found = skeletons.tasks(text)
    by_task = {
        clause.id: [n for n, patterns in enumerate(found, start=1) if matches(clause, patterns)]
        for clause in ledger.load_all()
        if clause.chapter == CHAPTERS.get(subject, subject)
    }
    assert len(found) >= 4
    wrong = {name: tasks for name, tasks in by_task.items() if len(tasks) != 1}
    assert wrong == {}, f"put each into one task of spec_tests/contract/skeletons/{subject}.py"
    assert {task for tasks in by_task.values() for task in tasks} == {*range(1, len(found) + 1)}
    course = {clause.id for clause in clauses_of(subject, "course")}
    assert course, "somebody teaches this"
    assert {name for name in course if by_task[name] == [len(found)]} == set(), "it comes first"
    for function in functions_of(text):
        (raised,) = [node for node in function.body if isinstance(node, ast.Raise)]
        assert re.match(r"raise (ToDo|NotImplementedError)\(['\"]task ", ast.unparse(raised))
        assert "Task " in (ast.get_docstring(function) or "")


@pytest.mark.parametrize(
    ("subject", "shown"),
    [
        ("ddp", "gradient tensor([[2., 1.]]), expected [[2., 1.]]"),
        ("zero1", "state of 1 parameters, expected 1 of the 2"),
    ],
)
def test_the_toy_prints_what_it_got_beside_what_is_right(subject: str, shown: str, tmp_path: Path):
    text, found = skeletons.text_of(subject, tmp_path / f"{subject}.py"), "\n# A toy of "
    assert found in text
    toy = text.replace(found, f"\nfrom spec_tests.plain import *\n{found}")
    for rank in launch.run_ranks(toy, folder=tmp_path):
        assert shown in rank.out


def first_and_last_case(
    clause: Clause, target: Target, worlds: Worlds, offered: set[str]
) -> list[CaseResult]:
    """What both cases came to in the clause's smallest world, if they say anything."""
    cases = [
        case
        for case in clause.cases()
        if case["world"] == clause.worlds[0] and case.get("subject", min(offered)) in offered
    ]
    transport = "gloo" if hooks.needs() or "sim" not in clause.transports else "sim"
    results = [
        judged(target, worlds, clause, case, transport=transport)
        for case in (cases[0], *cases[1:][-1:])
    ]
    found = [result for result in results if result.outcome not in SILENT]
    assert found, results[0].message
    return found


@pytest.mark.parametrize(("subject", "task"), built.CLASSES)
def test_the_clauses_of_a_task_need_only_what_is_built(
    worlds: Worlds, mine, subject: str, task: int
):
    which = mine(
        "from spec_tests.tests.rig.built import functions\n"
        f"globals().update(functions({subject!r}, {task}))\n"
    )
    offered = {*built.functions(subject, task)}
    patterns = skeletons.tasks(skeletons.text_of(subject, Path("mine.py")))[task - 1]
    chosen = [
        clause
        for clause in clauses_of(subject, "correct")
        if matches(clause, patterns) and not offered.isdisjoint(clause.judges or clause.needs)
        if ".programs." not in clause.id  # which take longest, and make calls that others make
    ]
    assert len(chosen) >= 4
    for clause in chosen:
        for result in first_and_last_case(clause, which, worlds, offered):
            assert result.outcome is Outcome.PASSED, result.message

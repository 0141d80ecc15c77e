"""Learning mode: each skeleton leads through its chapter, fails with words, and can be filled."""

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
from spec_tests.rig.target import REPOSITORY_ROOT, Implementation, Target, import_target
from spec_tests.tests.reference import launch
from spec_tests.tests.rig import built
from spec_tests.tests.rig.helpers import clauses, judged

CHAPTERS = {"loader": "data", "trainer": "training"}
"""Of skeletons that are not called like theirs."""

REFERENCE = """

from spec_tests.impls import parse
from spec_tests.rig.target import import_target

_reference = import_target(parse("solution"))
"""
WRAPPERS = """
ddp, ddp_bucketed, no_sync = _reference.ddp, _reference.ddp_bucketed, _reference.no_sync
finish_gradient_synchronization = _reference.finish_gradient_synchronization
"""
"""What the trainer's skeleton tells its reader to import."""
with_reference = pytest.mark.skipif(
    not (REPOSITORY_ROOT / "solution").is_dir(), reason="the reference is not beside the suite"
)


@pytest.fixture(params=skeletons.SUBJECTS)
def subject(request: pytest.FixtureRequest) -> str:
    return request.param


def functions_of(text: str) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]


def filled(text: str) -> str:
    """The skeleton with every step done: each function asks the reference's of that name."""
    lines = text.splitlines()
    for function in reversed(functions_of(text)):
        arguments = function.args
        words = [argument.arg for argument in arguments.args]
        words += [f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs]
        words += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
        last = function.body[-1]
        assert isinstance(last, ast.Raise), f"{function.name} has nothing to do"
        call = f"    return _reference.{function.name}({', '.join(words)})"
        lines[last.lineno - 1 : last.end_lineno] = [call]
    whole, toy, play = "\n".join(lines).partition("\n# A toy of ")
    return whole + REFERENCE + (WRAPPERS if "own, with `no_sync`" in text else "") + toy + play


def clauses_of(subject: str, level: str) -> list[Clause]:
    return clauses(CHAPTERS.get(subject, subject), level)


def matches(clause: Clause, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(clause.id, pattern) for pattern in patterns)


def first_of_each_task(subject: str, text: str) -> list[Clause]:
    """The easiest clause of each task that a course or the contract asks for."""
    named = [function.name for function in functions_of(text)]
    begun = [name for name in named if name in FUNCTIONS][:1]  # what the later ones build on
    chapter = [c for c in clauses_of(subject, "correct") if {*named}.issuperset(c.needs)]
    chapter.sort(key=lambda c: bool(c.judges) and not {*begun} & {*c.judges})
    found = (next((c for c in chapter if matches(c, each)), None) for each in skeletons.tasks(text))
    return [clause for clause in found if clause is not None]


def first_case(clause: Clause, target: Target, worlds: Worlds) -> CaseResult:
    """What the first case of what the target offers came to."""
    offered = worlds.world(clause.worlds[0], target).offered()
    case = next(c for c in clause.cases() if c.get("subject", offered[0]) in offered)
    return judged(target, worlds, clause, case)


def test_what_is_written_can_be_loaded_and_names_itself(subject: str, tmp_path: Path, capsys):
    assert main([subject, str(tmp_path / "mine")]) == 0

    place = tmp_path / "mine" / f"{subject}.py"
    text = place.read_text()
    assert "THIS_FILE" not in text
    assert f"make check IMPL={place}" in text
    assert {function.name for function in functions_of(text)} <= FUNCTIONS.keys()
    assert f"python -m spec_tests --impl {place} --clause" in capsys.readouterr().out
    assert len(text) == len(skeletons.text_of(subject, place)), "and nothing besides"


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
    ("subject", "later"), [("ddp", "ddp_bucketed"), ("attention", "flash_attention_triton")]
)
def test_what_a_later_task_adds_keeps_no_earlier_one_red(subject: str, later: str, tmp_path: Path):
    assert main([subject, str(tmp_path)]) == 0
    which = parse(str(tmp_path / f"{subject}.py"))
    offered = Implementation(which.name, import_target(which)).offered
    assert offered
    assert later not in offered, "until it is begun it is not offered"


def test_a_skeleton_fails_with_the_step_that_is_to_be_done(
    own: Worlds, subject: str, tmp_path: Path
):
    assert main([subject, str(tmp_path)]) == 0
    place = tmp_path / f"{subject}.py"
    clause, *_ = first_of_each_task(subject, place.read_text())
    result = first_case(clause, parse(str(place)), own)
    assert result.outcome is Outcome.FAILED, result.message
    assert "ToDo" in result.message
    assert "task 1: " in result.message
    assert {*re.findall(r'File "([^"]+)"', result.message)} <= {str(place)}, "no other's lines"


@with_reference
def test_a_skeleton_that_is_filled_from_the_reference_passes(
    own: Worlds, subject: str, tmp_path: Path
):
    place = tmp_path / f"{subject}.py"
    text = skeletons.text_of(subject, place)
    place.write_text(filled(text))
    which = parse(str(place))
    results = [first_case(clause, which, own) for clause in first_of_each_task(subject, text)]
    assert len(results) >= 3
    assert [r.message for r in results if r.outcome is not Outcome.PASSED] == []


@with_reference
@pytest.mark.parametrize(
    ("subject", "shown"),
    [
        ("ddp", "gradient tensor([[2., 1.]]), expected [[2., 1.]]"),
        ("zero1", "state of 1 parameters, expected 1 of the 2"),
    ],
)
def test_the_toy_prints_what_it_got_beside_what_is_right(subject: str, shown: str, tmp_path: Path):
    toy = filled(skeletons.text_of(subject, tmp_path / f"{subject}.py"))
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

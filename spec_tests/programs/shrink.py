"""Shrinking: from a situation that fails to the smallest one that is found to fail alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from spec_tests.programs import law
from spec_tests.programs.calls import Program
from spec_tests.programs.scene import Scene
from spec_tests.rig.judge import Violation
from spec_tests.rig.ranks.errors import RankDied, RankHung, RankRaised

FAILURES: Any = (Violation, RankRaised, RankDied, RankHung)
"""What a situation may come to, beside what was not offered and errors of the suite."""
_NUMBER = re.compile(r"\d+")


def cause_of(failure: BaseException) -> str:
    """Return what makes two findings one: the kind of failure, and its diagnosis or error."""
    if isinstance(failure, Violation):
        text = str(failure).partition("\n")[2]  # without the clause
        likely = re.search(r"^likely: (.*)$", text, re.MULTILINE)
        quantity = re.search(r"expected the ([a-z ]+?)(?: at call|,)", text)
        where = quantity[1] if quantity else _NUMBER.sub("#", text)[:60]
        return f"{likely[1] if likely else 'wrong'}, {where}"
    if isinstance(failure, RankRaised):
        return _NUMBER.sub("#", failure.error.headline)
    return type(failure).__name__


def smallest(
    line: str,
    failure: Exception,
    judged: Callable[[str], Exception | None],
    *,
    subject: str,
    size: int,
    is_avoided: Callable[[str], bool],
    tries: int = 120,
    costly: int = 16,
) -> tuple[str, Exception]:
    """Return the smallest situation found that fails as this one does, and how it fails.

    Args:
        judged: what a situation comes to; None if it holds.
        is_avoided: whether a declared deviation speaks of a situation.
        tries: situations that are judged at most.
        costly: of these, such as may die or hang, which costs seconds: the ranks start anew.
    """
    cause, scene_and_program = cause_of(failure), law.read(line)
    while True:
        for scene, program in _smaller(*scene_and_program):
            shorter = law.written(scene, program)
            if not law.is_legal(scene, program, subject, size) or is_avoided(shorter):
                continue
            if tries == 0 or costly == 0:
                return law.written(*scene_and_program), failure
            found = judged(shorter)
            tries -= 1
            costly -= isinstance(found, (RankDied, RankHung))
            if found is not None and cause_of(found) == cause:
                scene_and_program, failure = (scene, program), found
                break
        else:
            return law.written(*scene_and_program), failure


def _smaller(scene: Scene, program: Program) -> Iterator[tuple[Scene, Program]]:
    """Yield what is left without the scene; half of the calls, a quarter, one; a word of it."""
    if scene != Scene():
        yield Scene(), program
    for length in dict.fromkeys((len(program) // 2, len(program) // 4, 2, 1)):
        for begin in range(0, len(program), max(1, length)) if length else ():
            shorter = program[:begin] + program[begin + length :]
            if shorter:
                yield scene, shorter
    for word in str(scene).split():
        yield scene.without(word), program

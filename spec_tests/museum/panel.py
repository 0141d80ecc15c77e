"""The panel: on which cases a near-miss's signature is taken, and how.

A signature is all that a near-miss fails, with the symptoms: see `signatures.py`, the command.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from typing import Any

from spec_tests.museum import CATALOGUE, REFERENCE
from spec_tests.museum.card import Impostor
from spec_tests.museum.matrix import by_id, named_clauses, probe, target_of
from spec_tests.rig.clause import TELLING_SIZE, Clause
from spec_tests.rig.judge.runner import CaseResult, run_case
from spec_tests.rig.outcomes import SILENT, Outcome
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.report.diagnosis import Signature
from spec_tests.rig.report.symptom import symptom
from spec_tests.rig.target import Target

SIZE = TELLING_SIZE
"""Most ranks of the panel's worlds; clauses that need more are left out."""

SLOW_S = 1.5
"""A clause that takes plain code longer is asked only about the near-misses that name it."""

MOST_S = 60.0
"""A near-miss that hangs everywhere is not asked about more clauses than fit into this."""


def panel(chapter: str, brought: set[str]) -> Iterator[tuple[Clause, dict[str, Any]]]:
    """Yield the cases of a chapter's clauses that a signature is taken on."""
    for clause in by_id().values():
        if clause.chapter != chapter or "gloo" not in clause.transports:
            continue
        seen = set()
        size = max((size for size in clause.worlds if size <= SIZE), default=0)
        for case in clause.cases():
            subject = case.get("subject")
            is_brought = not brought or not clause.judges or subject in brought
            if is_brought and subject not in seen and case["world"] == size:
                seen.add(subject)
                yield clause, case


def take(impostor: Impostor, worlds: Worlds) -> tuple[Signature, dict[str, float]]:
    """Return the signature, and the seconds that the panel's clauses take on plain code.

    What its base fails as well, beyond the level that the base is held to, tells nothing of a
    near-miss, and is left out.
    """
    found: Signature = {}
    for clause in named_clauses(impostor) if impostor is not REFERENCE else ():
        if "gloo" in clause.transports:
            _note(found, clause, probe(clause, impostor, worlds).decisive)
    chapter, brought = impostor.chapter, impostor.brings
    usual, usual_s = _of_base(chapter, frozenset(brought))
    left_out = {*found} | {clause for clause, took in usual_s.items() if took > SLOW_S}
    others, _ = _judge(target_of(impostor), worlds, chapter, brought, left_out)
    return found | {c: s for c, s in others.items() if usual.get(c) != s}, usual_s


@functools.cache
def _of_base(chapter: str, brought: frozenset[str]) -> tuple[Signature, dict[str, float]]:
    """Of the near-misses' base with nothing overridden; of the reference for patches of it."""
    bases = [card for card in CATALOGUE.values() if card.is_benign and card.id.endswith("plain")]
    base = next((card for card in bases if brought and card.brings == brought), REFERENCE)
    worlds = Worlds()
    try:
        return _judge(target_of(base), worlds, chapter, {*brought}, set(), within_s=math.inf)
    finally:
        worlds.close()


def _judge(
    target: Target,
    worlds: Worlds,
    chapter: str,
    brought: set[str],
    known: set[str],
    within_s: float = MOST_S,
) -> tuple[Signature, dict[str, float]]:
    """Judge the panel but for the clauses that are known."""
    found: Signature = {}
    seconds: dict[str, float] = {}
    begun = time.perf_counter()
    for clause, case in panel(chapter, brought):
        if clause.id in known | {*found} or time.perf_counter() - begun > within_s:
            continue
        result = run_case(clause, target, case, worlds)
        seconds[clause.id] = seconds.get(clause.id, 0.0) + result.duration_s
        _note(found, clause, result)
    return found, seconds


def _note(found: Signature, clause: Clause, result: CaseResult | None) -> None:
    if result is not None and result.outcome not in {Outcome.PASSED, *SILENT}:
        found[clause.id] = symptom(str(result.outcome), result.message)

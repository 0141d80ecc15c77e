"""Which clauses reject which impostors: the proof that the suite has teeth, and no false alarms.

An impostor is *rejected* by a clause when at least one of the clause's cases fails in a way that
its card allows. It is *misattributed* when a chapter that it has nothing to do with rejects it.
`command` says what of this is run, `crew` has it done side by side.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from spec_tests.impls import parse
from spec_tests.museum.card import Impostor
from spec_tests.rig.clause import Clause
from spec_tests.rig.judge.runner import CaseResult, run_case
from spec_tests.rig.ledger import load_all
from spec_tests.rig.outcomes import SILENT, Outcome
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.target import Target

# Chapters whose clauses see what the key chapter does: no stranger to it, so not "unrelated".
RELATED = {
    "ddp": {"ddp", "training", "checkpoint"},
    "fsdp": {"fsdp", "clip", "checkpoint", "training"},
    "zero1": {"zero1", "checkpoint"},
    "training": {"training"},
    "trainer": {"trainer"},
    "data": {"data", "training"},
}


@dataclass
class Finding:
    """What one clause said about one impostor: the decisive case, or the last one that passed."""

    clause: Clause
    impostor: Impostor
    results: list[CaseResult] = field(default_factory=list)

    @property
    def decisive(self) -> CaseResult | None:
        """The first case that says something other than "passed" or nothing."""
        quiet = {Outcome.PASSED, *SILENT}
        return next((result for result in self.results if result.outcome not in quiet), None)

    @property
    def is_rejected(self) -> bool:
        """True if a case failed in one of the ways that the card allows."""
        found = self.decisive
        return found is not None and str(found.outcome) in self.impostor.outcomes

    @property
    def margin(self) -> float | None:
        """The largest error over its tolerance; None if no finite error was compared with one."""
        ratios = [m["ratio"] for r in self.results for m in r.margins if math.isfinite(m["ratio"])]
        return max(ratios, default=None)


def probe(clause: Clause, impostor: Impostor, worlds: Worlds, *, brief: bool = False) -> Finding:
    """Run the clause's cases until one of them is decisive; live, where simulated ranks cannot.

    Of a clause that judges a function which the impostor brings, only the cases of what it brings.
    `brief`: one case, on two ranks or the fewest that the clause has; which one, the names of the
    clause and the impostor decide.
    """
    finding = Finding(clause, impostor)
    target = target_of(impostor)
    own = impostor.brings & {*clause.judges}
    cases = [case for case in clause.cases() if not own or case["subject"] in own]
    is_seen = clause.transport_on(worlds.transport) in clause.transports
    transport = None if is_seen else "gloo"
    # Of what is drawn the first part has the seeds, which find most.
    parts = [case for case in cases if isinstance(case.get("situation"), int)]
    cases.sort(key=lambda case: (case in parts and case["situation"], case["world"]))
    for case in _some(cases, f"{impostor.id} {clause.id}") if brief else cases:
        finding.results.append(run_case(clause, target, case, worlds, transport=transport))
        if finding.decisive is not None:
            break
    return finding


def _some(cases: Sequence[dict[str, Any]], seed: str) -> list[dict[str, Any]]:
    """Return one of the cases with few ranks."""
    few = max(2, min((case["world"] for case in cases), default=2))
    chosen = [case for case in cases if case["world"] <= few]
    return [random.Random(seed).choice(chosen)] if chosen else []


def target_of(impostor: Impostor) -> Target:
    """The impostor as an implementation."""
    return parse(f"impostor:{impostor.id}")


@functools.cache
def by_id() -> dict[str, Clause]:
    """Every clause, in the order of the ledger."""
    return {clause.id: clause for clause in load_all()}


def named_clauses(impostor: Impostor) -> list[Clause]:
    """The clauses that must reject it.

    Raises:
        ValueError: the card names a clause that does not exist.
    """
    clauses = by_id()
    unknown = [name for name in impostor.rejected_by if name not in clauses]
    if unknown:
        raise ValueError(f"impostor {impostor.id} names clauses that do not exist: {unknown}")
    return [clauses[name] for name in impostor.rejected_by]


def _observable() -> list[Clause]:
    """The clauses that ranks on a CPU can observe."""
    return [c for c in by_id().values() if {"gloo", "sim"} & {*c.transports}]


def owed_by_benign(impostor: Impostor) -> list[Clause]:
    """The clauses that right but unusual code must pass: those about the functions it brings.

    Up to level `correct`, and of `production` those that its card names.

    What saves must know what it saves: a clause on both is owed by whoever brings both.
    """
    brought = impostor.brings
    both = {"sharded_optimizer", "save_checkpoint"}
    return [
        clause
        for clause in _observable()
        if (clause.level != "production" or any(fnmatch(clause.id, each) for each in impostor.also))
        and brought & (used := {*clause.judges, *clause.needs})
        and (both <= brought or not both <= used)
    ]


def unrelated_clauses(impostor: Impostor, limit: int) -> list[Clause]:
    """At most `limit` clauses of the chapters that an impostor has nothing to do with.

    Clauses that judge a function which it brings are left out: of a plain one nobody promised what
    other chapters ask. A limit takes another part for each impostor, so that all of them together
    see every chapter.
    """
    related = RELATED.get(impostor.chapter, {impostor.chapter})
    brought = impostor.brings
    found = [c for c in _observable() if c.chapter not in related and not brought & {*c.judges}]
    return random.Random(impostor.id).sample(found, min(limit, len(found)))


def rejections(impostor: Impostor, worlds: Worlds) -> list[Finding]:
    """What the clauses that it names say of it, as far as ranks on a CPU can observe them."""
    named, seen = named_clauses(impostor) if impostor.is_here else [], _observable()
    return [probe(clause, impostor, worlds) for clause in named if clause in seen]


def must_reject(findings: Sequence[Finding]) -> list[str]:
    """Complaints about named clauses that let the impostor pass; empty if all reject it."""
    complaints = []
    for finding in findings:
        if not finding.is_rejected:
            found, card = finding.decisive, finding.impostor
            seen = f"{found.outcome} ({found.case}): {found.message}" if found else "all passed"
            complaints.append(
                f"{card.id} must be rejected by {finding.clause.id} ({', '.join(card.outcomes)}): "
                f"{seen}"
            )
    return complaints


def must_accept(findings: Sequence[Finding]) -> list[str]:
    """Complaints about clauses that reject what they have no reason to reject."""
    return [
        f"{finding.impostor.id} must be accepted by {finding.clause.id}: {found.outcome} "
        f"({found.case}): {found.message}"
        for finding in findings
        if (found := finding.decisive) is not None
    ]

"""Which clauses reject which impostors: the proof that the suite has teeth, and no false alarms.

    python -m spec_tests impostors                      named clauses of every impostor
    python -m spec_tests impostors --repeat 20          20 times each: a rejection by luck shows
    python -m spec_tests impostors --accepted           benign ones, and a sample of other chapters
    python -m spec_tests impostors --full               both, and all of the other chapters: an hour
    python -m spec_tests impostors --only 'ddp.no-*'    some of them

An impostor is *rejected* by a clause when at least one of the clause's cases fails in a way that
its card allows. It is *misattributed* when a chapter that it has nothing to do with rejects it.
"""

from __future__ import annotations

import argparse
import fnmatch
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from spec_tests.clause import Clause
from spec_tests.impostors import CATALOGUE, FORCED_FAILURE
from spec_tests.impostors.alone import Alone
from spec_tests.impostors.card import Impostor
from spec_tests.ledger import load_all
from spec_tests.rig.outcomes import SILENT, Outcome
from spec_tests.rig.runner import CaseResult, run_case
from spec_tests.rig.world import Worlds
from spec_tests.target import Target, parse

# Chapters whose clauses see what the key chapter does: no stranger to it, so not "unrelated".
RELATED = {
    "ddp": {"ddp", "training", "checkpoint"},
    "fsdp": {"fsdp", "clip", "checkpoint", "training"},
    "zero1": {"zero1", "checkpoint"},
    "training": {"training"},
    "data": {"data", "training"},
}

SAMPLE, SAMPLED = 2, 48
"""`--accepted`: clauses of other chapters that a near-miss is held against, and how many are."""


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


def probe(clause: Clause, impostor: Impostor, worlds: Worlds) -> Finding:
    """Run the clause's cases until one of them is decisive.

    Of a clause that judges a function which the impostor brings, only the cases of what it brings.
    """
    finding = Finding(clause, impostor)
    target = target_of(impostor)
    own = brought_by(impostor) & {*clause.judges}
    worlds = Alone(impostor, worlds) if impostor.alone else worlds
    for case in clause.cases():
        if own and case["subject"] not in own:
            continue
        finding.results.append(run_case(clause, target, case, worlds))
        if finding.decisive is not None:
            break
    return finding


def target_of(impostor: Impostor) -> Target:
    """The impostor as an implementation."""
    return parse(f"impostor:{impostor.id}")


def named_clauses(impostor: Impostor) -> list[Clause]:
    """The clauses that must reject it.

    Raises:
        ValueError: the card names a clause that does not exist.
    """
    clauses = {clause.id: clause for clause in load_all()}
    unknown = [name for name in impostor.rejected_by if name not in clauses]
    if unknown:
        raise ValueError(f"impostor {impostor.id} names clauses that do not exist: {unknown}")
    return [clauses[name] for name in impostor.rejected_by]


def brought_by(impostor: Impostor) -> set[str]:
    """The contract functions that it replaces; none if it patches the reference."""
    return {*impostor.functions()} if impostor.functions else set()


def _observable() -> list[Clause]:
    """The clauses that ranks on a CPU can observe."""
    return [
        clause for clause in load_all() if "gloo" in clause.transports or "sim" in clause.transports
    ]


def owed_by_benign(impostor: Impostor) -> list[Clause]:
    """The clauses that right but unusual code must pass: those about the functions it brings.

    What saves must know what it saves: a clause on both is owed by whoever brings both.
    """
    brought = brought_by(impostor)
    both = {"sharded_optimizer", "save_checkpoint"}
    return [
        clause
        for clause in _observable()
        if clause.level != "production"
        and brought & (used := {*clause.judges, *clause.needs})
        and (both <= brought or not both <= used)
    ]


def unrelated_clauses(impostor: Impostor, limit: int | None = None) -> list[Clause]:
    """Clauses of the chapters that an impostor has nothing to do with; at most `limit` of them.

    Clauses that judge a function which it brings are left out: a near-miss of `train` brings a
    plain `ddp` to go with it, of which nobody promised what the chapter on `ddp` asks. A limit
    takes another part for each impostor, so that all of them together see every chapter.
    """
    chapter = impostor.id.partition(".")[0]
    related = RELATED.get(chapter, {chapter})
    brought = brought_by(impostor)
    found = [c for c in _observable() if c.chapter not in related and not brought & {*c.judges}]
    if limit is None:
        return found
    return random.Random(impostor.id).sample(found, min(limit, len(found)))


def must_reject(impostor: Impostor, worlds: Worlds) -> list[str]:
    """Complaints about named clauses that let the impostor pass; empty if all reject it."""
    complaints = []
    for clause in named_clauses(impostor) if impostor.is_here else ():
        finding = probe(clause, impostor, worlds)
        if not finding.is_rejected:
            found = finding.decisive
            seen = f"{found.outcome} ({found.case}): {found.message}" if found else "all passed"
            complaints.append(
                f"{impostor.id} must be rejected by {clause.id} ({', '.join(impostor.outcomes)}): "
                f"{seen}"
            )
    return complaints


def must_accept(impostor: Impostor, clauses: Sequence[Clause], worlds: Worlds) -> list[str]:
    """Complaints about clauses that reject what they have no reason to reject."""
    complaints = []
    for clause in clauses:
        found = probe(clause, impostor, worlds).decisive
        if found is not None:
            complaints.append(
                f"{impostor.id} must be accepted by {clause.id}: {found.outcome} ({found.case}): "
                f"{found.message}"
            )
    return complaints


def main(arguments: Sequence[str]) -> int:
    """The command; 0 if everything is rejected and accepted as it should be."""
    from hypothesis import settings

    from spec_tests.rig.strategies import register_profiles

    parser = argparse.ArgumentParser(prog="python -m spec_tests impostors", description=__doc__)
    parser.add_argument("--repeat", type=int, default=1, help="times that each must be rejected")
    parser.add_argument("--full", action="store_true", help="other chapters and benign ones too")
    parser.add_argument(
        "--accepted",
        action="store_true",
        help="only what must be accepted: benign ones by all, some others by a sample of clauses",
    )
    parser.add_argument("--only", default="*", help="glob over impostor ids")
    options = parser.parse_args(arguments)
    register_profiles()
    settings.load_profile("impostors")
    chosen = [i for i in CATALOGUE.values() if fnmatch.fnmatchcase(i.id, options.only)]
    if not chosen:
        chapters = sorted({f"{name.partition('.')[0]}.*" for name in CATALOGUE})
        print(f"--only {options.only}: no impostor matches; try one of {', '.join(chapters)}")
        return 2
    if options.accepted:
        chosen = _sampled(chosen)
    worlds = Worlds()
    try:
        complaints = [line for i in chosen for line in _examine(i, options, worlds)]
    finally:
        worlds.close()
    print("\n".join(["", *complaints]) if complaints else "")
    rejected = sum(not i.is_benign for i in chosen)
    print(f"{rejected} impostors, {len(chosen) - rejected} benign: {len(complaints)} complaints")
    return 1 if complaints else 0


def _sampled(impostors: Sequence[Impostor]) -> list[Impostor]:
    """All benign ones and some of the rest, the same ones each time."""
    near_misses = [i for i in impostors if not i.is_benign]
    kept = {i.id for i in random.Random(0).sample(near_misses, min(SAMPLED, len(near_misses)))}
    return [i for i in impostors if i.is_benign or i.id in kept]


def _examine(impostor: Impostor, options: argparse.Namespace, worlds: Worlds) -> list[str]:
    begun, complaints = time.perf_counter(), []
    accepted: list[Clause] = []
    if impostor.is_benign:
        accepted = owed_by_benign(impostor) if options.full or options.accepted else []
    elif impostor is not FORCED_FAILURE:
        if options.full:
            accepted = unrelated_clauses(impostor)
        elif options.accepted:
            accepted = unrelated_clauses(impostor, limit=SAMPLE)
    if not (impostor.is_benign or options.accepted):
        for _ in range(options.repeat):
            complaints += must_reject(impostor, worlds)
    complaints += must_accept(impostor, accepted, worlds)
    worlds.drop(target_of(impostor))
    verdict = "COMPLAINT" if complaints else "ok"
    names = ", ".join(impostor.rejected_by) or "accepted by all"
    if options.accepted:
        names = f"accepted by {len(accepted)} clauses"
    print(f"{verdict:9} {impostor.id:36} {time.perf_counter() - begun:6.1f} s  {names}", flush=True)
    return complaints

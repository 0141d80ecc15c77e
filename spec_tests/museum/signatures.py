"""Signatures: which clauses each near-miss fails, and with which symptom. The dictionary of causes.

A near-miss names the clauses that must reject it; its signature is all that it fails. So a judged
implementation that fails the same clauses in the same way probably has the same fault, and the
near-miss's story says what that is (`rig.report.diagnosis`). A signature is taken on a panel: of
every clause of the chapter one case of each function that the near-miss brings, in a world of
three live ranks, or of fewer where the clause has none (slow clauses aside); of the clauses that it
names every case.

    python -m spec_tests signatures                    take all of them: two hours on two cores
    python -m spec_tests signatures --only 'ddp.*'     some; the others stay as they are
    python -m spec_tests signatures --accuracy         how well they explain each other

The last one asks what a report would say of each near-miss that it does not know: its signature is
taken out of the dictionary, and the family that the others speak of is compared with its own
(`families.toml`). Precision: of those of which a family is named, or two, how many have it, or one
of the two; in brackets where one is named. Coverage: of how many one is named. Where code raised
none ever is; such near-misses are counted apart, in no coverage. The lines below are what was named
wrongly.

The file says with which torch they were taken.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from spec_tests.museum import CATALOGUE, near_misses
from spec_tests.museum.crew import Crew, Job
from spec_tests.museum.matrix import by_id
from spec_tests.rig.outcomes import Event, Outcome
from spec_tests.rig.report.causes import causes
from spec_tests.rig.report.diagnosis import (
    PATH,
    Signatures,
    family_of,
    load,
    save,
)


def main(arguments: Sequence[str]) -> int:
    """Take signatures and write the file; 1 if one could not be taken."""
    parser = argparse.ArgumentParser(
        prog="python -m spec_tests signatures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=["*"], help="globs over near-misses' ids")
    parser.add_argument("--side-by-side", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--accuracy", action="store_true", help="of those that were taken")
    options = parser.parse_args(arguments)
    if options.accuracy:
        print(*accuracy(load()), sep="\n")
        return 0
    chosen = [
        card
        for card in near_misses()
        if card.is_here and any(fnmatch.fnmatchcase(card.id, glob) for glob in options.only)
    ]
    kept = load()
    of = {name: found for name, found in kept.of.items() if name in CATALOGUE}
    seconds, failed = dict(kept.seconds), 0

    def write() -> None:
        does = {name: CATALOGUE[name].does for name in of}
        save(Signatures(torch.__version__.partition("+")[0], of, does, seconds))

    with Crew(max(1, min(options.side_by_side, len(chosen)))) as crew:
        asked = [(card.id, crew.submit(Job(card.id, signature=True))) for card in chosen]
        for name, future in asked:
            verdict = future.result()
            failed += bool(verdict.complaints)
            of[name] = verdict.symptoms
            _keep_least(seconds, verdict.seconds)
            words = "; ".join(verdict.complaints) or f"fails {len(verdict.symptoms)} clauses"
            print(f"{name:44} {verdict.duration_s:6.1f} s  {words}", flush=True)
            write()  # a run that is interrupted keeps what it has taken
    write()  # without those that are in the catalogue no more, though none was chosen
    print(f"{len(chosen)} signatures, {failed} of them incomplete: {PATH}")
    return int(failed > 0)


def _keep_least(seconds: dict[str, float], seen: Mapping[str, float]) -> None:
    """Keep the least that a clause took, for other processes use the machine as well."""
    for clause, took in seen.items():
        seconds[clause] = round(min(took, seconds.get(clause, took)), 3)


def accuracy(kept: Signatures) -> list[str]:
    """Say how well kinds of faults are named: see the head of this file; then the wrong ones."""
    rows: dict[str, Counter[str]] = {}
    wrong = []
    for name, found in kept.of.items():
        chapter, right = name.partition(".")[0], family_of()[name]
        said, has_raised = _said(kept, chapter, name, found)
        for row in (rows.setdefault(each, Counter()) for each in (chapter, "all")):
            row.update({"number": 1, "raised": has_raised, "named": bool(said)})
            row.update({"right": right in said, "one": len(said) == 1, "sure": said == (right,)})
        if said and right not in said:
            wrong.append(f"    {name} ({right}): {', '.join(said)}")
    lines = ["near-misses, without their own signature: precision (of one), coverage; raised"]
    for chapter, row in sorted(rows.items()):
        lines.append(
            f"{chapter:12} {row['number']:4}: {_share(row, 'right', 'named')} "
            f"({_share(row, 'sure', 'one')}) {_share(row, 'named', 'number', 'raised')}  "
            f"{row['raised']:3}"
        )
    return [*lines, "another family:", *wrong]


def _share(row: Mapping[str, int], part: str, of: str, but: str = "") -> str:
    return f"{row[part] / max(1, row[of] - (row[but] if but else 0)):4.0%}"


def _said(
    kept: Signatures, chapter: str, without: str, failed: Mapping[str, str]
) -> tuple[tuple[str, ...], bool]:
    """The families that a report names where these clauses fail so, and whether all raised."""
    judged = {clause for name, own in kept.of.items() if name.startswith(chapter) for clause in own}
    events = [_event(clause, failed.get(clause)) for clause in sorted(judged & {*by_id()})]
    found = causes(events, "it", without=[without])
    named = tuple(family for cause in found for family in cause.families)
    return named, all(cause.kind == "raised" for cause in found)


def _event(clause: str, shown: str | None) -> Event:
    """The result of a clause that passed, or failed with a message of that symptom."""
    direction, _, what = (shown or "").partition(": ")
    got = {"less": "got 1", "more": "got 3"}.get(direction, "got another")
    headline = f"rank 0: expected {what}{' 2' * (direction in ('less', 'more'))}, {got}"
    if direction.startswith("raised "):
        headline = f"rank 0 of 2 {shown}: words"
    if direction == "likely":
        headline = f"what was found\n{shown}"
    ended = direction if direction in (Outcome.HANG, Outcome.DIED) else Outcome.FAILED
    return {
        "event": "result",
        "clause": clause,
        "implementation": "it",
        "case": "",
        "strength": str(by_id()[clause].strength),
        "level": by_id()[clause].level,
        "outcome": str(ended if shown else Outcome.PASSED),
        "message": f"[{clause}]\n{headline}" if shown else "",
    }

"""Judge the real bugs: which clauses reject each faulty behaviour; is its twin accepted?

python -m spec_tests reality                     all; writes results.json and RESULTS.md
python -m spec_tests reality --only verl-7493    one; the others keep their results
python -m spec_tests reality --missing           those that have no result yet
python -m spec_tests reality --stage before      into that column; the default is "after"
python -m spec_tests reality --list              every entry, and whether it is implemented

A faulty behaviour is held against the clauses that the list expects; where all of them pass,
against its whole chapter at level production, until one rejects it. A rejection counts if the
fixed twin passes the same clause. A twin with code of its own is also held against every clause at
level correct about the functions that it brings. One process judges, one clause after another.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from spec_tests.museum import matrix
from spec_tests.museum.card import Impostor
from spec_tests.museum.reality import FOLDER, REJECTED, Bug, bugs, cards, implemented
from spec_tests.rig.clause import Clause
from spec_tests.rig.ranks.world import Worlds

STAGES = ("before", "after")
Result = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """The command; 0 if every faulty behaviour is rejected and every twin accepted."""
    parser = argparse.ArgumentParser(
        prog="python -m spec_tests reality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="*", help="glob over ids; several with commas")
    parser.add_argument("--missing", action="store_true", help="only those without a result")
    parser.add_argument("--stage", choices=STAGES, default="after", help="the column to write")
    parser.add_argument("--list", action="store_true", help="name the entries and judge nothing")
    options = parser.parse_args(arguments)
    if options.list:
        for bug in bugs().values():
            state = "implemented" if bug.id in implemented() else bug.left_out or "to do"
            print(f"{bug.id:28} {bug.chapter:11} {state}")
        return 0
    results = read()
    column = results.setdefault(options.stage, {})
    globs = options.only.split(",")
    chosen = [
        bug
        for bug in bugs().values()
        if bug.id in implemented()
        and any(fnmatch.fnmatchcase(bug.id, glob) for glob in globs)
        and not (options.missing and bug.id in column)
    ]
    _prepare()
    for bug in chosen:
        column[bug.id] = judge(bug)
        print(f"{bug.id:28} {_seen(column[bug.id])}", flush=True)
        write(results)
    write(results)
    return 0 if all(column[b.id]["rejected_by"] and not column[b.id]["twin"] for b in chosen) else 1


def _prepare() -> None:
    """Start ranks as the impostors' command does, and draw cases as it does."""
    from hypothesis import settings

    from spec_tests.rig.ranks.zygote import rank_environment, start_zygote
    from spec_tests.rig.strategies import register_profiles

    os.environ.update(rank_environment("gloo"))
    start_zygote("spec_tests.museum.preload")
    register_profiles()
    settings.load_profile("impostors")


def judge(bug: Bug) -> Result:
    """What the clauses say of one entry's two behaviours."""
    begun = time.perf_counter()
    wrong, right = cards(bug.id)
    clauses = matrix.by_id()
    twin: dict[str, str] = {}
    says: dict[str, str] = {}
    expected = [clauses[name] for name in bug.expected]
    rejected = _rejections(expected, wrong, right, twin, says)
    scope = "expected"
    if not rejected:
        scope = "chapter"
        rest = [c for c in chapter(bug, wrong) if c.id not in bug.expected]
        rejected = _rejections(rest, wrong, right, twin, says, first=True)
    if implemented()[bug.id][1].__module__.startswith(__package__):
        own = [c for c in chapter(bug, right) if c.level != "production"]
        _rejections(own, right, None, twin, {})
    return {
        "rejected_by": rejected,
        "scope": scope,
        "says": says,
        "twin": twin,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def chapter(bug: Bug, card: Impostor) -> list[Clause]:
    """The clauses of its chapter that ranks on a CPU can judge and that use what it brings."""
    brought = matrix.brought_by(card)
    return [
        c
        for c in matrix.by_id().values()
        if c.chapter == bug.chapter
        and {"gloo", "sim"} & {*c.transports}
        and brought & {*c.judges, *c.needs}
    ]


def _rejections(
    clauses: Iterable[Clause],
    card: Impostor,
    right: Impostor | None,
    twin: dict[str, str],
    says: dict[str, str],
    *,
    first: bool = False,
) -> dict[str, str]:
    """Clause to how it rejects the card; its words go into `says`, the twin's into `twin`."""
    found: dict[str, str] = {}
    for clause in clauses:
        worlds = Worlds("gloo")
        try:
            finding = matrix.probe(clause, card, worlds)
            if first and finding.decisive is not None:  # what was not expected must show twice
                finding = matrix.probe(clause, card, worlds)
            of_twin = finding if right is None else None
            if right is not None and finding.decisive is not None:
                of_twin = matrix.probe(clause, right, worlds)
        finally:
            worlds.close()
        if of_twin is not None and of_twin.decisive is not None:
            # The plain bases owe nothing at level production.
            if right is None or clause.level != "production":
                twin[clause.id] = of_twin.decisive.message[:600]
            continue
        decisive = finding.decisive
        if decisive is not None and str(decisive.outcome) in REJECTED:
            found[clause.id] = f"{clause.level}, {decisive.outcome}"
            says[clause.id] = " | ".join(decisive.message.splitlines()[1:3])[:200]
            if first:
                break
    return found


# ------------------------------------------------------------------------------------- results


def read() -> dict[str, dict[str, Result]]:
    """The results so far, by stage and id."""
    path = FOLDER / "results.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write(results: dict[str, dict[str, Result]]) -> None:
    """Write the results, and the table for readers."""
    listed = list(bugs())
    kept = {
        stage: {id: found[id] for id in listed if id in found} for stage, found in results.items()
    }
    text = json.dumps(kept, indent=1, sort_keys=False)
    (FOLDER / "results.json").write_text(text + "\n", encoding="utf-8")
    (FOLDER / "RESULTS.md").write_text(table(kept), encoding="utf-8")


def table(results: dict[str, dict[str, Result]]) -> str:
    """RESULTS.md."""
    stages = [stage for stage in STAGES if results.get(stage)]
    lines = [
        "# Real bugs: what rejects them",
        "",
        "Generated by `python -m spec_tests reality`; README.md has the rule of the list. A clause",
        "without a mark was expected to reject the entry before anything was judged; one marked *",
        "was found in the rest of the chapter. The level is that of the clause.",
        "",
    ]
    for stage in stages:
        lines += [f"Recall {stage} clauses were changed: {recall(results[stage])}", ""]
    lines += ["| bug | known | what | " + " | ".join(f"{s}: rejected by" for s in stages)]
    lines[-1] += " | twin |"
    lines += ["|" + "---|" * (4 + len(stages))]
    for bug in bugs().values():
        cells = [_cell(bug, results[stage].get(bug.id)) for stage in stages]
        known = "yes" if bug.known else ""
        latest = next((results[s][bug.id] for s in stages[::-1] if bug.id in results[s]), None)
        twin = "" if latest is None else "REJECTED" if latest["twin"] else "accepted"
        name = f"[{bug.id}]({bug.link})"
        lines.append(f"| {name} | {known} | {bug.what} | {' | '.join(cells)} | {twin} |")
    return "\n".join(lines) + "\n"


def recall(column: dict[str, Result]) -> str:
    """Rejected of judged, for all, for those that were not known, and by how they were found."""
    groups = {
        "all": list(bugs().values()),
        "not known": [b for b in bugs().values() if not b.known],
        "known": [b for b in bugs().values() if b.known],
        "found by a query": [b for b in bugs().values() if b.query != "named"],
        "only named by an issue": [b for b in bugs().values() if b.query == "named"],
    }
    words = []
    for name, group in groups.items():
        judged = [column[b.id] for b in group if b.id in column]
        words.append(f"{name} {sum(bool(r['rejected_by']) for r in judged)} of {len(judged)}")
    judged = [column[b.id] for b in bugs().values() if b.id in column]
    by_plan = sum(bool(r["rejected_by"]) and r["scope"] == "expected" for r in judged)
    levels = [
        any(how.startswith(("course", "correct")) for how in r["rejected_by"].values())
        for r in judged
    ]
    words.append(f"by an expected clause {by_plan}")
    words.append(f"by a clause at level correct or below {sum(levels)}")
    words.append(f"twins rejected {sum(bool(r['twin']) for r in judged)}")
    return "; ".join(words) + "."


def _cell(bug: Bug, result: Result | None) -> str:
    if bug.left_out:
        return f"left out: {bug.left_out}"
    if result is None:
        return ""
    if not result["rejected_by"]:
        return "**missed**"
    star = "" if result["scope"] == "expected" else "*"
    return ", ".join(f"`{name}`{star} ({how})" for name, how in result["rejected_by"].items())


def _seen(result: Result) -> str:
    rejected = ", ".join(result["rejected_by"]) or "MISSED"
    twin = f"  TWIN REJECTED by {', '.join(result['twin'])}" if result["twin"] else ""
    return f"{result['seconds']:6.1f} s  {result['scope']:8} {rejected}{twin}"

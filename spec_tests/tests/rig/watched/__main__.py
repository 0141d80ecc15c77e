"""Try the watcher on every script and every fault, and write what it said to RESULTS.md.

    python -m spec_tests.tests.rig.watched                 all: about five minutes
    python -m spec_tests.tests.rig.watched --only 'gan*'   some: their rows are written anew

A right script is run at 1, 2 and 3 ranks, with two seeds at 2, with the watcher and without it:
nothing may be found, and the bits must be the same. A fault should be told within two steps.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import tempfile
from pathlib import Path

from spec_tests.tests.rig.watched import HERE, SCRIPTS, Fault, faults, find, write_fault
from spec_tests.tests.rig.watched.trial import Outcome, run

RUNS = ((1, 0), (2, 0), (2, 1), (3, 0))
"""World size and seed of the runs of a right script."""
LIBRARY = "accelerate"  # of the script `libraries`, and of its faults
PAGE = HERE / "RESULTS.md"
SLOW = ("watch.collectives.match", "watch.run.goes-on", "watch.run.ends")


def try_right(script: str) -> list[str]:
    """Return a word for each run of a right script: what was found, or that it was left alone."""
    words = []
    for world, seed in RUNS:
        asked = ("--steps", "4", "--seed", str(seed))
        seen = run(find(script), world, *asked, options=("--replay", "2"))
        bare = run(find(script), world, *asked, is_watched=False)
        same = seen.fingerprints == bare.fingerprints and len(bare.fingerprints) == world
        alone = same and not seen.verdict.causes and seen.status == bare.status == 0
        found = ", ".join(cause.finding.norm for cause in seen.verdict.causes)
        words.append("left alone" if alone else found or "other bits")
    return words


def try_fault(fault: Fault) -> Outcome:
    """Return what the watcher says of a fault."""
    with tempfile.TemporaryDirectory() as folder:
        script = write_fault(fault, Path(folder))
        options = ["--replay", "2", "--patience", "3"]
        # Else the other ranks wait for the backend's time-out.
        options += ["--fail-fast"] * (fault.check in SLOW)
        return run(script, 2, "--steps", str(fault.steps), options=options)


def fault_row(fault: Fault, outcome: Outcome) -> str:
    """Return the row of a fault: whether it was told, and what was said first."""
    first = outcome.verdict.causes[0].finding if outcome.verdict.causes else None
    said = fault.missed or "nothing"
    said = f"{first.norm}: {' '.join(first.text.split())[:180]}" if first else said
    step = str(first.step) if first else ""
    is_told = bool({fault.check, *fault.also} & {*outcome.norms})
    word = ("yes" if is_told else "no") + " (spare)" * fault.spare
    return f"| [{fault.id}]({fault.link}) | {word} | {step} | {said} |"


def rows_of(text: str) -> dict[str, str]:
    """Return name to row of a page, of scripts and of faults."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return {row.split("|")[1].partition("]")[0].strip(" ["): row for row in rows}


def summary(rows: dict[str, str]) -> tuple[str, bool]:
    """Return the totals in words, and whether they are good enough."""
    runs = [each for name in SCRIPTS if name in rows for each in rows[name].split("|")[2:-1]]
    accused = sum(each.strip() != "left alone" for each in runs)
    counted = [rows[fault.id] for fault in faults() if fault.id in rows and not fault.spare]
    told = sum("| yes |" in row for row in counted)
    words = f"{len(runs) // len(RUNS)} right scripts, {len(runs)} runs: {accused} accused. "
    return f"{words}{told} of {len(counted)} faults told.", not accused and told >= 0.9 * len(
        counted
    )


def page(rows: dict[str, str]) -> str:
    """RESULTS.md."""
    runs = [f"{world} rank{'s' * (world > 1)}, seed {seed}" for world, seed in RUNS]
    table = [f"| script | {' | '.join(runs)} |", "|---" * (len(RUNS) + 1) + "|"]
    table += [rows[name] for name in SCRIPTS if name in rows]
    table += ["", "| fault | told | step | what was said |", "|---|---|---|---|"]
    table += [rows[fault.id] for fault in faults() if fault.id in rows]
    return "\n".join([*_HEAD, summary(rows)[0], "", *table]) + "\n"


def main() -> int:
    """Run all; 0 if no right script was accused and nine faults of ten were told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="glob over scripts and faults")
    only = parser.parse_args().only
    rows = rows_of(PAGE.read_text(encoding="utf-8"))
    has_libraries = importlib.util.find_spec(LIBRARY) is not None
    for name in fnmatch.filter(SCRIPTS, only):
        if has_libraries or name != "libraries":
            rows[name] = f"| {name} | {' | '.join(try_right(name))} |"
            print(rows[name], flush=True)
    for fault in faults():
        if fnmatch.fnmatch(fault.id, only) and (has_libraries or not fault.needs):
            rows[fault.id] = fault_row(fault, try_fault(fault))
            print(rows[fault.id], flush=True)
    if not has_libraries:
        print(f"rows that need {LIBRARY}, which is not installed, stay as they are")
    words, is_good = summary(rows)
    print(words)
    PAGE.write_text(page(rows), encoding="utf-8")
    return int(not is_good)


_HEAD = (
    "# Watched scripts",
    "",
    "Written by `python -m spec_tests.tests.rig.watched`. Each fault is a change of one or two",
    "lines of a right script, after a public thread (the link); it was written by somebody who had",
    "not seen the watcher. Spare ones are not counted: a watcher cannot know them, or they repeat",
    "another.",
    "",
)


if __name__ == "__main__":
    raise SystemExit(main())

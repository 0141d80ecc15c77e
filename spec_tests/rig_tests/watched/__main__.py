"""Try the watcher on every script and every fault, and write what it said to RESULTS.md.

    python -m spec_tests.rig_tests.watched                 all: about three minutes
    python -m spec_tests.rig_tests.watched --only 'gan*'   some; nothing is written

A right script is run at 1, 2 and 3 ranks, with two seeds at 2, with the watcher and without it:
nothing may be found, and the bits must be the same. A fault should be told within two steps.
"""

from __future__ import annotations

import argparse
import fnmatch
import tempfile
from pathlib import Path

from spec_tests.rig_tests.watched import HERE, SCRIPTS, Fault, faults, find, write_fault
from spec_tests.rig_tests.watched.trial import Outcome, run

RUNS = ((1, 0), (2, 0), (2, 1), (3, 0))
"""World size and seed of the runs of a right script."""
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
        return run(script, fault.world, "--steps", str(fault.steps), options=options)


def main() -> int:
    """Run all; 0 if no right script was accused and 36 faults of 40 were told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="glob over scripts and faults")
    only = parser.parse_args().only
    scripts = [name for name in SCRIPTS if fnmatch.fnmatch(name, only)]
    chosen = [fault for fault in faults() if fnmatch.fnmatch(fault.id, only)]
    rows = [
        "| script | " + " | ".join(f"{w} rank{'s' * (w > 1)}, seed {s}" for w, s in RUNS) + " |"
    ]
    rows.append("|---" * (len(RUNS) + 1) + "|")
    accused = 0
    for name in scripts:
        words = try_right(name)
        accused += sum(word != "left alone" for word in words)
        rows.append(f"| {name} | {' | '.join(words)} |")
        print(rows[-1], flush=True)
    told, lines = 0, ["| fault | told | step | what was said |", "|---|---|---|---|"]
    for fault in chosen:
        outcome = try_fault(fault)
        is_told = bool({fault.check, *fault.also} & {*outcome.norms})
        first = outcome.verdict.causes[0].finding if outcome.verdict.causes else None
        told += is_told and not fault.spare
        said = fault.missed or "nothing"
        said = f"{first.norm}: {' '.join(first.text.split())[:180]}" if first else said
        step = str(first.step) if first else ""
        word = ("yes" if is_told else "no") + " (spare)" * fault.spare
        lines.append(f"| [{fault.id}]({fault.link}) | {word} | {step} | {said} |")
        print(lines[-1], flush=True)
    counted = sum(not fault.spare for fault in chosen)
    summary = (
        f"{len(scripts)} right scripts, {len(scripts) * len(RUNS)} runs: {accused} accused. "
        f"{told} of {counted} faults told."
    )
    print(summary)
    if only == "*":
        text = "\n".join([*_HEAD, summary, "", *rows, "", *lines])
        (HERE / "RESULTS.md").write_text(text + "\n", encoding="utf-8")
    return int(accused > 0 or told < 0.9 * counted)


_HEAD = (
    "# Watched scripts",
    "",
    "Written by `python -m spec_tests.rig_tests.watched`. Each fault is one or two changed lines "
    "in",
    "a right script, after a public thread (the link); it was written by somebody who had not seen",
    "the watcher. Spare ones are not counted: a watcher cannot know them, or they repeat another.",
    "",
)


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m spec_tests league`: the table of the libraries that were judged, written from files.

    python -m spec_tests --impl NAME --level production --report DIR   # where NAME is installed
    python -m spec_tests league --take DIR                             # keep the result
    python -m spec_tests league [--check]                              # write LEAGUE.md, or compare

LEAGUE.md is made of `results/NAME.json`, what a run came to; `NAME.toml`, why clauses fail; and
`findings/NAME.toml`, the bugs, each with a script. A failed clause is a bug's where a finding names
it, or where the entry refers to one that does; the inherited deviations are PyTorch's; what is left
are choices.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

from spec_tests.impls import LEAGUE, findings
from spec_tests.rig.judge import expectations
from spec_tests.rig.target import PACKAGE_ROOT

FOLDER = PACKAGE_ROOT / "impls"
PATH = FOLDER / "LEAGUE.md"
RESULTS = FOLDER / "results"
_FAILURES = {"failed", "hang", "died", "expected_failure"}
_HEAD = """# The league

Libraries judged through [the contract](../contract), at level `production`, on a CPU with gloo
ranks. *Judged* counts the MUST clauses for what the library offers, *passed* those that hold. Each
other clause was decided by reading the library. *PyTorch's* are deviations of the wrappers that it
is built on, *choices* are documented or deliberate, or concern unequal ranks, where the library
requires equal ones. Each has its reason in the TOML file.
A *bug* has a script that needs the library alone and exits with 1 while the bug is there:
`trainspec repro --finding NAME DIR` writes it. Some bugs fail several clauses, some none. Reading
the files of `token_loader` is the adapters' own part.
`python -m spec_tests league` writes this page.

| library | version | torch | judged | passed | PyTorch's | choices | bugs | judged on |
|---|---|---|---|---|---|---|---|---|
"""


def take(directory: Path) -> Path:
    """Keep what the report of one implementation says, and return the file."""
    report = json.loads((directory / "report.json").read_text(encoding="utf-8"))
    [judged] = report["implementations"]
    name = judged["name"]
    levels = judged["levels"].values()
    package = LEAGUE[name][1] if name in LEAGUE else "torch"
    result = {
        "version": importlib.metadata.version(package).partition("+")[0],
        "torch": report["run"]["torch"].partition("+")[0],
        "date": report["run"]["started"][:10],
        "judged": sum(level["judged"] for level in levels),
        "passed": sum(level["passed"] for level in levels),
        "failed": sorted(
            clause["id"]
            for clause in report["clauses"]
            if clause["strength"] == "MUST"
            and {case["outcome"] for case in clause["cells"][name]["cases"]} & _FAILURES
        ),
    }
    (path := RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return path


def sorted_out(name: str, failed: list[str]) -> dict[str, list[str]]:
    """The failed clauses, by what each comes from: "inherited", "choices" or "bugs"."""
    entries = expectations.load(FOLDER / f"{name}.toml")
    shown = set().union(*(finding.clauses for finding in findings.of(name)))
    found: dict[str, list[str]] = {"inherited": [], "choices": [], "bugs": []}
    for clause in failed:
        own = [entry for entry in entries if entry.clause == clause and not entry.is_inherited]
        reasons = {entry.reason for entry in entries if entry.clause in shown}
        is_shown = any(
            clause in shown or entry.reason in reasons or any(id in entry.reason for id in shown)
            for entry in own
        )
        found["bugs" if is_shown else "choices" if own else "inherited"].append(clause)
    return found


def render() -> str:
    """LEAGUE.md."""
    rows, told = [], []
    for path in sorted(RESULTS.glob("*.json")):
        name, bugs = path.stem, findings.of(path.stem)
        rows.append(_row(name, json.loads(path.read_text()), len(bugs)))
        if bugs and name != "torch":
            told.append(f"\n## {name}\n\n" + "".join(_line(bug) for bug in bugs))
    note = "\nPyTorch's bugs are in [`findings/torch.toml`](findings/torch.toml).\n"
    return _HEAD + "".join(rows) + note + "".join(told)


def _row(name: str, result: dict[str, Any], num_bugs: int) -> str:
    kinds = sorted_out(name, result["failed"])
    counted = [result[key] for key in ("version", "torch", "judged", "passed")]
    counted += [len(kinds["inherited"]), len(kinds["choices"]), num_bugs, result["date"]]
    return f"| [{name}]({name}.py) | " + " | ".join(map(str, counted)) + " |\n"


def _line(bug: findings.Finding) -> str:
    file = f"findings/{bug.owner}.toml"
    known = re.sub(r"(https://\S*[\w/])", r"<\1>", bug.entry.get("known", "none found"))
    return f"- {bug.entry['what'].strip()} [`{bug.name}`]({file}). Known: {known.strip()}\n"


def main(arguments: list[str]) -> int:
    """Write the page, or keep a result; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests league", description=__doc__)
    parser.add_argument("--take", type=Path, metavar="DIR", help="keep the result of this report")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if stale")
    flags = parser.parse_args(arguments)
    if flags.take is not None:
        print(f"wrote {take(flags.take)}")
        return 0
    is_stale = not PATH.is_file() or PATH.read_text(encoding="utf-8") != render()
    if is_stale and not flags.check:
        PATH.write_text(render(), encoding="utf-8")
    print("stale: run it without --check" if flags.check and is_stale else PATH)
    return int(flags.check and is_stale)

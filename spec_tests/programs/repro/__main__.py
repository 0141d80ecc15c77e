"""Write a script that shows one finding with torch and the judged file alone.

    python -m spec_tests repro --impl mine.py --clause ddp.gradients.mean DIR
    python -m spec_tests repro --finding 'fsdp_lifecycle_*' DIR

Of findings in PyTorch or a library (`impls/findings`) the second writes the scripts that its
maintainers can run; '*' writes all of them. Of code of yours the clause is judged first. Where it
fails, scripts for its situation are written and run, the simplest first, and the first that shows
the fault is kept as DIR/CLAUSE.py. `python CLAUSE.py` exits with 1 where the fault holds and with 0
once it is mended.

Exit status: 0 a script was written; 2 none was, and the words say why.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from spec_tests.impls import parse
from spec_tests.programs.repro import findings
from spec_tests.programs.repro.script import head_of, written
from spec_tests.programs.repro.situations import recipes_of
from spec_tests.rig import ledger
from spec_tests.rig.clause import Clause
from spec_tests.rig.outcomes import Event
from spec_tests.rig.report.eventlog import read_log
from spec_tests.rig.target import REPOSITORY_ROOT, Target

SECONDS = 90
FAULTS = ("failed", "hang", "died", "expected_failure")


class NothingToWriteError(Exception):
    """Why there is no script, for the user."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 0 if a script was written."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests repro", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--impl", help="a file, a package or a module")
    what.add_argument("--finding", help="the name of a known finding, or a pattern of names")
    parser.add_argument("--clause", help="the id of one clause, for --impl")
    parser.add_argument("directory", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    if options.impl and not options.clause:
        parser.error("expected --clause ID beside --impl, got none")
    try:
        if options.finding:
            print(*findings.write(options.finding, options.directory), sep="\n")
            return 0
        place = _write(options.impl, options.clause, options.directory)
    except (NothingToWriteError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"\nwrote {place}; show it again with\n\n    python {place}")
    return 0


def _write(impl: str, id: str, directory: Path) -> Path:
    clauses = {clause.id: clause for clause in ledger.load_all()}
    if id not in clauses:
        near = difflib.get_close_matches(id, clauses, 3)
        raise NothingToWriteError(
            f"expected the id of one clause, got {id!r}; near it: {', '.join(near) or 'none'}"
        )
    clause, (name, file) = clauses[id], _file_of(parse(impl))
    subject = next(iter((*clause.judges, *clause.needs)), "")
    is_program = ".programs." in id
    if not is_program and next(recipes_of(id, subject, 2, _situation_of(clause)), None) is None:
        raise NothingToWriteError(
            f"no script for {id}: no template builds its situation, which is in {clause.where}"
        )
    place = directory / f"{re_named(id)}.py"
    if place.exists():
        raise NothingToWriteError(
            f"expected to write {place}, but there is something of that name already; nothing was "
            "changed. Give another folder, or move it away"
        )
    found = _finding(impl, id)
    named = sorted(clause.judges, key=len, reverse=True)
    subject = next((s for s in named if found["case"].startswith(s)), subject)
    tried = 0
    situation = _situation_of(clause, found["case"])
    if is_program:
        given = re.search(r"^given: (.*)", found["message"], re.MULTILINE)
        situation = given[1].partition(f", {found['case']}, ")[0] if given else ""
        if situation.startswith("the ordinary case"):
            raise NothingToWriteError(f"no script: what failed is {situation}\n{found['message']}")
    for recipe in recipes_of(id, subject, found["world_size"] or 1, situation):
        text = written(recipe, head_of(clause.sentence, id, found["message"]), name, file)
        status, said = _run(text)
        if status == 1:
            directory.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
            print(said.strip())
            return place
        tried += 1
    raise NothingToWriteError(
        f"no small script shows this finding: {tried} tried, none exited with 1; the clause needs "
        f"the situation of {clause.where}:\n{found['message']}"
    )


def _situation_of(clause: Clause, case: str = "") -> str:
    """Return the situation of a case of a clause, of any case without `case`; "" where none has."""
    cases = (each for each in clause.cases() if case in ("", clause.label(each)))
    return next((each["situation"] for each in cases if "situation" in each), "")


def re_named(id: str) -> str:
    """Return the file name of a clause."""
    return id.replace(".", "_").replace("-", "_")


def _file_of(target: Target) -> tuple[str, Path]:
    """Return the name under which the judged code is imported, and its file.

    Raises:
        NothingToWriteError: it is not one file, package or module of the user's.
    """
    kind = (
        "an impostor" if target.impostor else f"the layout {target.layout}" if target.layout else ""
    )
    if not kind and target.path is not None:
        is_package = target.path.is_dir()
        return target.module, target.path / "__init__.py" if is_package else target.path
    if not kind and not target.module.startswith("spec_tests"):
        spec = importlib.util.find_spec(target.module)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            return target.module, Path(spec.origin)
    raise NothingToWriteError(
        f"--impl {target.name}: a script needs a file, a package or a module of yours, got "
        f"{kind or 'a part of this suite'}, which does not run without the suite"
    )


def _finding(impl: str, id: str) -> Event:
    """Judge the clause and return its first failed case.

    Raises:
        NothingToWriteError: it passes, is not offered, or cannot be judged.
    """
    with tempfile.TemporaryDirectory(prefix="trainspec-") as folder:
        command = [sys.executable, "-m", "spec_tests", "--impl", impl, "--clause", id]
        command += ["--level", "production", "--report", folder]
        path = os.pathsep.join(filter(None, [str(REPOSITORY_ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        log = Path(folder) / "events.jsonl"
        events = read_log(log) if log.is_file() else []
    results = [e for e in events if e["event"] == "result" and e["clause"] == id]
    for result in results:
        if result["outcome"] in FAULTS:
            return result
    outcomes = {result["outcome"] for result in results}
    if "passed" in outcomes:
        raise NothingToWriteError(f"nothing to show: {impl} passes {id}")
    said = ", ".join(sorted(outcomes)) or f"no result\n{ended.stdout[-2000:]}{ended.stderr[-500:]}"
    raise NothingToWriteError(f"nothing to show: {id} could not be judged on {impl}: {said}")


def _run(text: str) -> tuple[int, str]:
    """Run a script as its user will; return its exit status and what it printed."""
    with tempfile.TemporaryDirectory(prefix="trainspec-") as folder:
        script = Path(folder) / "script.py"
        script.write_text(text, encoding="utf-8")
        try:
            ended = subprocess.run(
                [sys.executable, script],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 2, f"no end within {SECONDS} s"
    if ended.returncode == 1 and "Traceback" in ended.stderr.partition("Process ")[0]:
        return 2, ended.stderr  # an error of the script is also status 1
    return ended.returncode, ended.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

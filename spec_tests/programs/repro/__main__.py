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
import contextlib
import difflib
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_tests.impls import parse
from spec_tests.programs.repro import findings
from spec_tests.programs.repro.script import head_of, written
from spec_tests.programs.repro.situations import recipes_of
from spec_tests.rig import ledger, strategies
from spec_tests.rig.clause import Clause
from spec_tests.rig.judge.runner import run_case
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.ranks.zygote import start_zygote
from spec_tests.rig.target import Target

SECONDS = 90
FAULTS = (Outcome.FAILED, Outcome.HANG, Outcome.DIED)


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
    clause, target = clauses[id], parse(impl)
    name, file = _file_of(target)
    subject = next(iter((*clause.judges, *clause.needs)), "")
    is_program = ".programs." in id
    situation = next(clause.cases(), {}).get("situation", "")
    if not is_program and next(recipes_of(id, subject, 2, situation), None) is None:
        raise NothingToWriteError(
            f"no script for {id}: no template builds its situation, which is in {clause.where}"
        )
    place = directory / f"{re.sub('[.-]', '_', id)}.py"
    if place.exists():
        raise NothingToWriteError(
            f"expected to write {place}, but there is something of that name already; nothing was "
            "changed. Give another folder, or move it away"
        )
    case, message = _finding(target, clause)
    subject, situation, tried = case.get("subject", subject), case.get("situation", ""), 0
    if is_program:
        given = re.search(r"^given: (.*)", message, re.MULTILINE)
        situation = given[1].partition(f", {clause.label(case)}, ")[0] if given else ""
        if situation.startswith("the ordinary case"):
            raise NothingToWriteError(f"no script: what failed is {situation}\n{message}")
    for recipe in recipes_of(id, subject, case["world"], situation):
        text = written(recipe, head_of(clause.sentence, id, message), name, file)
        status, said = _run(text)
        if status == 1:
            directory.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
            print(said.strip())
            return place
        tried += 1
    raise NothingToWriteError(
        f"no small script shows this finding: {tried} tried, none exited with 1; the clause needs "
        f"the situation of {clause.where}:\n{message}"
    )


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


def _finding(target: Target, clause: Clause) -> tuple[dict[str, Any], str]:
    """Judge the clause and return its first failed case, and the message.

    Raises:
        NothingToWriteError: it passes, is not offered, or cannot be judged.
    """
    start_zygote()
    strategies.register_profiles()
    seen = {}
    with contextlib.closing(Worlds()) as worlds, strategies.profile("quick"):
        for case in clause.cases():
            found = run_case(clause, target, case, worlds)
            if found.outcome in FAULTS:
                return case, found.message
            seen[found.outcome] = found.message
    if Outcome.PASSED in seen:
        raise NothingToWriteError(f"nothing to show: {target.name} passes {clause.id}")
    said = "; ".join(f"{outcome}\n{message}" for outcome, message in seen.items())
    raise NothingToWriteError(
        f"nothing to show: {clause.id} could not be judged on {target.name}: {said}"
    )


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

"""Training scripts that are right, and faults in them, for the tests of `trainspec watch`.

`SCRIPTS` are the right ones: `torchrun --nproc-per-node=W script.py --steps N --seed S`, or plain
`python script.py`, which is one rank. At its end each rank prints `fingerprint <rank> <sha256>`:
see `frame.py`, which the scripts import as a file beside them.
`faults.toml` holds changes of one or two lines; each is a mistake that a public thread tells of.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spec_tests.tests.rig.watched.small import small

HERE = Path(__file__).parent
_OURS = ("__init__", "__main__", "frame", "small", "trial")
SCRIPTS = tuple(sorted(path.stem for path in HERE.glob("*.py") if path.stem not in _OURS))


@dataclass(frozen=True)
class Fault:
    """A change to one script, and what a watcher should report of it.

    The text `find` is replaced by `replace`; `edits` are several such pairs. `check` is the
    check that should report the fault, `also` are checks that may report what follows from it.
    `says` is a tensor's name or a part of a line that the report should name, if any. `replay` is
    true where only a replay of values can show the fault. `needs` is a library that the script
    must find. `spare` faults are not among the forty. `missed` is why a watcher cannot tell one.
    """

    id: str
    script: str
    check: str
    story: str
    link: str
    find: str = ""
    replace: str = ""
    edits: Sequence[dict[str, str]] = ()
    also: Sequence[str] = ()
    world: int = 2
    steps: int = 4
    replay: bool = False
    spare: bool = False
    says: str = ""
    seen: str = ""
    needs: str = ""
    missed: str = ""


def find(script: str) -> Path:
    """Return the file of a script."""
    return HERE / f"{script}.py"


def told_by() -> dict[str, list[str]]:
    """Return norm to the faults that it is to report; where it has none, to small scripts."""
    found: dict[str, list[str]] = {}
    for fault in faults():
        found.setdefault(fault.check, []).append(fault.id)
    scripts: dict[str, list[str]] = {}
    for case in small():
        for norm in {*case.must, *case.should} - found.keys():
            scripts.setdefault(norm, []).append(case.id)
    return found | scripts


def faults() -> list[Fault]:
    """Return the faults of `faults.toml`, in its order; the forty and the spare ones."""
    return [Fault(**entry) for entry in tomllib.loads((HERE / "faults.toml").read_text())["fault"]]


def write_fault(fault: Fault, directory: Path) -> Path:
    """Write the changed script, and what it imports, to `directory`; return its path.

    Raises:
        ValueError: a text that is to be replaced is not in the script exactly once.
    """
    text = find(fault.script).read_text()
    for edit in fault.edits or [{"find": fault.find, "replace": fault.replace}]:
        if text.count(edit["find"]) != 1:
            raise ValueError(f"{fault.id}: not found once: {edit['find']!r}")
        text = text.replace(edit["find"], edit["replace"])
    path = directory / f"{fault.script}.py"
    path.write_text(text)
    shutil.copy(find("frame"), directory)
    return path

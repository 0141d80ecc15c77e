"""From a finding to a script that runs alone, for those who maintain what is at fault.

`impls/torch_repros` and `impls/league_repros` hold a file for each fault: a head that says what is
expected, what is got, since when and where it is known; and the few lines that show it. They define

    EXPECTED and observe(rank)    what the ranks are to get, and what a rank gets
    observe(rank) alone           returns what is expected and what is got
    RIGHT and step(rank)          how a step may end, for faults that hang or end a process
    main()                        without ranks: prints both, and returns 1 if they differ

The frame around them is the same for all and added here: processes, a store, an exit status. A
finding that needs a frame of its own is a whole script.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from spec_tests.rig.repro.script import TEMPLATES, kept
from spec_tests.rig.target import PACKAGE_ROOT

FOLDERS = (PACKAGE_ROOT / "impls" / "torch_repros", PACKAGE_ROOT / "impls" / "league_repros")


def named(pattern: str) -> list[Path]:
    """Return the findings whose names match a pattern.

    Raises:
        ValueError: There is none.
    """
    every = [path for folder in FOLDERS for path in sorted(folder.glob("*.py"))]
    if found := [path for path in every if fnmatch(path.stem, pattern)]:
        return found
    names = "\n".join(f"    {path.stem}" for path in every)
    raise ValueError(f"expected the name of a finding, got {pattern!r}; there are\n{names}")


def whole(finding: Path) -> str:
    """Return the script: the finding in its frame."""
    text = finding.read_text(encoding="utf-8")
    if "__main__" in text:
        return text
    frame = kept((TEMPLATES / "finding.txt").read_text(encoding="utf-8"), _kind(text))
    (head, ours, body), (_, theirs, end) = _parts(text), _parts(frame)
    imports = _sorted({*ours, *theirs})
    return f"{head}\n\n{imports}\n\n{body}\n\n\n{end}\n".lstrip()


def write(pattern: str, directory: Path) -> list[Path]:
    """Write the scripts of the findings whose names match, and return their paths.

    Raises:
        ValueError: There is no such finding, or a file of that name exists already.
    """
    scripts = {directory / path.name: whole(path) for path in named(pattern)}
    if taken := [str(path) for path in scripts if path.exists()]:
        raise ValueError(f"expected to write {', '.join(taken)}, which exist; nothing was changed")
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in scripts.items():
        path.write_text(text, encoding="utf-8")
    return [*scripts]


def _kind(text: str) -> frozenset[str]:
    """Return which frame a finding needs, by what it defines."""
    defined = re.findall(r"^(?:def )?(\w+)(?: =|\()", text, flags=re.MULTILINE)
    kinds = {"main": "alone", "step": "ends", "EXPECTED": "ranks", "observe": "pairs"}
    return frozenset({next(kind for name, kind in kinds.items() if name in defined)})


def _parts(text: str) -> tuple[str, list[str], str]:
    """Return docstring, imports and the rest of a file that has them in this order."""
    lines, head, last = text.splitlines(), 0, 0
    imports = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(ast.unparse(node))
            last = node.end_lineno or 0
        elif isinstance(node, ast.Expr) and not imports:
            head = last = node.end_lineno or 0
    return "\n".join(lines[:head]), imports, "\n".join(lines[last:]).strip("\n")


def _sorted(imports: Iterable[str]) -> str:
    """Return import lines in two groups, the standard library's first."""

    def order(line: str) -> tuple[bool, bool, str]:
        kind, module, *_ = line.split()
        is_standard = module.partition(".")[0] in sys.stdlib_module_names
        return not is_standard, kind == "from", module

    groups: dict[bool, list[str]] = {}
    for line in sorted(imports, key=order):
        groups.setdefault(order(line)[0], []).append(line)
    return "\n\n".join("\n".join(group) for group in groups.values())

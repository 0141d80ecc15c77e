"""From a recipe to the text of a script."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import torch

from spec_tests.rig.repro.recipes import FOLDER, Recipe

TEMPLATES = FOLDER / "templates"
WIDTH, LINES = 98, 80
_MARK = re.compile(r"^(.*?)  # only: ([\w -]+)$")


def written(recipe: Recipe, name: str, file: Path, head: str) -> str:
    """Return the script.

    Args:
        name: under which the judged file is imported.
        file: the judged file, or a package's `__init__.py`.
        head: the docstring.
    """
    body = kept((TEMPLATES / f"{recipe.body}.txt").read_text(encoding="utf-8"), recipe.tags)
    body = body.replace("PROGRAM\n", textwrap.indent(recipe.program, "    ") + "\n")
    body = body.replace("FUNCTION", recipe.subject)
    body = body.replace("@OPTIONS", recipe.settings.get("@OPTIONS", ""))
    alone = ("def ", "class ")
    settings = [f"NAME, FILE = {name!r}, {str(file)!r}"]
    settings += [
        f"{k} = {v}" for k, v in recipe.settings.items() if k[0] != "@" and not v.startswith(alone)
    ]
    settings += [f"\n\n{v.strip()}" for v in recipe.settings.values() if v.startswith(alone)]
    text = kept((TEMPLATES / f"{recipe.frame}.txt").read_text(encoding="utf-8"), recipe.tags)
    text = text.replace("SETTINGS\n", "\n".join(settings) + "\n").replace(
        "BODY\n", body.strip() + "\n"
    )
    text = _with_needed_imports(text).replace("HEAD", head, 1)
    is_long = len(text.splitlines()) > LINES
    return re.sub(r"\n\n(\n|(?=    def))", r"\n\1", text) if is_long else text


def head_of(sentence: str, clause: str, message: str) -> str:
    """Return the docstring of a script: the norm, what was found, versions, how to read the end."""
    found = [line for line in message.splitlines() if line][1:3]
    lines = [sentence, "", *(f"Found: {line}" for line in found)]
    lines += [f"Clause: {clause}; torch {torch.__version__}"]
    lines += [
        "Exit status: 1 where the fault holds, 0 where not, 2 where the file does not load",
        "",
    ]
    safe = (line.replace("\\", "/").replace('"""', "'''") for line in lines)
    return "\n".join(textwrap.shorten(line, WIDTH, placeholder=" ...") for line in safe)


def kept(template: str, tags: frozenset[str]) -> str:
    """Drop marked lines of which no tag is asked for, and the marks of the others."""
    lines = []
    for line in template.splitlines():
        found = _MARK.match(line)
        if found is None or tags & {*found[2].split()}:
            lines.append(found[1] if found else line)
    return "\n".join(lines)


def _with_needed_imports(text: str) -> str:
    """Drop imports of what the script does not use."""
    lines = []
    for line in text.splitlines():
        found = re.match(r"(?:from [\w.]+ )?import ([\w., ]+?)(?: as (\w+))?$", line)
        if found is None:
            lines.append(line)
            continue
        names = [found[2]] if found[2] else found[1].split(", ")
        used = [n for n in names if len(re.findall(rf"(?<!\w){re.escape(n)}\b", text)) > 1]
        if used:
            lines.append(line if found[2] else line.replace(found[1], ", ".join(used)))
    return "\n".join(lines) + "\n"

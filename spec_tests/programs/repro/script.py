"""From a recipe to the text of a script."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

import torch

TEMPLATES = Path(__file__).resolve().parent / "templates"
WIDTH, LONG = 98, 80
_IMPORT = re.compile(r"(?:from [\w.]+ )?import ([\w., ]+?)(?: as (\w+))?$")
_MARK = re.compile(r"^(.*?)  # only: (.+)$")


@dataclass(frozen=True)
class Recipe:
    """One script before it is written.

    Attributes:
        frame, body: names of the templates.
        tags: which of the templates' marked lines are kept.
        settings: names and source of their values; functions and classes stand alone.
        program: source that takes the place of PROGRAM.
        values: what takes the place of the body's $names.
    """

    frame: str
    body: str
    tags: frozenset[str]
    settings: Mapping[str, str]
    program: str = ""
    values: Mapping[str, str] = field(default_factory=dict)


def written(
    recipe: Recipe, head: str, name: str = "", file: Path | None = None, *, is_short: bool = True
) -> str:
    """Return the script.

    Args:
        head: the docstring.
        name: under which the judged file is imported.
        file: the judged file, or a package's `__init__.py`; None where torch is judged.
        is_short: a long script loses blank lines.
    """
    body = Template(_template(recipe.body)).safe_substitute(recipe.values)
    body = kept(body, recipe.tags, recipe.program)
    body = body.replace("PROGRAM\n", textwrap.indent(recipe.program, "    ") + "\n")
    settings = [f"NAME, FILE = {name!r}, {str(file)!r}"] if file else []
    alone = ("def ", "class ")
    sources = recipe.settings.items()
    settings += [f"{k} = {v}" for k, v in sources if not v.startswith(alone)]
    settings += [f"\n\n{v.strip()}" for _, v in sources if v.startswith(alone)]
    text = kept(_template(recipe.frame), recipe.tags)
    text = text.replace("SETTINGS", "\n".join(settings)).replace("BODY", body.strip())
    text = with_needed_imports(text).replace("HEAD", head, 1)
    if is_short and len(text.splitlines()) > LONG:
        text = re.sub(r"\n\n(\n|(?=    def))", r"\n\1", text)
    return text


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


def kept(template: str, tags: frozenset[str], program: str = "") -> str:
    """Drop marked lines that nothing needs, and the marks of the others.

    A mark has words, of which one must be a tag or, if it is a call, in the program; or several
    such lists with `&` between them, all of which must have one.
    """
    lines = []
    for line in template.splitlines():
        found = _MARK.match(line)
        lists = [part.split() for part in found[2].split(" & ")] if found else []
        if all(any(w in tags or (w[-1] in "()." and w in program) for w in part) for part in lists):
            lines.append(found[1] if found else line)
    return "\n".join(lines) + "\n"


def with_needed_imports(text: str) -> str:
    """Drop imports of what the script does not use."""
    lines = text.splitlines()
    found = [_IMPORT.match(line) for line in lines]
    code = "\n".join(line for line, is_import in zip(lines, found, strict=True) if not is_import)
    kept_lines = []
    for line, named in zip(lines, found, strict=True):
        if named is None:
            kept_lines.append(line)
            continue
        names = [named[2]] if named[2] else named[1].split(", ")
        if used := [n for n in names if re.search(rf"(?<![\w.\"']){re.escape(n)}\b", code)]:
            kept_lines.append(line if named[2] else line.replace(named[1], ", ".join(used)))
    return "\n".join(kept_lines) + "\n"


def _template(name: str) -> str:
    return (TEMPLATES / f"{name}.txt").read_text(encoding="utf-8")

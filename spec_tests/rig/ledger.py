"""The ledger: every clause in one list, generated, checked in, and compared by a test.

`python -m spec_tests ledger` writes CLAUSES.md, and the counts on the first screen of README.md.
So a changed promise is a visible diff.
"""

from __future__ import annotations

import hashlib
import html
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from spec_tests.contract.promises import PROMISES, Promise
from spec_tests.rig.clause import REGISTER, Clause
from spec_tests.rig.target import PACKAGE_ROOT

PATH = PACKAGE_ROOT / "CLAUSES.md"
FOLDER = PACKAGE_ROOT / "chapters"
# In the order of a training step, as in design and contract.
CHAPTERS = (
    "data",
    "attention",
    "models",
    "ddp",
    "zero1",
    "fsdp",
    "clip",
    "checkpoint",
    "training",
    "trainer",
    "measure",
)


def chapter_folders(patterns: Sequence[str] = ()) -> list[Path]:
    """The folders that hold clauses; with `patterns` of ids, those that may hold one of these."""
    found = [name for name in CHAPTERS if (FOLDER / name).is_dir()]
    fixed = [re.split(r"[*?[]", pattern)[0] for pattern in patterns]
    pairs = ((name, f"{name}.", prefix) for name in found for prefix in fixed)
    meant = {
        name for name, own, prefix in pairs if own.startswith(prefix) or prefix.startswith(own)
    }
    return [FOLDER / name for name in found if name in meant or not meant]


def load_all() -> list[Clause]:
    """Import every chapter and return all clauses, chapter by chapter, in order of the files."""
    for folder in chapter_folders():
        for file in sorted(folder.glob("test_*.py")):
            importlib.import_module(f"spec_tests.chapters.{folder.name}.{file.stem}")
    return sorted(REGISTER.values(), key=lambda c: (CHAPTERS.index(c.chapter), _place(c)))


def _place(clause: Clause) -> tuple[str, int]:
    file, _, line = clause.where.rpartition(":")
    return file, int(line)


def fingerprint(clauses: Iterable[Clause]) -> str:
    """Twelve hex digits that change when a norm is added, removed or reworded."""
    text = "\n".join(sorted(f"{c.id}|{c.strength}|{c.level}|{c.sentence}" for c in clauses))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def render(
    clauses: Sequence[Clause],
    rejected_by: Mapping[str, Sequence[str]],
    watched: Sequence[Clause] = (),
    formerly: Mapping[str, str] | None = None,
) -> str:
    """Return the ledger as Markdown: clauses by the promise that they judge, one a line.

    Args:
        rejected_by: clause id to the impostors that it rejects, or the faulty scripts.
        watched: the norms of a script that runs, which are no clauses of an implementation.
        formerly: former clause id to the seed that took its place.
    """
    from spec_tests.rig.report.templates import of_texts  # here: the plugin needs none

    chapters = {
        name: list(group) for name, group in groupby([*clauses, *watched], key=lambda c: c.chapter)
    }
    template = of_texts(Path(__file__).parent).get_template("clauses.md.jinja")
    return template.render(
        clauses=clauses,
        formerly=formerly,
        watched=watched,
        chapters=chapters,
        by_function=_by_function,
        by_aspect=_by_aspect,
        facts=lambda clause: _facts(clause, rejected_by.get(clause.id, ())),
    )


def _by_function(chapter: Sequence[Clause]) -> list[tuple[str, list[Promise]]]:
    """Return the promises that a chapter's clauses judge, by the function that makes them."""
    named = {id for clause in chapter for id in clause.promises}
    promises = [promise for promise in PROMISES.values() if promise.id in named]
    return [(of, list(group)) for of, group in groupby(promises, key=lambda p: p.function)]


def _by_aspect(chapter: Sequence[Clause]) -> dict[str, list[Clause]]:
    """Return the clauses that judge no promise, by the second word of their ids."""
    found: dict[str, list[Clause]] = {}
    for clause in chapter:
        if not clause.promises:
            found.setdefault(clause.id.split(".")[1], []).append(clause)
    return found


def told(clause: Clause, stories: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return what a log records about a clause in addition to its results.

    Args:
        stories: of the impostors that it rejects.
    """
    return {
        "sentence": clause.sentence,
        "source": clause.source,
        "where": clause.where,
        "stories": list(stories),
    }


def with_counts(readme: str, clauses: Sequence[Clause], near_misses: int, benign: int) -> str:
    """Return README's text with its counts of clauses and impostors updated."""
    must = sum(clause.strength == "MUST" for clause in clauses)
    for pattern, claim in (
        (
            r"\*\*\S+ clauses\*\* \(\S+ of them MUST\)",
            f"**{len(clauses)} clauses** ({must} of them MUST)",
        ),
        (r"\*\*\S+ impostors\*\*", f"**{near_misses} impostors**"),
        (r"\S+ unusual but right", f"{benign} unusual but right"),
    ):
        readme = re.sub(pattern, claim, readme)
    return readme


def _facts(clause: Clause, impostors: Sequence[str]) -> list[str]:
    """Return what is folded behind a clause's sentence."""
    judged = " or ".join(f"<code>{name}</code>" for name in clause.judges)
    needs = ", ".join(f"<code>{name}</code>" for name in clause.needs)
    teeth = ", ".join(f"<code>{name}</code>" for name in impostors)
    # No line: every change above it would make the page stale. The id is a word of the file.
    file = clause.where.removeprefix("spec_tests/").partition(":")[0]
    facts = (
        f"judges {judged}" if judged else "",
        f"needs {needs}" if needs else "",
        f"worlds {', '.join(map(str, clause.worlds))}",
        html.escape(clause.source, quote=False),
        f"rejects {teeth}" if teeth else f"no impostor: {html.escape(clause.no_impostor)}",
        f'<a href="{file}">{file}</a>',
    )
    return [fact for fact in facts if fact]

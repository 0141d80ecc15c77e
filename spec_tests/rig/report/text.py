"""A log as text: tables, counts, and summary.md. `ending.py` is what a terminal shows of it.

Every function here is pure: events in, text out.

- `render_table` groups clauses by level and chapter, `course` first: that is what a student owes.
  One column per implementation. It is a Markdown table with aligned columns, so the terminal and a
  pull request show the same text. Cells are words, never colours: "pass", "FAIL (2 of 12 cases)".
- `render_counts` is the line under a column: `MUST 38/40 · SHOULD 9/12 · not offered 3`. What is
  not offered or not here is in no denominator, and an expected failure is in no numerator.
- `render_summary` is the whole page: verdict, machine, counts, table, every failure with its
  message and the line to run it again.
- A log without footer is stamped INCOMPLETE by each of them and has no verdict.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from spec_tests.rig.outcomes import (
    BROKEN,
    LEVELS,
    REFUTED,
    SILENT,
    Cell,
    Event,
    Outcome,
    Strength,
    cells,
    header,
    is_complete,
    level_of,
    results,
    verdict,
)
from spec_tests.rig.ranks.errors import NOT_HERE
from spec_tests.rig.report.causes import FRAME, causes, is_own
from spec_tests.rig.report.templates import of_texts

WORDS = {
    Outcome.PASSED: "pass",
    Outcome.FAILED: "FAIL",
    Outcome.HANG: "HANG",
    Outcome.DIED: "DIED",
    Outcome.ERROR: "ERROR",
    Outcome.BLOCKED: "blocked",
    Outcome.EXPECTED_FAILURE: "expected",
    Outcome.UNEXPECTED_PASS: "UNEXPECTED PASS",
    Outcome.NOT_OFFERED: "not offered",
    Outcome.NOT_HERE: "not here",
    Outcome.SKIPPED: "skipped",
}
"""What a cell says. Capitals ask for attention; "expected" is a failure that was declared."""

INCOMPLETE = "INCOMPLETE: the log has no footer, so the run did not reach its end. No verdict."

RUN_KEYS = (
    *("suite", "ledger", "level", "levels", "transport", "profile", "seed", "torch", "python"),
    *("hypothesis", "platform", "cores", "notices", "started", "command"),
)
"""What the header says of suite, versions and machine."""

_MAX_MESSAGE_LINES = 40


def implementations(events: Sequence[Event]) -> list[str]:
    """The implementations of the header, then any other that has results, in order."""
    named = [str(name) for name in header(events).get("implementations", [])]
    return list(dict.fromkeys([*named, *(event["implementation"] for event in results(events))]))


def chapter(clause: str) -> str:
    """The chapter of a clause: the first word of its id.

    >>> chapter("ddp.gradients.mean")
    'ddp'
    """
    return clause.split(".", 1)[0]


def several(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> several(1, "case"), several(2, "case")
    ('1 case', '2 cases')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def render_cell(cell: Cell | None) -> str:
    """One cell in words, with the number of cases where they differ."""
    if cell is None:
        return ""  # not selected for this implementation: nothing is claimed
    # What says nothing is left out of the count, unless there is nothing else.
    judged = [case for case in cell.cases if case["outcome"] not in SILENT] or list(cell.cases)
    same = len(cell.decisive_cases)
    word = WORDS[cell.outcome]
    return word if same == len(judged) else f"{word} ({same} of {len(judged)} cases)"


def render_table(events: Sequence[Event]) -> str:
    """The table clause by implementation, one block per level and chapter, for a terminal.

    Clauses that no implementation offers anything for are counted in a line below.
    """
    names = implementations(events)
    found = {(cell.clause, cell.implementation): cell for cell in cells(events)}
    judged = {id for (id, _), cell in found.items() if cell.outcome is not Outcome.NOT_OFFERED}
    absent = Counter(chapter(id) for id in dict.fromkeys(id for id, _ in found) if id not in judged)
    found = {key: cell for key, cell in found.items() if key[0] in judged}
    # Insertion order keeps the order of the run within a block.
    clauses = {clause: cell for (clause, _), cell in found.items()}
    blocks: dict[tuple[int, str], list[list[str]]] = {}
    for clause, cell in clauses.items():
        row = [clause, str(cell.strength)]
        row += [render_cell(found.get((clause, name))) for name in names]
        blocks.setdefault((LEVELS.index(cell.level), chapter(clause)), []).append(row)
    rows = [["clause", "strength", *names]]
    for level, title in sorted(blocks, key=lambda block: block[0]):
        rows.append([f"**{LEVELS[level]}: {title}**", *[""] * (len(names) + 1)])
        rows += blocks[level, title]
    counts = ", ".join(f"{title} {number}" for title, number in absent.items())
    return grid(rows) + (f"\n\nclauses on what is not offered: {counts}" if counts else "")


def count_levels(own: Sequence[Cell]) -> dict[str, tuple[int, int]]:
    """Level to how many of its MUST clauses passed, and how many were judged; lowest first."""
    judged = [cell for cell in own if cell.strength == "MUST" and cell.outcome not in SILENT]
    counted = {}
    for level in LEVELS:
        at = [cell.outcome is Outcome.PASSED for cell in judged if cell.level == level]
        if at:
            counted[level] = (sum(at), len(at))
    return counted


def render_counts(events: Sequence[Event], implementation: str) -> str:
    """The line under one column, counted in clauses: passes over what was judged, then the rest."""
    level, own = level_of(events, implementation), cells(events, implementation)
    within = [cell for cell in own if cell.is_within(level)]
    parts = [
        _ratio(strength, [c for c in within if c.strength == strength]) for strength in Strength
    ]
    parts.append(_ratio(f"above level {level}", [c for c in own if not c.is_within(level)]))
    for outcome in Outcome:
        # Passes stand in the ratios; everything else is named, so that no two kinds are merged.
        number = sum(cell.outcome is outcome for cell in own)
        if number and outcome is not Outcome.PASSED:
            parts.append(f"{outcome.replace('_', ' ')} {number}")
    return " · ".join(part for part in parts if part) or "nothing ran"


def render_summary(events: Sequence[Event]) -> str:
    """The whole page as Markdown."""
    first, names = header(events), implementations(events)
    template = of_texts().get_template("summary.md.jinja")
    return template.render(
        verdict=verdict_lines(events),
        counts={name: render_counts(events, name) for name in names},
        levels={name: count_levels(cells(events, name)) for name in names},
        causes={name: found for name in names if (found := causes(events, name))},
        table=render_table(events),
        failed=[cell for cell in cells(events) if cell.outcome in REFUTED | BROKEN],
        words=WORDS,
        fenced=_fenced,
        absent=absent_here(events),
        run={key: first[key] for key in RUN_KEYS if key in first},
    )


def verdict_lines(events: Sequence[Event]) -> list[str]:
    """The verdict and its reasons, or that there is none."""
    if not is_complete(events):
        return [INCOMPLETE]
    found = verdict(events)
    levels = dict.fromkeys(level_of(events, name) for name in implementations(events))
    return [
        f"{found} (level {', '.join(levels)}; exit status {found.status})",
        *map("- {}".format, found.reasons),
        *map("- notice: {}".format, header(events).get("notices", ())),
    ]


def _ratio(label: str, judged: Sequence[Cell]) -> str:
    asked = [cell for cell in judged if cell.outcome not in SILENT]
    if not asked:
        return ""
    return f"{label} {sum(cell.outcome is Outcome.PASSED for cell in asked)}/{len(asked)}"


def grid(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are padded to one width."""
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    padded = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([padded[0], rule, *padded[1:]])


def absent_here(events: Sequence[Event]) -> list[tuple[str, list[str]]]:
    """Each reason why this machine could not tell, once, with the clauses that it concerns."""
    waiting: dict[str, dict[str, None]] = {}
    for event in results(events):
        if event["outcome"] == Outcome.NOT_HERE:
            lines = event["message"].splitlines() or [""]
            why = next((line for line in lines if line.startswith(NOT_HERE)), lines[0])
            waiting.setdefault(why.removeprefix(NOT_HERE), {})[event["clause"]] = None
    return [(why, list(clauses)) for why, clauses in waiting.items()]


def _fenced(message: str) -> str:
    text = clip(message.rstrip() or "no message", _MAX_MESSAGE_LINES)
    # A fence longer than any run of backticks inside cannot be closed by the message.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return "\n".join([f"{fence}text", *text.splitlines(), fence])


def clip(text: str, limit: int) -> str:
    """Return the text in `limit` lines at most, three or more.

    Where a traceback passes through the judged code, frames of others go first; then the middle.
    """
    lines = text.splitlines()
    if len(lines) <= limit:
        return text
    kept = _without_others(lines)
    if len(kept) > limit:
        half = limit // 2
        kept = [*kept[:half], _GAP, *kept[half + 1 - limit :]]
    number = len(lines) - sum(line != _GAP for line in kept)
    kept[kept.index(_GAP)] = f"... {number} lines left out; the log of a --report has them"
    return "\n".join(kept)


_GAP = "  ..."


def _without_others(lines: Sequence[str]) -> list[str]:
    """Lines without the frames of others' code, if there are own ones; `_GAP` for each stretch."""
    kept: list[str] = []
    depth: int | None = None  # of the frame that is left out
    frames = [FRAME.search(line) for line in lines]
    if not any(is_own(frame[1]) for frame in frames if frame):
        return list(lines)
    for line, frame in zip(lines, frames, strict=True):
        indent = len(line) - len(line.lstrip())
        if frame:
            depth = None if is_own(frame[1]) else indent
        elif depth is not None and indent <= depth:
            depth = None
        if depth is None:
            kept.append(line)
        elif kept[-1:] != [_GAP]:
            kept.append(_GAP)
    return kept

"""What a terminal shows when a run has ended: chapters, verdict, and last the causes.

Functions here are pure: events in, text out. Where people look is the end of the output, so what to
mend stands there, in at most forty lines for each implementation: of each cause what it is, one
finding, the clauses that show it, and the command that shows it alone. Everything else is in the
report, and with `--all` on the terminal: each finding in full, the table clause by implementation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from spec_tests.rig.outcomes import SILENT, Cell, Event, Outcome, Strength, cells
from spec_tests.rig.report import diagnosis
from spec_tests.rig.report.causes import Cause, causes, clipped
from spec_tests.rig.report.symptom import headline_of
from spec_tests.rig.report.text import (
    absent_here,
    chapter,
    count_levels,
    grid,
    implementations,
    render_counts,
    render_table,
    several,
    verdict_lines,
)

MAX_LINES = 40
"""Of causes, for one implementation."""

FEW = 3
"""Failed clauses that are shown in full: who asks for one clause wants its whole message."""

_FINE = (Outcome.PASSED, Outcome.EXPECTED_FAILURE)
_LINES_OF_A_CAUSE = 5


def render_ending(events: Sequence[Event], *, everything: bool = False) -> str:
    """What a run prints at its end; with `everything` each finding and clause, uncut."""
    found = {name: causes(events, name) for name in implementations(events)}
    number = sum(_number(named) for named in found.values())
    in_full = everything or 0 < number <= FEW
    lines = [render_failures(events, all_of=everything), ""] if in_full else _without_cause(events)
    lines += [render_table(events) if everything else render_chapters(events), ""]
    for name in found:
        lines += [
            f"{name}: {render_counts(events, name)}",
            *_render_levels(events, name, None if everything else 3),
        ]
    for why, clauses in absent_here(events):
        lines.append(f"not here, {several(len(clauses), 'clause')}: {why}")
    lines += ["", *_verdict(events, found)]
    for name, named in found.items():
        lines += _render_causes(name, named, everything=everything, in_full=in_full)
    return "\n".join(lines)


def render_chapters(events: Sequence[Event]) -> str:
    """Chapter by implementation: how many of the clauses that were judged hold; MUST alone."""
    names = implementations(events)
    judged: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells(events):
        if cell.outcome not in SILENT and cell.strength == Strength.MUST:
            row = judged.setdefault(chapter(cell.clause), {})
            row.setdefault(cell.implementation, []).append(cell)
    rows = [["chapter", *names]]
    for title, row in judged.items():
        rows.append([title, *(_of(row.get(name, [])) for name in names)])
    return grid(rows)


def _of(judged: Sequence[Cell]) -> str:
    if not judged:
        return ""
    held, expected = (sum(cell.outcome in kinds for cell in judged) for kinds in (_FINE, _FINE[1:]))
    if failed := len(judged) - held:
        return f"FAIL {failed}/{len(judged)}" + (f", {expected} more as declared" * bool(expected))
    return f"pass {held}/{held}" + (f", {expected} of them expected to fail" * bool(expected))


def _render_levels(events: Sequence[Event], implementation: str, at_most: int | None) -> list[str]:
    """How far an implementation has come, the lowest level first, and what it lacks there."""
    own, lines = cells(events, implementation), []
    for level, (passed, of) in count_levels(own).items():
        missing = [
            cell.clause
            for cell in own
            if (cell.level, cell.strength) == (level, Strength.MUST)
            and cell.outcome not in (*SILENT, *_FINE)
        ]
        named = f"; missing: {_enumerated(missing, at_most)}" if missing else ""
        lines.append(f"    {level} {passed}/{of}{named}")
    return lines


def _verdict(events: Sequence[Event], found: dict[str, list[Cause]]) -> list[str]:
    """The verdict; failed clauses are not among its reasons, for they are among the causes."""
    listed = {
        f"- {cause.outcome}: {cause.clause} on {name}"
        for name, named in found.items()
        for each in named
        for cause in each.cells
    }
    return [line for line in verdict_lines(events) if line not in listed]


def _render_causes(
    implementation: str, found: Sequence[Cause], *, everything: bool, in_full: bool
) -> list[str]:
    """What to mend first comes first: the lowest level, then the most frequent.

    Args:
        in_full: each finding was shown above, with the command that shows it again.
    """
    if not found:
        return []
    advice = "; mend the first one first" if len(found) > 1 else ""
    lines = ["", f"{_counted(found, implementation)}{advice}"]
    each = list(zip(_titles(found), found, strict=True))
    if everything:
        whole = (_render_cause(title, cause, None) for title, cause in each)
        return [*lines, *itertools.chain.from_iterable(whole)]
    if in_full:
        named = [(title, *_kind(cause)) for title, cause in each]
        return [*lines, *(line for own in named if found[1:] or own[1:] for line in own)]
    room = MAX_LINES - len(lines)
    most = room // _LINES_OF_A_CAUSE
    for title, cause in each[:most]:
        lines += _render_cause(title, cause)
    rest = each[most:]
    room = MAX_LINES - len(lines)
    shown = rest if len(rest) <= room else rest[: room - 1]
    for title, cause in shown:
        lines.append(clipped(f"{clipped(title, 120)} ({_enumerated(cause.clauses, 1)})", 160))
    if len(shown) < len(rest):
        lines.append(f"and {several(len(rest) - len(shown), 'more line')}: --all, or the report")
    return lines


def _counted(found: Sequence[Cause], implementation: str) -> str:
    """How many causes explain how many clauses, and how much is left unexplained."""
    known = [cause for cause in found if cause.is_explained]
    rest = [cause for cause in found if not cause.is_explained]
    explain = "explains" if len(known) == 1 else "explain"
    failed = f"{several(_number(known or rest), 'failed clause')} of {implementation}"
    findings = f"{several(len(rest), 'finding')} {'is' if len(rest) == 1 else 'are'} not explained"
    if not known:
        return failed if len(rest) == 1 else f"{failed}: {findings}"
    line = f"{several(len(known), 'cause')} {explain} {failed}"
    return f"{line}; {findings} ({several(_number(rest), 'clause')})" if rest else line


def _number(found: Sequence[Cause]) -> int:
    """How many clauses failed; what two functions fail is one clause."""
    return len({clause for cause in found for clause in cause.clauses})


def _titles(found: Sequence[Cause]) -> list[str]:
    """Number and title of each cause; says of the rest that it is not explained, if some are."""
    some, titles = any(cause.is_explained for cause in found), []
    for index, cause in enumerate(found, 1):
        mark = "not explained: " if some and not cause.is_explained else ""
        whole = cause.title.replace(cause.text, _headline(cause)) if _is_headline(cause) else ""
        titles.append(clipped(f"{index:2}  {mark}{whole or cause.title}", 160))
    return titles


def _headline(cause: Cause) -> str:
    return headline_of(cause.first.decisive_cases[0]["message"])


def _is_headline(cause: Cause) -> bool:
    """Whether the cause is the finding itself, which may have been cut."""
    return clipped(_headline(cause)) == cause.text


def _render_cause(title: str, cause: Cause, at_most: int | None = 3) -> list[str]:
    first = cause.first.decisive_cases[0]
    finding = _difference(first) if _is_headline(cause) else _headline(cause)
    return [
        title,
        *([clipped(f"    {finding}", 160)] if finding else []),
        *_kind(cause),
        f"    {cause.first.level}: {_enumerated(cause.clauses, at_most)}",
        f"    again: {first['rerun']}",
    ]


def _kind(cause: Cause) -> list[str]:
    return [clipped(f"    {kind}", 160)] if (kind := kind_of(cause)) else []


def kind_of(cause: Cause) -> str:
    """Of which kind the fault is, or which near-miss fails the same, in a line; "" if unknown."""
    if cause.like:
        return f"like {cause.like}: {diagnosis.does(cause.like)}"
    says = diagnosis.families().says
    kinds = [f"{family}: {says[family]}" for family in cause.families]
    return f"probably {'; or '.join(kinds)}" if kinds else ""


def _difference(first: Event) -> str:
    """The line on the largest error, if there is one."""
    lines = (line for line in first["message"].splitlines() if line.startswith("largest error"))
    return next(lines, "")


def _enumerated(names: Sequence[str], at_most: int | None) -> str:
    more = len(names) - at_most if at_most else 0
    return ", ".join(names[:at_most]) + (f" and {more} more" if more > 0 else "")


def render_failures(events: Sequence[Event], *, all_of: bool = False) -> str:
    """Failed cells in full: one case of each cause, or with `all_of` of each clause."""
    blocks = _without_cause(events)
    for cause in (cause for name in implementations(events) for cause in causes(events, name)):
        for cell in cause.cells if all_of else cause.cells[:1]:
            first, *others = cell.decisive_cases
            text = f"{cell.outcome}: {first['message'].rstrip()}"
            if others:
                named = _enumerated([case["case"] for case in others], None if all_of else 6)
                text += f"\n({several(len(others), 'more case')}: {named})"
                for case in others if all_of else ():
                    found = headline_of(case["message"])
                    if found not in ("", headline_of(first["message"])):
                        text += f"\n{case['case']}: {found}"
            if len(cause.clauses) > 1 and not all_of:
                text += f"\nthe same diagnosis in {', '.join(cause.clauses[1:])}"
            blocks.append(text)
    return "\n\n".join(blocks) or "nothing fails"


def _without_cause(events: Sequence[Event]) -> list[str]:
    """What was not tried, and what passes although it is declared to fail."""
    waiting: dict[tuple[str, ...], list[str]] = {}
    for cell in (cell for cell in cells(events) if cell.outcome is Outcome.BLOCKED):
        why = cell.decisive_cases[0]["message"].strip().split("\n")[1:2]
        waiting.setdefault((cell.implementation, *why), []).append(cell.clause)
    count = "blocked: {} clauses not tried on {}".format
    blocks = ["\n".join([count(len(c), n), *why, ", ".join(c)]) for (n, *why), c in waiting.items()]
    return blocks + [
        f"{cell.outcome}: {cell.decisive_cases[0]['message'].rstrip()}"
        for cell in cells(events)
        if cell.outcome is Outcome.UNEXPECTED_PASS
    ]

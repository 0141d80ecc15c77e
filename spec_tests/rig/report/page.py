"""index.html: a report that a person reads in a browser, in one file that needs no network.

The page is written whole, so that it prints and works without its script: clause by implementation,
grouped by level and chapter, and under each clause its messages, their likely cause, the stories of
the bugs that it catches, its source and the line to run it again. The script adds filters and folds
the details away. Styles and script lie beside this file, and are put into the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from spec_tests.rig.outcomes import BROKEN, LEVELS, REFUTED, SILENT, Event, Outcome
from spec_tests.rig.report.data import Report, as_report
from spec_tests.rig.report.markup import linked, prose
from spec_tests.rig.report.points import got
from spec_tests.rig.report.text import WORDS

LEVEL_TITLES = {
    "course": "what the exercises ask",
    "correct": "what the name promises",
    "production": "what PyTorch offers beyond",
}
_FOLDER = Path(__file__).parent
_MAX_MESSAGE_LINES = 60
_MAX_STORIES = 6
_ATTENTION = "attention"


def render_page(events: Sequence[Event]) -> str:
    """The whole page as text."""
    return page_of(as_report(events))


def page_of(report: Report) -> str:
    """The page of a report as `data` describes it."""
    names = [found["name"] for found in report["implementations"]]
    title = f"Conformance of {', '.join(names) or 'nothing'}"
    body = [
        f"<header><h1>{escape(title)}</h1>",
        _verdict(report),
        "</header><main>",
        _overview(report),
        *(_points(found) for found in report["implementations"] if found["points"]),
        "<h2>Clauses</h2>",
        "<p class='small soft'>Each row is one norm. Open it for what was seen, what that usually "
        "means, who made the mistake before, and the line to see it again.</p>",
        _filters(report),
        _table(report["clauses"], names),
        "</main><footer>",
        _run(report["run"]),
        "</footer>",
    ]
    return "\n".join([*_head(title), *filter(None, body), "</body></html>"]) + "\n"


def _head(title: str) -> list[str]:
    styles = "".join((_FOLDER / name).read_text("utf-8") for name in ("house.css", "page.css"))
    script = (_FOLDER / "page.js").read_text("utf-8")
    return [
        "<!doctype html>",
        "<html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        # Nothing is ever fetched, and a message that holds markup can do nothing.
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; "
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">",
        f"<title>{escape(title)}</title>",
        f"<style>\n{styles}</style>",
        f"<script>\n{script}</script>",
        "</head><body>",
    ]


def _verdict(report: Report) -> str:
    kind = {0: "good", 1: "bad"}.get(report["verdict"]["status"], "warn")
    levels = dict.fromkeys(found["level"] for found in report["implementations"])
    held = f" <span>(level {', '.join(levels)})</span>" if report["complete"] and levels else ""
    text = escape(report["verdict"]["text"])
    said = [f"<p class='verdict {kind}'><strong>{text}</strong>{held}</p>"]
    said += [f"<p class='bad'>{prose(problem)}</p>" for problem in report["problems"]]
    said += [f"<p class='small'>{prose(each)}</p>" for each in report["run"].get("notices", ())]
    return "\n".join(said)


def _overview(report: Report) -> str:
    """One row per implementation: how far it has come at each level, then what else there was."""
    found = report["implementations"]
    levels = [level for level in LEVELS if any(level in one["levels"] for one in found)]
    head = "".join(
        f"<th scope='col' class='number'>{level}<br><span class='small soft'>"
        f"{LEVEL_TITLES[level]}</span></th>"
        for level in levels
    )
    rows = []
    for one in found:
        cells = "".join(
            _ratio(one["levels"].get(level), _is_refuted(report, one, level)) for level in levels
        )
        others = " · ".join(
            f"{WORDS[Outcome(outcome)]} {number}"
            for outcome, number in one["outcomes"].items()
            if outcome != Outcome.PASSED
        )
        rows.append(
            f"<tr><th scope='row'>{escape(one['name'])}</th>{cells}"
            f"<td>{escape(one['level'])}</td><td>{escape(others) or 'nothing else'}</td></tr>"
        )
    return (
        "<h2>At a glance</h2><div class='wide'><table><caption class='small soft'>MUST clauses "
        "that pass, of those judged; red where one does not hold, amber where the others are "
        "declared failures or could not be judged</caption>"
        f"<thead><tr><th scope='col'>implementation</th>{head}"
        "<th scope='col'>held to</th><th scope='col'>besides</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _is_refuted(report: Report, one: Mapping[str, Any], level: str) -> bool:
    """Whether a MUST clause of the level does not hold for an implementation."""
    return any(
        Outcome(row["cells"][one["name"]]["outcome"]) in REFUTED
        for row in report["clauses"]
        if (row["strength"], row["level"]) == ("MUST", level) and one["name"] in row["cells"]
    )


def _ratio(counted: Mapping[str, int] | None, is_refuted: bool) -> str:
    if counted is None:
        return "<td class='number soft'>none</td>"
    others = "bad" if is_refuted else "warn"
    kind = "good" if counted["passed"] == counted["judged"] else others
    words = f"{counted['passed']} of {counted['judged']}"
    return f"<td class='number'><span class='mark {kind}'>{words}</span></td>"


def _points(found: Mapping[str, Any]) -> str:
    points = found["points"]
    rows = []
    for item in points["items"]:
        if item["by_hand"]:
            kind, why = "mute", item["by_hand"]
        else:
            kind = "good" if item["points"] == item["of"] else "bad"
            kind = "mute" if item["not_judged"] else kind
            why = ", ".join(f"{c}: {o.replace('_', ' ')}" for c, o in item["missing"].items())
            why = why or "nothing"
        rows.append(
            f"<tr><th scope='row'>{escape(item['name'])}</th><td><span class='mark {kind}'>"
            f"{got(item)}</span></td><td class='small'>{prose(why)}</td></tr>"
        )
    about = "; ".join(filter(None, [points["title"], points["note"]]))
    return (
        f"<h2>Points of {escape(found['name'])}: {points['points']:g} of {points['of']:g}</h2>"
        f"<p class='small soft'>{linked(about)}</p><div class='wide'>"
        "<table class='points'><thead><tr><th scope='col'>item</th><th scope='col'>points</th>"
        f"<th scope='col'>missing</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _filters(report: Report) -> str:
    chapters = dict.fromkeys(row["chapter"] for row in report["clauses"])
    present = {cell["outcome"] for row in report["clauses"] for cell in row["cells"].values()}
    outcomes = [outcome for outcome in Outcome if outcome in present]
    return "".join(
        [
            "<form class='filters'>",
            "<label>Level<select name='level'><option value=''>all</option>",
            *(f"<option value='{level}'>up to {level}</option>" for level in LEVELS),
            "</select></label>",
            "<label>Chapter<select name='chapter'><option value=''>all</option>",
            *(f"<option>{escape(chapter)}</option>" for chapter in chapters),
            "</select></label>",
            "<label>Outcome<select name='outcome'><option value=''>all</option>",
            f"<option value='{_ATTENTION}'>needs attention</option>",
            *(f"<option value='{outcome}'>{WORDS[outcome]}</option>" for outcome in outcomes),
            "</select></label>",
            "<label>Words<input name='words' type='search' placeholder='no-sync, bucket'></label>",
            "<button type='button' id='expand'>Open or close all</button>",
            "<button type='reset'>Reset</button>",
            "<output aria-live='polite'></output></form>",
        ]
    )


def _table(clauses: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    def place(row: Mapping[str, Any]) -> tuple[int, str]:
        return LEVELS.index(row["level"]), row["chapter"]

    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in names)
    order = {row["chapter"]: number for number, row in reversed(list(enumerate(clauses)))}
    ordered = sorted(clauses, key=lambda row: (place(row)[0], order[row["chapter"]]))
    parts = [
        "<div class='clauses-box'><table class='clauses'>",
        f"<thead><tr><th scope='col'>clause</th>{head}</tr></thead>",
    ]
    for (level, chapter), rows in groupby(ordered, key=place):
        words, title = f"{LEVELS[level]}: {chapter}", LEVEL_TITLES[LEVELS[level]]
        parts.append(
            f"<tbody><tr class='group'><th scope='colgroup' colspan='{len(names) + 1}'>"
            f"{escape(words)} <span class='small soft'>{title}</span></th></tr>"
        )
        parts += [_row(row, names) for row in rows]
        parts.append("</tbody>")
    return "\n".join([*parts, "</table></div>"])


def _row(row: Mapping[str, Any], names: Sequence[str]) -> str:
    found = {cell["outcome"] for cell in row["cells"].values()}
    needs_attention = any(Outcome(outcome) in REFUTED | BROKEN for outcome in found)
    outcomes = " ".join([*sorted(found), *([_ATTENTION] if needs_attention else [])])
    id, detail = escape(row["id"]), f"about-{escape(row['id'])}"
    advice = "" if row["strength"] == "MUST" else f"<span class='advice'>{row['strength']}</span>"
    norm = f"<p class='norm'>{prose(row['sentence'])}</p>" if row["sentence"] else ""
    cells = "".join(_cell(row["cells"].get(name)) for name in names)
    alarm = " alarm" if needs_attention else ""
    return (
        f"<tr class='clause' id='{id}' data-level='{row['level']}' "
        f"data-chapter='{escape(row['chapter'])}' data-outcomes='{outcomes}'>"
        f"<th scope='row'><button type='button' class='id' aria-expanded='false' "
        f"aria-controls='{detail}'>{id}</button>{advice}{norm}</th>{cells}</tr>\n"
        f"<tr class='detail{alarm}' id='{detail}'><td colspan='{len(names) + 1}'>"
        f"{_detail(row, names)}</td></tr>"
    )


def _cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "<td class='soft small'>not run</td>"
    return f"<td><span class='mark {_kind(cell['outcome'])}'>{escape(cell['text'])}</span></td>"


def _kind(word: str) -> str:
    outcome = Outcome(word)
    if outcome is Outcome.PASSED:
        return "good"
    if outcome in SILENT:
        return "mute"
    return "bad" if outcome in REFUTED else "warn"


def _detail(row: Mapping[str, Any], names: Sequence[str]) -> str:
    parts = [_seen(name, row["cells"][name]) for name in names if name in row["cells"]]
    failing = REFUTED | BROKEN | {Outcome.EXPECTED_FAILURE}
    has_failed = any(Outcome(cell["outcome"]) in failing for cell in row["cells"].values())
    parts.append(_stories(row["stories"], has_failed=has_failed))
    about = [f"Source: {linked(row['source'])}"] if row["source"] else []
    about += [f"Judged by <code>{escape(row['where'])}</code>"] if row["where"] else []
    about += [f"{row['strength']}, level {row['level']}"]
    parts.append(f"<p class='small soft'>{' · '.join(about)}</p>")
    return "\n".join(filter(None, parts))


def _seen(name: str, cell: Mapping[str, Any]) -> str:
    """What one implementation came to, unless it passed: its first decisive case in full."""
    if cell["outcome"] == Outcome.PASSED:
        return ""
    first, *others = [case for case in cell["cases"] if case["outcome"] == cell["outcome"]]
    parts = [f"<h3>{escape(name)}: {escape(cell['text'])}</h3>"]
    if first["likely"]:
        parts.append(f"<p class='likely'><strong>Likely</strong> {prose(first['likely'])}</p>")
    message = _clip(first["message"].rstrip())
    if message:
        parts.append(f"<pre>{prose(message)}</pre>")
    if others:
        named = ", ".join(case["case"] for case in others)
        parts.append(f"<p class='small'>The same in: <span class='id'>{escape(named)}</span></p>")
    if first["rerun"] not in message and Outcome(cell["outcome"]) not in SILENT:
        parts.append(f"<p class='small'>See it again:</p><pre>{escape(first['rerun'])}</pre>")
    return "\n".join(parts)


def _stories(stories: Sequence[Mapping[str, str]], has_failed: bool) -> str:
    if not stories:
        return ""
    title = "Who had this bug before" if has_failed else "What this clause catches"
    items = [
        f"<li><strong>{prose(story['does'])}</strong> {linked(story['seen'])}"
        + (f" <em>Why tests miss it:</em> {prose(story['unseen'])}" if story["unseen"] else "")
        + f" <span class='id soft'>impostor:{escape(story['impostor'])}</span></li>"
        for story in stories[:_MAX_STORIES]
    ]
    if len(stories) > _MAX_STORIES:
        items.append(f"<li>{len(stories) - _MAX_STORIES} more in spec_tests/CLAUSES.md</li>")
    return f"<h3>{title}</h3><ul>{''.join(items)}</ul>"


def _run(run: Mapping[str, Any]) -> str:
    def said(value: Any) -> str:
        each = value.items() if isinstance(value, dict) else ()
        return escape(", ".join(f"{name}: {of}" for name, of in each) or str(value))

    rows = "".join(
        f"<tr><th scope='row'>{escape(key)}</th><td><code>{said(value)}</code></td></tr>"
        for key, value in run.items()
    )
    return (
        "<h2>The run</h2><p class='small soft'>events.jsonl beside this page is the log; "
        "report.json the same for programs.</p>"
        f"<div class='wide'><table class='small'><tbody>{rows}</tbody></table></div>"
    )


def _clip(text: str) -> str:
    lines = text.splitlines()
    if len(lines) <= _MAX_MESSAGE_LINES:
        return text
    more = f"... {len(lines) - _MAX_MESSAGE_LINES} more lines in events.jsonl"
    return "\n".join([*lines[:_MAX_MESSAGE_LINES], more])

"""Points, as a course gives them: a profile file says which clauses an item of the course needs.

`--points effdl`, `cs336`, `course` or a file of one's own:

    title = "Efficient DL Systems, week 5"
    level = "production"                  # what is judged unless --level says otherwise

    [[item]]
    name = "Forward prefetch"
    points = 2
    clauses = ["fsdp.order.gathers-ahead-in-backward", "fsdp.traffic.*"]

    [[item]]
    name = "Benchmarking script"
    points = 4
    by_hand = "a script and its table are read by a person"

A pattern stands for the MUST clauses that it matches: SHOULD and MAY advise and give no points. An
item has all its points when every one of its clauses passes, and none otherwise: a clause that is
not offered, declared as a deviation or not here has not passed. An item of which a clause was left
out of the run is not judged, and `by_hand` items have points that no clause can give; neither
stands in a sum. With `clauses` and `by_hand` an
item is by hand for those who offer nothing of what its clauses judge. Nothing that an incomplete
log says is worth a point.

`resolve` runs at the start of a run, against the clauses that exist, and its outcome goes into the
log's header: what comes later needs the log alone.
"""

from __future__ import annotations

import fnmatch
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_tests.rig.outcomes import (
    LEVELS,
    SILENT,
    Cell,
    Event,
    Outcome,
    cells,
    header,
    is_complete,
    is_within,
    level_of,
    results,
)
from spec_tests.rig.report.text import INCOMPLETE, WORDS, clip, implementations

PROFILES = Path(__file__).parent / "profiles"

NOT_RUN = "not run"
"""What became of a clause that an item needs and the run left out."""

_KEYS = {"name", "points", "clauses", "by_hand"}
_MAX_OUTPUT_LINES = 60


def load(spec: str) -> dict[str, Any]:
    """The profile of that name or path.

    Raises:
        ValueError: There is none, or it is not what the module describes.
    """
    known = sorted(path.stem for path in PROFILES.glob("*.toml"))
    path = PROFILES / f"{spec}.toml" if spec in known else Path(spec)
    if not path.is_file():
        raise ValueError(f"--points {spec!r}: expected one of {', '.join(known)} or a .toml file")
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--points {path}: expected TOML, got: {error}") from error
    faults = _faults(found)
    if faults:
        raise ValueError(f"--points {path}: " + "; ".join(faults))
    return found


def _faults(found: Mapping[str, Any]) -> list[str]:
    faults = [f"unknown key {key!r}" for key in found.keys() - {"title", "source", "level", "item"}]
    if not isinstance(found.get("title"), str):
        faults.append("expected a title")
    if found.get("level", "correct") not in LEVELS:
        faults.append(f"expected level in {', '.join(LEVELS)}, got {found['level']!r}")
    items = found.get("item")
    if not isinstance(items, list) or not items:
        return [*faults, "expected at least one [[item]]"]
    for number, item in enumerate(items, start=1):
        faults += [f"item {number}: unknown key {key!r}" for key in item.keys() - _KEYS]
        if not isinstance(item.get("name"), str):
            faults.append(f"item {number}: expected a name")
        points = item.get("points")
        if isinstance(points, bool) or not isinstance(points, int | float) or not points >= 0:
            faults.append(f"item {number}: expected points >= 0, got {points!r}")
        if not item.get("clauses") and not item.get("by_hand"):
            faults.append(f"item {number}: expected clauses, by_hand or both")
    return faults


def resolve(profile: Mapping[str, Any], musts: Sequence[str]) -> dict[str, Any]:
    """The profile with every pattern replaced by the ids that it stands for.

    Args:
        musts: ids of all MUST clauses.

    Raises:
        ValueError: A pattern matches none of them.
    """
    items = []
    for item in profile["item"]:
        needed: dict[str, None] = {}
        for pattern in item.get("clauses", ()):
            matching = [clause for clause in musts if fnmatch.fnmatchcase(clause, pattern)]
            if not matching:
                raise ValueError(
                    f"points for {item['name']!r}: no MUST clause matches {pattern!r}; "
                    "all ids are in spec_tests/CLAUSES.md"
                )
            needed |= dict.fromkeys(matching)
        items.append({"by_hand": "", **item, "clauses": list(needed)})
    return {"title": profile["title"], "level": profile.get("level", "correct"), "items": items}


def score(events: Sequence[Event], implementation: str) -> dict[str, Any] | None:
    """The points of one implementation, or None if the run was not asked for any."""
    profile = header(events).get("points")
    return None if profile is None else _score(events, implementation, profile)


def _score(
    events: Sequence[Event], implementation: str, profile: Mapping[str, Any]
) -> dict[str, Any]:
    own = {cell.clause: cell for cell in cells(events, implementation)}
    items = [_score_item(item, own, is_complete(events)) for item in profile["items"]]
    judged = [item for item in items if not item["by_hand"] and not item["not_judged"]]
    needed, level = profile.get("level", LEVELS[0]), level_of(events, implementation)
    note = f"this profile needs --level {needed}; judged at {level}"
    return {
        "title": profile["title"],
        "note": "" if is_within(needed, level) else note,
        "points": sum(item["points"] for item in judged),
        "of": sum(item["of"] for item in judged),
        "items": items,
    }


def _score_item(item: Mapping[str, Any], own: Mapping[str, Cell], ended: bool) -> dict[str, Any]:
    missing = {}
    for clause in item["clauses"]:
        outcome = str(own[clause].outcome) if clause in own else NOT_RUN
        if outcome != Outcome.PASSED:
            missing[clause] = outcome
    offers_any = any(missing.get(clause) != Outcome.NOT_OFFERED for clause in item["clauses"])
    by_hand = "" if offers_any else item["by_hand"]
    # What an incomplete run did not come to is no choice of its user: it is worth nothing.
    left_out = ended and not by_hand and NOT_RUN in missing.values()
    return {
        "name": item["name"],
        "points": item["points"] if item["clauses"] and ended and not missing else 0,
        "of": item["points"],
        "by_hand": by_hand,
        "not_judged": left_out,
        "missing": {} if by_hand else missing,
    }


def render_points(events: Sequence[Event]) -> str:
    """The points as text, one line per item; nothing where none were asked for."""
    blocks = []
    for name in implementations(events):
        found = score(events, name)
        if found is None:
            return ""
        lines = [f"{name}: {found['points']:g} of {found['of']:g} points, {found['title']}"]
        lines += [f"  {found['note']}"] if found["note"] else []
        lines += [f"  {got(item)}  {item['name']}{_why(item)}" for item in found["items"]]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def got(item: Mapping[str, Any]) -> str:
    """What an item came to: `2 of 5`, `by hand, 4` or `not judged, 5`."""
    if item["by_hand"] or item["not_judged"]:
        return f"{'by hand' if item['by_hand'] else 'not judged'}, {item['of']:g}"
    return f"{item['points']:g} of {item['of']:g}"


def _why(item: Mapping[str, Any], limit: int = 3) -> str:
    if item["by_hand"]:
        return f" ({item['by_hand']})"
    words = [f"{clause} {outcome.replace('_', ' ')}" for clause, outcome in item["missing"].items()]
    more = f", {len(words) - limit} more" if len(words) > limit else ""
    return f" (missing: {', '.join(words[:limit])}{more})" if words else ""


def render_gradescope(events: Sequence[Event]) -> str:
    """results.json as Gradescope reads it, for the first implementation.

    With `--points` one test per item. Without, one per MUST clause of the level, a point each.
    """
    names = implementations(events)
    name = names[0] if names else ""
    each = [
        {"name": cell.clause, "points": 1, "clauses": [cell.clause], "by_hand": ""}
        for cell in cells(events, name)
        if cell.strength == "MUST" and cell.outcome not in SILENT
    ]
    profile = header(events).get("points") or {"title": "", "items": each}
    tests = _one_per_item(events, name, _score(events, name, profile))
    said = [] if is_complete(events) else [INCOMPLETE]
    said += [e["message"] for e in events if e.get("event") == "problem"]
    total = {
        "output": "\n".join(
            [*said, f"Judged by trainspec: {name}. Each message ends with its command."]
        ),
        "output_format": "text",
        "stdout_visibility": "hidden",
        "execution_time": round(sum(float(e["duration_s"]) for e in results(events, name)), 1),
        "tests": tests,
        "extra_data": {"implementation": name, "suite": header(events).get("suite", "")},
    }
    if not any("max_score" in test for test in tests):
        total["score"] = 0  # Gradescope wants a score from somewhere
    return json.dumps(total, indent=1, ensure_ascii=False) + "\n"


def _one_per_item(
    events: Sequence[Event], name: str, found: Mapping[str, Any]
) -> list[dict[str, Any]]:
    own, ended = {cell.clause: cell for cell in cells(events, name)}, is_complete(events)
    tests: list[dict[str, Any]] = []
    for number, item in enumerate(found["items"], start=1):
        test = {"number": str(number), "name": item["name"], "visibility": "visible"}
        if item["by_hand"]:
            test["output"] = f"{item['of']:g} points, given by hand: {item['by_hand']}"
        elif item["not_judged"]:
            left_out = [clause for clause, why in item["missing"].items() if why == NOT_RUN]
            test["output"] = f"{got(item)} points: {', '.join(left_out)} left out of the run"
            test["output"] += f"; {found['note']}" if found["note"] else ""
        else:
            each = (_clause_in_words(clause, own.get(clause)) for clause in item["missing"])
            said = clip("\n\n".join(each), _MAX_OUTPUT_LINES)
            test |= {
                "score": item["points"],
                "max_score": item["of"],
                "status": "failed" if item["missing"] or not ended else "passed",
                "output": said or ("every clause of this item passes" if ended else INCOMPLETE),
            }
        tests.append(test)
    return tests


def _clause_in_words(clause: str, cell: Cell | None) -> str:
    if cell is None:
        return f"{clause}: {NOT_RUN}"
    first = cell.decisive_cases[0]
    return "\n".join(filter(None, [f"{clause}: {WORDS[cell.outcome]}", first["message"].rstrip()]))

"""The report of a watched run; index.html has the verdict, its causes and a timeline of the steps.

One file that needs neither network nor script. The style is the report's `house.css`; the template
beside this module adds its own and escapes everything that came from the run.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spec_tests.rig.report.templates import of_pages, unindented
from spec_tests.rig.report.text import several
from spec_tests.watch import compare
from spec_tests.watch.norm import NORMS, is_must
from spec_tests.watch.run import Run
from spec_tests.watch.verdict import Verdict, headline

_LEFT, _WIDE, _TOP, _LANE = 64, 860, 18, 30
_LABEL = 44  # least distance between two step numbers
_MOST_BARS = 800  # beyond them only each n-th step is drawn, and each with a finding


def write(verdict: Verdict, run: Run, command: Sequence[str], folder: Path) -> None:
    """Write report.json, index.html, and the steps that a later run is compared with."""
    folder.mkdir(parents=True, exist_ok=True)
    data = as_data(verdict, run, command)
    (folder / "report.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (folder / compare.FILE).write_text(json.dumps(run.records), encoding="utf-8")
    (folder / "index.html").write_text(page(data), encoding="utf-8")


def as_data(verdict: Verdict, run: Run, command: Sequence[str]) -> dict[str, Any]:
    """Return the verdict and the timeline as plain data."""
    causes = [
        {
            **asdict(cause.finding),
            "sentence": NORMS[cause.finding.norm].sentence,
            "strength": "MUST" if is_must(cause.finding) else "SHOULD",
            "effects": cause.effects,
            "times": cause.times,
        }
        for cause in verdict.causes
    ]
    more = {"headline": headline(verdict), "command": [*command], "timeline": [*run.timeline]}
    return {**vars(verdict), **more, "causes": causes}


def page(data: Mapping[str, Any]) -> str:
    """Return the page as text.

    Args:
        data: what `as_data` returns.
    """
    good = "good" if data["steps"] and data["is_compared"] else "warn"
    template = of_pages(Path(__file__).parent).get_template("page.html.jinja")
    return template.render(
        data=data,
        command=shlex.join(data["command"]),
        styles=unindented("house.css"),
        kind=(good, "bad", "warn")[data["status"]],
        causes=sorted(data["causes"], key=lambda cause: cause["strength"] != "MUST"),
        timeline=_timeline(data) if data["timeline"] else None,
    )


def _timeline(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return places and words of what the template draws: a lane for each rank."""
    rows = sorted(data["timeline"])
    every = math.ceil(len(rows) / _MOST_BARS)
    begun = min(row[2] for row in rows)
    lasted = max(max(row[3] for row in rows) - begun, 1e-6)
    lanes = {rank: _TOP + at * _LANE for at, rank in enumerate(dict.fromkeys(r[0] for r in rows))}
    bars, marked, numbers = "", [], {-float(_LABEL): ""}
    for rank, step, begin, end in rows:
        x, y = round(_LEFT + (begin - begun) / lasted * _WIDE, 1), lanes[rank]
        wide = max(1.5, round((end - begin) / lasted * _WIDE, 1))
        causes = [c for c in data["causes"] if c["step"] == step and c["rank"] in (None, rank)]
        if causes:
            kind = "bad" if any(c["strength"] == "MUST" for c in causes) else "warn"
            said = "\n".join(f"[{c['norm']}] {c['text']}" for c in causes)
            marked.append((x, y, max(wide, 4), kind, f"rank {rank}, step {step}", said))
        elif step % every == 0:
            bars += f"M{x} {y + 10}h{wide}v16h-{wide}z"
        if y == _TOP and x - max(numbers) >= _LABEL:
            numbers[x] = str(step)
    about = f"{several(len(rows), 'step')} on {several(len(lanes), 'rank')} in {lasted:.3g} s"
    size = {"left": _LEFT, "wide": _WIDE, "low": _TOP + len(lanes) * _LANE, "every": every}
    drawn = {"lanes": lanes, "bars": bars, "marked": marked, "numbers": numbers}
    return {**size, **drawn, "about": about}

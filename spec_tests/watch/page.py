"""The report of a watched run; index.html has verdict, causes, a timeline, and what was checked.

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
from spec_tests.watch.verdict import Verdict, seen_in_words

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
    wrong = {cause.finding.norm for cause in verdict.causes}
    wrong |= {effect for cause in verdict.causes for effect in cause.effects}
    return {
        "command": list(command),
        **{name: value for name, value in vars(verdict).items() if name != "not_seen"},
        "causes": [
            {
                **asdict(cause.finding),
                "sentence": NORMS[cause.finding.norm].sentence,
                "strength": "MUST" if is_must(cause.finding) else "SHOULD",
                "effects": cause.effects,
                "times": cause.times,
            }
            for cause in verdict.causes
        ],
        "norms": [
            {
                "id": id,
                "sentence": each.sentence,
                "strength": str(each.strength),
                "holds": id not in wrong,
                "seen": id in wrong or id not in verdict.not_seen,
            }
            for id, each in NORMS.items()
        ],
        "timeline": list(run.timeline),
        "spans": list(run.spans),
    }


def page(data: Mapping[str, Any]) -> str:
    """Return the page as text.

    Args:
        data: what `as_data` returns.
    """
    is_judged = data["status"] == 1 or (data["status"] == 0 and data["steps"])
    template = of_pages(Path(__file__).parent).get_template("page.html.jinja")
    return template.render(
        data=data,
        command=shlex.join(data["command"]),
        styles=unindented("house.css"),
        kind=("good", "bad")[data["status"]] if is_judged else "warn",
        verdict=_verdict(data) if is_judged else "Nothing was judged",
        causes=sorted(data["causes"], key=lambda cause: cause["strength"] != "MUST"),
        norms=_in_order([{**norm, **_result(norm, data, is_judged)} for norm in data["norms"]]),
        timeline=_timeline(data) if data["timeline"] else None,
    )


def _in_order(norms: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return a title to the norms under it: what is wrong is open, all else is folded."""
    open_ones = [norm for norm in norms if norm["kind"] in ("bad", "warn")]
    held = [norm for norm in norms if norm["words"] == "holds"]
    rest = [norm for norm in norms if norm["kind"] == "mute"]
    why = rest[0]["words"] if rest else ""
    titles = ("", f"{several(len(held), 'norm')} held", f"{several(len(rest), 'norm')} {why}")
    return {t: of for t, of in zip(titles, (open_ones, held, rest), strict=True) if of}


def _verdict(data: Mapping[str, Any]) -> str:
    musts = sum(cause["strength"] == "MUST" for cause in data["causes"])
    found = several(musts, "cause") if musts else "Advice alone, under --strict,"
    of = (data["steps"], data["ranks"], data.get("replayed", ""), len(data["causes"]) - musts)
    return f"{found if data['status'] else 'Nothing wrong'} in {seen_in_words(*of)}"


def _result(norm: Mapping[str, Any], data: Mapping[str, Any], is_judged: bool) -> dict[str, str]:
    """Return colour and words for a norm, and the id of the cause that it belongs to."""
    if norm["holds"]:
        kind, words = ("good", "holds") if is_judged else ("mute", "not judged")
        if is_judged and not norm["seen"]:
            kind, words = "mute", "not seen"
        return {"kind": kind, "words": words, "at": ""}
    causes = [c for c in data["causes"] if norm["id"] in (c["norm"], *c["effects"])]
    own = next((c["strength"] for c in causes if c["norm"] == norm["id"]), norm["strength"])
    words = "does not hold" if own == norm["strength"] else "advice"
    at = causes[0]["norm"] if causes else ""
    return {"kind": "bad" if own == "MUST" else "warn", "words": words, "at": at}


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
    spans = _spans(data, begun, lasted, lanes)
    about = f"{several(len(rows), 'step')} on {several(len(lanes), 'rank')} in {lasted:.3g} s"
    low = _TOP + len(lanes) * _LANE + 16
    size = {"left": _LEFT, "wide": _WIDE, "low": low, "every": every, "about": about}
    drawn = {"spans": spans, "lanes": lanes, "bars": bars, "marked": marked, "numbers": numbers}
    return {**size, **drawn, "seconds": _seconds(lasted)}


def _spans(
    data: Mapping[str, Any], begun: float, lasted: float, lanes: Mapping[int, int]
) -> dict[str, str]:
    """Return the path of what ran, by its kind; of a long run, of each n-th span."""
    known = [s for s in data.get("spans", ()) if s[0] in lanes and s[3] > begun]
    every = math.ceil(len(known) / _MOST_BARS)
    paths = dict.fromkeys(("forward", "backward", "waiting"), "")
    for index, (rank, kind, begin, end) in enumerate(known):
        x = round(_LEFT + max(begin - begun, 0) / lasted * _WIDE, 1)
        wide = max(1, round((min(end, begun + lasted) - max(begin, begun)) / lasted * _WIDE, 1))
        if (index % every == 0 or kind == "waiting") and x < _LEFT + _WIDE:
            paths[kind] += f"M{x} {lanes[rank] + 20}h{wide}v6h-{wide}z"
    return {kind: path for kind, path in paths.items() if path}


def _seconds(lasted: float) -> dict[float, str]:
    """Return place to words of at most nine moments."""
    ten = 10 ** math.floor(math.log10(lasted / 8))
    unit = next(ten * by for by in (1, 2, 5, 10, 20) if lasted / (ten * by) <= 8)
    moments = [at * unit for at in range(int(lasted / unit) + 1)]
    return {round(_LEFT + each / lasted * _WIDE, 1): f"{each:.4g} s" for each in moments}

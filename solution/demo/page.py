"""OUT/index.html out of OUT/results.json: one file, no script, nothing from the network.

    python -m solution.demo.page outputs/demo/results.json outputs/demo/index.html

Parts whose data is not there (no trace was recorded, no specification at hand) are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from solution.demo.charts import HUES, bars, dash, lines, stacks, timeline

__all__ = ["render"]

FOLDER = Path(__file__).parent
COMPONENTS = ("parameters", "gradients", "optimizer", "activations")
KINDS = {"allreduce_": "all-reduce", "broadcast_": "broadcast", "_allgather_base_": "all-gather"}
KINDS |= {"_reduce_scatter_base_": "reduce-scatter", "allgather_": "all-gather"}
KINDS |= {"reduce_scatter_": "reduce-scatter", "reduce_": "reduce"}
MIB = 2**20

Results = Mapping[str, Any]


def render(found: Results) -> str:
    """The whole page as text."""
    styles = "".join((FOLDER / name).read_text("utf-8") for name in ("house.css", "page.css"))
    parts = [
        _loss(found["runs"]),
        _memory(found["runs"]),
        _throughput(found["runs"]),
        _traffic(found["runs"]),
        _timelines(found["runs"]),
        _conformance(found.get("conformance")),
    ]
    return "\n".join(
        [
            "<!doctype html>",
            "<html lang='en'><head><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; "
            "style-src 'unsafe-inline'\">",
            f"<title>One training, many ways</title><style>\n{styles}</style></head><body>",
            _top(found),
            "<main>",
            *filter(None, parts),
            "</main></body></html>",
            "",
        ]
    )


def _top(found: Results) -> str:
    runs, problems = found["runs"], found.get("problems", [])
    kind, words = (
        ("bad", f"{len(problems)} checks failed") if problems else ("good", "All checks hold")
    )
    said = "".join(f"<p class='bad small'>{escape(problem)}</p>" for problem in problems)
    losses = runs[0]["losses"]
    tiles = [
        (f"{found['parameters']:,}", f"parameters, {found['model']}"),
        (f"{found['tokens_per_step']:,}", "tokens per step"),
        (f"{found['steps']}", f"steps, {len(runs)} runs"),
        (f"{losses[0]:.2f} → {losses[-1]:.2f}", "loss"),
        (f"{found.get('seconds', 0):.0f} s", f"in all, {found['device']}, torch {found['torch']}"),
    ]
    items = "".join(f"<li><strong>{a}</strong> {escape(b)}</li>" for a, b in tiles)
    return (
        "<header><h1>One training, many ways</h1><p>The same model learns from the same tokens on "
        "one rank and on two: replicated, with a divided optimizer, fully sharded; by this "
        "repository and by PyTorch; undisturbed and killed in the middle.</p>"
        f"<p class='verdict {kind}'><strong>{words}</strong></p>{said}"
        f"<ul class='tiles'>{items}</ul></header>"
    )


def _loss(runs: Sequence[Results]) -> str:
    curves = [(run["title"], run["losses"]) for run in runs]
    differences = [(run["title"], run["differences"]) for run in runs[1:]]
    rows = [
        [run["title"], f"{run['losses'][-1]:.6f}", *_distances(run), run["weights"][:12]]
        for run in runs
    ]
    head = ["run", "last loss", "losses differ by", "gradient norms by", "final weights"]
    return (
        "<h2>Loss</h2><p>"
        f"{len(runs)} curves, and one line: they coincide. What is left between them is rounding, "
        "as much as between two runs of one rank that cut the batch otherwise (the control).</p>"
        + lines(curves, title=f"Loss of {len(runs)} runs over the steps; they coincide", y="loss")
        + "<p class='small soft'>Distance from one rank, step by step; on the floor: equal to the "
        "bit.</p>"
        + lines(
            differences, title="Difference of losses from one rank", y="difference", is_log=True
        )
        + _legend([run["title"] for run in runs[1:]])
        + _table(head, rows, numbers=(1, 2, 3))
    )


def _distances(run: Results) -> list[str]:
    return [f"{run['distance'][key]:.1e}" for key in ("loss", "grad_norm")]


def _memory(runs: Sequence[Results]) -> str:
    held = [run for run in runs if run["memory"]["measured"]]
    if not held:
        return ""
    stacked = [(r["title"], r["memory"]["measured"], r["memory"]["predicted"]) for r in held]
    rows = []
    for run in held:
        measured, predicted = run["memory"]["measured"], run["memory"]["predicted"]
        cells = [f"{measured[c] / MIB:.2f} ({predicted[c] / MIB:.2f})" for c in COMPONENTS]
        error = 100 * (sum(measured.values()) / sum(predicted.values()) - 1)
        peaks = " ".join(f"{peak / MIB:,.0f}" for peak in run["memory"]["peak"])
        rows.append([run["title"], *cells, f"{error:+.1f} %", peaks])
    head = ["run", *(f"{name}, MiB" for name in COMPONENTS), "sum: error", "peak, MiB"]
    return (
        "<h2>Memory of a rank</h2><p>What a rank holds at the update, and what one micro-batch "
        "saves for its backward; below each bar, thinner, what theory said beforehand. With "
        "ZeRO-1 each of two ranks holds half of the optimizer's state, sharded half of everything "
        "but the activations.</p>"
        + _swatches(COMPONENTS)
        + stacks(stacked, names=COMPONENTS, title="Bytes of a rank by component", y="")
        + _table(head, rows, numbers=range(1, 7))
        + "<p class='small soft'>In brackets: predicted. The last column is the peak of the whole "
        "process per rank, on a CPU with interpreter and libraries.</p>"
    )


def _throughput(runs: Sequence[Results]) -> str:
    rows = [(r["title"], r["tokens_per_s"], f"{r['tokens_per_s']:,.0f} tokens/s") for r in runs]
    return (
        "<h2>Throughput</h2><p>Tokens per second of all ranks, in the median step. Two ranks on "
        "two cores at this size pay for every message; nothing here speaks about GPUs.</p>"
        + bars(rows, title="Tokens per second of each run", y="")
    )


def _traffic(runs: Sequence[Results]) -> str:
    rows = []
    for run in runs:
        sent = run["traffic"]
        kinds = ", ".join(
            f"{one['count']} {KINDS.get(name, name)} ({one['bytes'] / 1e6:.2f} MB)"
            for name, one in sent["collectives"].items()
        )
        is_equal = sent["bytes"] == sent["theory_bytes"]
        kind, word = ("good", "equal") if is_equal else ("bad", "differs")
        mark = f"<span class='mark {kind}'>{word}</span>"
        numbers = [f"{sent[key] / 1e6:.3f}" for key in ("bytes", "theory_bytes")]
        rows.append([run["title"], kinds or "none", *numbers, mark, sent["reason"]])
    head = ["run", "collectives of a step", "MB", "theory, MB", "bytes", "why"]
    return (
        "<h2>Traffic of a step</h2><p>What one rank hands to its collectives, counted under the "
        "running step, beside what the algorithm needs: P is the model, B its blocks, M the "
        "micro-batches per step.</p>" + _table(head, rows, numbers=(2, 3), raw=(4,))
    )


def _timelines(runs: Sequence[Results]) -> str:
    recorded = [run for run in runs if run["timeline"]]
    if not recorded:
        return ""
    longest = max(rank["duration_us"] for run in recorded for rank in run["timeline"])
    parts = []
    for run in recorded:
        ranks = run["timeline"]
        sent = sum(end - begin for rank in ranks for begin, end in rank["communication"])
        hidden = sum(end - begin for rank in ranks for begin, end in rank["overlap"])
        words = f"{100 * hidden / sent:.0f} % of the communication hidden" if sent else "no traffic"
        title = f"One step of {run['title']}: {words}"
        parts.append(f"<h3>{escape(run['title'])} <span class='small soft'>{words}</span></h3>")
        parts.append(timeline(ranks, longest_us=longest, title=title))
    return (
        "<h2>One step, as it happened</h2><p>Recorded with torch.profiler, all on one scale: when "
        "a rank computed, when it communicated (waiting for the other rank included), and, shaded, "
        "when both at once. Recording slows a step down.</p><ul class='legend'>"
        "<li><span class='swatch' style='background:var(--hue-1)'></span>computation</li>"
        "<li><span class='swatch' style='background:var(--hue-2)'></span>communication</li>"
        "<li><span class='swatch' style='background:var(--hue-3);opacity:.5'></span>overlap</li>"
        "</ul>" + "".join(parts)
    )


def _conformance(found: Results | None) -> str:
    if not found:
        return ""
    rows = []
    for row in found["rows"]:
        cells = [_cell(row["cells"].get(name)) for name in found["implementations"]]
        rows.append([row["chapter"], *cells])
    names = found["implementations"]
    return (
        "<h2>Conformance</h2><p>The MUST clauses of the specification that pass, by chapter: "
        f"{escape(found['text'])}.</p>"
        + _table(["chapter", *names], rows, raw=range(1, len(names) + 1))
        + f"<p class='small soft'>Run with <code>{escape(found['command'])}</code></p>"
    )


def _cell(counted: Mapping[str, int] | None) -> str:
    if not counted:
        return "<span class='soft'>not run</span>"
    passed = counted.get("passed", 0)
    silent = sum(counted.get(word, 0) for word in ("not_offered", "not_here", "skipped"))
    judged = sum(counted.values()) - silent
    bad = judged - passed - counted.get("expected_failure", 0)
    kind = "bad" if bad else "good" if judged else "mute"
    words = f"{passed} of {judged}" if judged else "not here"
    declared = counted.get("expected_failure", 0)
    note = f" <span class='small soft'>{declared} declared</span>" if declared else ""
    return f"<span class='mark {kind}'>{words}</span>{note}"


def _legend(labels: Sequence[str]) -> str:
    items = []
    for number, label in enumerate(labels):
        look = f"stroke:{HUES[number % len(HUES)]};stroke-width:3;stroke-dasharray:{dash(number)}"
        items.append(
            "<li><svg aria-hidden='true' viewBox='0 0 40 10'>"
            f"<line x1='0' x2='40' y1='5' y2='5' style='{look}'/></svg>{escape(label)}</li>"
        )
    return f"<ul class='legend'>{''.join(items)}</ul>"


def _swatches(labels: Sequence[str]) -> str:
    items = "".join(
        f"<li><span class='swatch' style='background:{hue}'></span>{escape(label)}</li>"
        for label, hue in zip(labels, HUES, strict=False)
    )
    return f"<ul class='legend'>{items}</ul>"


def _table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    raw: Sequence[int] = (),
) -> str:
    """A table whose first column names its rows; `raw` columns hold markup already."""

    def cell(column: int, text: str) -> str:
        text = text if column in raw else escape(text)
        kind = " class='number'" if column in numbers else ""
        return f"<td{kind}>{text}</td>" if column else f"<th scope='row'>{text}</th>"

    top = "".join(
        f"<th scope='col'{' class=number' if column in numbers else ''}>{escape(text)}</th>"
        for column, text in enumerate(head)
    )
    body = "".join(
        f"<tr>{''.join(cell(column, text) for column, text in enumerate(row))}</tr>" for row in rows
    )
    return (
        f"<div class='wide'><table class='numbers'><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def main(arguments: Sequence[str]) -> int:
    """Draw the page anew from results that are there."""
    if len(arguments) != 2:
        print("usage: python -m solution.demo.page RESULTS.json PAGE.html", file=sys.stderr)
        return 2
    results, target = map(Path, arguments)
    target.write_text(render(json.loads(results.read_text("utf-8"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""OUT/index.html out of OUT/results.json: one file, no script, nothing from the network.

    python -m solution.demo.page outputs/demo/results.json outputs/demo/index.html

`page.html.jinja` is the page. The charts are drawn by matplotlib (`page.mplstyle`) as SVG and put
into it; their colours become those of the page's style, in light and dark. Parts whose data is not
there (no trace was recorded) are left out.
"""

import argparse
import io
import json
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from solution.demo import page_template
from solution.measure.intervals import length
from solution.measure.trace import listed

FOLDER = Path(__file__).parent
MIB = 2**20
HUES = [f"#{number:06x}" for number in range(1, 7)]  # written as the page's --hue-1 to --hue-6
DASHES: list[Any] = ["solid", (0, (9, 5)), (0, (3, 4)), (0, (12, 4, 3, 4)), (0, (2, 7))]
Runs = Sequence[Mapping[str, Any]]
Axes = Any  # matplotlib's, whose types differ between versions


def render(found: Mapping[str, Any]) -> str:
    """Return the whole page; `solution.demo.results` describes the argument."""
    runs = found["runs"]
    recorded = [run for run in runs if run["timeline"]]
    longest = max((rank["duration_us"] for run in recorded for rank in run["timeline"]), default=0)
    losses = f"Loss of {len(runs)} runs over the steps; they coincide"
    apart, axis = "Difference of losses from one rank", {"ylabel": "difference", "yscale": "log"}
    with matplotlib.rc_context(fname=FOLDER / "page.mplstyle"):
        return page_template(FOLDER / "page.html.jinja").render(
            found,
            charts={
                "losses": _curves(runs, "losses", losses, {"ylabel": "loss"}),
                "differences": _curves(runs, "differences", apart, axis, first=1),
            },
            timelines=[(run["title"], *_timeline(run, longest)) for run in recorded],
            listed=listed,
            mib=MIB,
        )


def _curves(runs: Runs, key: str, title: str, axis: Mapping[str, str], *, first: int = 0) -> Markup:
    """Draw the curves of the runs from the `first` on; equal to the bit is on the floor.

    Beside a first run that is left out, equal curves are drawn once, under all their names.
    """
    floor = min((x for run in runs for x in run[key] if x), default=1e-9) / 2
    equal: dict[Any, list[int]] = defaultdict(list)
    for number, run in enumerate(runs[first:], start=first):
        equal[tuple(run[key]) if first else number].append(number)
    axes = _axes(2.6 + 0.17 * (len(runs) - first) / (1 if first else 2))
    for number, *others in equal.values():
        look: dict[str, Any] = {"linewidth": 1.8} if number else {"linewidth": 7, "alpha": 0.35}
        look |= {"linestyle": DASHES[(number // 6 * 2 + number % 2) % 5], "color": HUES[number % 6]}
        values = [max(x, floor) for x in runs[number][key]]
        names = textwrap.fill(" = ".join(runs[each]["title"] for each in (number, *others)), 50)
        axes.plot(range(1, len(values) + 1), values, label=names, gid=f"curve-{number}", **look)
    axes.set(xlabel="step", **axis)
    columns, place = (1 if first else 2), "outside lower left"
    axes.figure.legend(loc=place, ncols=columns, frameon=False, handlelength=4)
    return _svg(axes, title)


def _timeline(run: Mapping[str, Any], longest_us: float) -> tuple[str, Markup]:
    """Draw a lane of computation and one of communication per rank, overlap shaded across."""
    ranks = run["timeline"]
    sent, hidden = (sum(length(r[lane]) for r in ranks) for lane in ("communication", "overlap"))
    words = f"{100 * hidden / sent:.0f} % of the communication hidden" if sent else "no traffic"
    labels = [f"rank {r['rank']} {lane}" for r in ranks for lane in ("compute", "communication")]
    axes = _axes(0.4 + 0.5 * len(ranks), labels)
    for top, rank in zip(range(0, len(labels), 2), ranks, strict=True):
        for kind, at, height, colour, alpha in (
            ("compute", top - 0.35, 0.7, HUES[0], 1.0),
            ("communication", top + 0.65, 0.7, HUES[1], 1.0),
            ("overlap", top - 0.45, 1.9, HUES[2], 0.5),
        ):
            spans = [(begin / 1e3, (end - begin) / 1e3) for begin, end in rank[kind]]
            look = {"color": colour, "alpha": alpha, "linewidth": 0.2}
            axes.broken_barh(spans, (at, height), gid=f"{kind}-{rank['rank']}", **look)
    axes.set(xlim=(0, longest_us / 1e3), xlabel="ms")
    return words, _svg(axes, f"One step of {run['title']}: {words}")


def _axes(height: float, rows: Sequence[str] = ()) -> Axes:
    """Return an empty chart; of time lines the labelled `rows`, the first one on top."""
    axes = Figure(figsize=(5, height), layout="constrained").subplots()
    if rows:
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.3, -0.6)
    return axes


def _svg(axes: Axes, title: str) -> Markup:
    """Return the figure as SVG for the page, with a title for screen readers."""
    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": title}):  # the same page from the same results
        axes.figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()
    for number, hue in enumerate(HUES, start=1):
        svg = svg.replace(hue, f"var(--hue-{number})")
    svg = svg[svg.index("<svg ") :].replace("#000000", "var(--ink)")
    return Markup(svg.replace("<svg ", Markup('<svg role="img" aria-label="{}" ').format(title), 1))


def draw(results: Path, page: Path) -> None:
    """Draw the page of results that are there."""
    page.write_text(render(json.loads(results.read_text("utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m solution.demo.page", description="Draw the page of a demonstration."
    )
    parser.add_argument("results", type=Path, help="OUT/results.json")
    parser.add_argument("page", type=Path, help="OUT/index.html")
    draw(**vars(parser.parse_args()))

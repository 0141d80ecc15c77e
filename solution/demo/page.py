"""OUT/index.html out of OUT/results.json: one file, no script, nothing from the network.

    python -m solution.demo.page outputs/demo/results.json outputs/demo/index.html

`page.html.jinja` is the page. The charts are drawn by matplotlib as SVG and put into it; their
colours become those of the page's style, in light and dark. Parts whose data is not there (no trace
was recorded, no specification at hand) are left out.
"""

import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from solution.measure.trace import kind_of
from solution.measure.traces import page_template

FOLDER = Path(__file__).parent
COMPONENTS = ("parameters", "gradients", "optimizer", "activations")
MIB = 2**20
HUES = [f"#{number:06x}" for number in range(1, 7)]  # written as the page's --hue-1 to --hue-6
DASHES: list[Any] = ["solid", (0, (9, 5)), (0, (3, 4)), (0, (12, 4, 3, 4)), (0, (2, 7))]
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "path.simplify": False,  # a point per step
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}

Runs = Sequence[Mapping[str, Any]]
Axes = Any  # matplotlib's, whose types differ between versions


def render(found: Mapping[str, Any]) -> str:
    """Return the whole page; `solution.demo.results` describes the argument."""
    styles = "".join((FOLDER / name).read_text("utf-8") for name in ("house.css", "page.css"))
    runs = found["runs"]
    with matplotlib.rc_context(STYLE):
        held = [run for run in runs if run["memory"]["measured"]]
        charts = {"memory": _memory(held) if held else "", "throughput": _throughput(runs)}
        charts |= _losses(runs)
        recorded = [run for run in runs if run["timeline"]]
        longest = max((r["duration_us"] for run in recorded for r in run["timeline"]), default=0)
        timelines = [(run["title"], *_timeline(run, longest)) for run in recorded]
    return page_template(FOLDER / "page.html.jinja").render(
        {"problems": [], "seconds": 0, "conformance": None, **found},
        styles=Markup(styles),
        charts=charts,
        timelines=timelines,
        held=held,
        components=COMPONENTS,
        kind_of=kind_of,
        mib=MIB,
    )


def _losses(runs: Runs) -> dict[str, str]:
    """Draw the curves, and their distances from the first: equal to the bit is on the floor."""
    floor = min((x for run in runs for x in run["differences"] if x), default=1e-9) / 2
    losses = {number: run["losses"] for number, run in enumerate(runs)}
    apart = {n: [max(x, floor) for x in run["differences"]] for n, run in enumerate(runs) if n}
    title = f"Loss of {len(runs)} runs over the steps; they coincide"
    differences = {"ylabel": "difference", "yscale": "log"}
    return {
        "losses": _curves(runs, losses, title, ylabel="loss"),
        "differences": _curves(runs, apart, "Difference of losses from one rank", **differences),
    }


def _curves(
    runs: Runs, curves: Mapping[int, Sequence[float]], title: str, **settings: str
) -> Markup:
    axes = _axes(3.4)
    for number, values in curves.items():
        look: dict[str, Any] = {"linewidth": 1.8} if number else {"linewidth": 7, "alpha": 0.35}
        look |= {"linestyle": DASHES[(number // 6 * 2 + number % 2) % 5], "color": HUES[number % 6]}
        steps, label = range(1, len(values) + 1), runs[number]["title"]
        axes.plot(steps, values, label=label, gid=f"curve-{number}", **look)
    axes.set(xlabel="step", **settings)
    axes.figure.legend(loc="outside lower center", ncols=6, frameon=False, handlelength=4)
    return _svg(axes, title)


def _memory(runs: Runs) -> Markup:
    """Draw what was measured and, below it, thinner, the prediction."""
    axes = _axes(0.5 + 0.5 * len(runs))
    for row, run in enumerate(runs):
        for kind, at, height, alpha in (
            ("measured", row, 0.4, 1),
            ("predicted", row + 0.35, 0.2, 0.55),
        ):
            left, sizes = 0.0, [run["memory"][kind].get(name, 0) / MIB for name in COMPONENTS]
            for colour, size in zip(HUES, sizes, strict=False):
                axes.barh(at, size, height, left=left, color=colour, alpha=alpha)
                left += size
            words = f"{left:.1f} MiB" + " predicted" * (kind == "predicted")
            axes.annotate(words, (left, at), (6, 0), textcoords="offset points", va="center")
    return _svg(_rows(axes, [run["title"] for run in runs]), "Bytes of a rank by component")


def _throughput(runs: Runs) -> Markup:
    axes = _axes(0.3 + 0.28 * len(runs))
    bars = axes.barh(range(len(runs)), [run["tokens_per_s"] for run in runs], 0.7, color=HUES[0])
    axes.bar_label(bars, [f"{run['tokens_per_s']:,.0f} tokens/s" for run in runs], padding=6)
    return _svg(_rows(axes, [run["title"] for run in runs]), "Tokens per second of each run")


def _timeline(run: Mapping[str, Any], longest_us: float) -> tuple[str, Markup]:
    """Draw a lane of computation and one of communication per rank, overlap shaded across."""
    ranks = run["timeline"]
    sent = sum(end - begin for rank in ranks for begin, end in rank["communication"])
    hidden = sum(end - begin for rank in ranks for begin, end in rank["overlap"])
    words = f"{100 * hidden / sent:.0f} % of the communication hidden" if sent else "no traffic"
    labels: list[str] = []
    axes = _axes(0.4 + 0.5 * len(ranks))
    for rank in ranks:
        top = len(labels)
        for kind, at, height, colour in (
            ("compute", top - 0.35, 0.7, HUES[0]),
            ("communication", top + 0.65, 0.7, HUES[1]),
            ("overlap", top - 0.45, 1.9, HUES[2]),
        ):
            spans = [(begin / 1e3, (end - begin) / 1e3) for begin, end in rank[kind]]
            look = {"alpha": 0.5 if kind == "overlap" else 1.0, "linewidth": 0.2}
            name = f"{kind}-{rank['rank']}"
            axes.broken_barh(spans, (at, height), color=colour, gid=name, **look)
        labels += [f"rank {rank['rank']} compute", f"rank {rank['rank']} communication"]
    axes.set(xlim=(0, longest_us / 1e3), xlabel="ms")
    return words, _svg(_rows(axes, labels), f"One step of {run['title']}: {words}")


def _rows(axes: Axes, labels: Sequence[str]) -> Axes:
    """Label the rows of a horizontal chart, the first one on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.3, -0.6)
    axes.margins(x=0.18)
    return axes


def _axes(height: float) -> Axes:
    return Figure(figsize=(11, height), layout="constrained").subplots()


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

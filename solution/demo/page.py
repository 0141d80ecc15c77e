"""OUT/index.html out of OUT/results.json: one file, no script, nothing from the network.

    python -m solution.demo.page outputs/demo/results.json outputs/demo/index.html

`page.html.jinja` is the page, and draws the charts as SVG.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from solution.measure.trace import listed

TEMPLATE = Path(__file__).with_name("page.html.jinja")
WIDTH, HEIGHT = 360, 200  # of a chart of curves


def render(found: Mapping[str, Any]) -> str:
    """Return the whole page; `solution.demo.results` describes the argument."""
    runs = found["runs"]
    options: Any = {"autoescape": True, "trim_blocks": True, "undefined": StrictUndefined}
    environment = Environment(loader=FileSystemLoader(TEMPLATE.parent), **options)
    return environment.get_template(TEMPLATE.name).render(
        found,
        losses=_points(runs, "losses", float),
        differences=_points(runs, "differences", _logarithm(runs)),
        listed=listed,
        mib=2**20,
        width=WIDTH,
        height=HEIGHT,
    )


def _points(runs: Sequence[Any], key: str, scale: Callable[[float], float]) -> list[str]:
    """Return the points of each run's curve, "x,y x,y ...", in one frame for all."""
    curves = [[scale(value) for value in run[key]] for run in runs]
    low, high = min(map(min, curves)), max(map(max, curves))
    right, top = WIDTH / max(1, len(curves[0]) - 1), HEIGHT / ((high - low) or 1)
    return [
        " ".join(f"{right * step:.1f},{top * (high - y):.1f}" for step, y in enumerate(curve))
        for curve in curves
    ]


def _logarithm(runs: Sequence[Any]) -> Callable[[float], float]:
    """Return log10, with no difference on the floor: below the smallest that there is."""
    floor = min((x for run in runs for x in run["differences"] if x), default=1e-9) / 2
    return lambda value: math.log10(max(value, floor))


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

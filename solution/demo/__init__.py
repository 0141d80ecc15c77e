"""The demonstration, `make demo`; `__main__.py` is its manual."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from solution.measure.intervals import merged


def page_template(path: Path) -> Any:
    """Return a page's template, which fails on names that it is not given."""
    options: Any = {"autoescape": True, "trim_blocks": True, "undefined": StrictUndefined}
    environment = Environment(loader=FileSystemLoader(path.parent), **options)
    environment.filters["merged"] = merged
    return environment.get_template(path.name)

"""A real browser for pages that we write: Debian's `chromium`, driven through `playwright`.

Both are optional: where one is missing, the tests that use the fixture skip and say which. The
browser is the system's own and is never downloaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--no-sandbox",  # the tests may run as root, in a container
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The browser, started once."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if find_spec("playwright") is None:
        pytest.skip("needs the Python package playwright: pip install -e '.[browser]'")
    if path is None:
        pytest.skip("needs a system browser: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # A busy machine may take long to start it; a page that is slow is another question.
        started = driver.chromium.launch(executable_path=path, args=FLAGS, timeout=120_000)
        yield started
        started.close()


_JS = Path(__file__).parent


class Visit:
    """A page in the browser, and what it complained of or asked for."""

    def __init__(self, browser: Any, file: Path, **settings: Any) -> None:
        self.page = browser.new_page(**settings)
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())

    def faint(self, least: float = 4.5) -> dict[str, float]:
        """Kinds of text whose contrast is below what WCAG asks at level AA."""
        found: dict[str, float] = self.page.evaluate(_JS.joinpath("contrasts.js").read_text())
        assert len(found) > 5, f"expected a page with text, got {found}"
        return {what: ratio for what, ratio in found.items() if ratio < least}


def require_decent(browser: Any, file: Path) -> Visit:
    """Assert what every page owes: nothing fetched, names for a screen reader, no wide lines.

    And text that can be read, in light and in dark.
    """
    for scheme in ("dark", "light"):
        visit = Visit(browser, file, color_scheme=scheme)
        expand = visit.page.locator("#expand")
        if expand.count():
            expand.click()
        assert visit.faint() == {}
    assert visit.requests == [file.as_uri()], "nothing but the file itself"
    assert visit.complaints == []
    found = visit.page.evaluate(_JS.joinpath("nameless.js").read_text())
    assert found == [], "controls without a name, or figures without words"
    narrow = Visit(browser, file, viewport={"width": 400, "height": 800}).page
    assert not narrow.evaluate(
        "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    ), "the page has to be scrolled sideways"
    return visit

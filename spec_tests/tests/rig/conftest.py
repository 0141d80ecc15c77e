"""Fixtures that the tests of the rig share; see `helpers` for functions."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spec_tests import impls
from spec_tests.rig import target
from spec_tests.rig.ranks.world import Worlds
from spec_tests.tests.rig.browser import browser

__all__ = ["browser"]


def _worlds() -> Iterator[Worlds]:
    """Worlds whose pools a test may count, stop and kill: no other test uses them."""
    worlds = Worlds()
    yield worlds
    worlds.close()


own = pytest.fixture(_worlds, name="own")
module_worlds = pytest.fixture(_worlds, scope="module", name="module_worlds")


@pytest.fixture
def mine(tmp_path: Path) -> Callable[..., target.Target]:
    """A function that writes an implementation to the test's folder and returns its target."""

    def written(text: str, name: str = "mine.py") -> target.Target:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return impls.parse(str(path))

    return written

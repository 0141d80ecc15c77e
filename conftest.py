"""Registers the suite's pytest plugin, which holds every option, marker and fixture.

Where `trainspec` is installed the plugin is already there, through its pytest11 entry point; that
entry point bears the module's own name, so pytest recognises the request below as the same plugin.
Where it is not installed (a bare checkout on a GPU machine) this file is what brings it in.
"""

from importlib.util import find_spec

import pytest

pytest_plugins = ["spec_tests.rig.plugin"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare pytest-timeout's settings where it is not installed: strict mode must know them."""
    if find_spec("pytest_timeout") is None:
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "pytest-timeout is not installed: this setting does nothing")

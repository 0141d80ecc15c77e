"""One browser for all tests of pages: a fixture that two modules import would be two of them."""

from spec_tests.rig_tests.browser import browser

__all__ = ["browser"]

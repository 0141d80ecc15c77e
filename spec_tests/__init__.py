"""An executable specification of data-parallel training; see README.md in this folder.

PYTEST_DONT_REWRITE (this package is imported before pytest could; nothing here asserts)
"""

"""The examples in the reference's docstrings are true."""

import contextlib
import doctest
import importlib
import io
import pkgutil

from spec_tests.tests.reference.launch import on_ranks


@on_ranks(1)
def test_every_example_says_what_it_shows(ctx):
    number = 0
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for found in pkgutil.walk_packages(
            importlib.import_module("solution").__path__, "solution."
        ):
            if "__main__" not in found.name and "triton" not in found.name:
                number += doctest.testmod(importlib.import_module(found.name)).attempted
    assert said.getvalue() == ""
    assert number > 10

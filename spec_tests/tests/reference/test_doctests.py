"""The examples in the reference's docstrings are true."""

import contextlib
import doctest
import importlib
import io
import pkgutil


def examples(ctx):
    """How many examples the modules hold, and what was printed about those that fail."""
    number = 0
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for found in pkgutil.walk_packages(
            importlib.import_module("solution").__path__, "solution."
        ):
            if "__main__" not in found.name and "triton" not in found.name:
                number += doctest.testmod(importlib.import_module(found.name)).attempted
    return number, said.getvalue()


def test_every_example_says_what_it_shows(in_rank):
    number, said = in_rank(examples)

    assert said == ""
    assert number > 10

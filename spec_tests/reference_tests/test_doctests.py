"""The examples in the reference's docstrings are true."""

from spec_tests.reference_tests.launch import answer

PROGRAM = """
import doctest
import importlib
import json
import pkgutil

import solution

results = {}
for found in pkgutil.walk_packages(solution.__path__, "solution."):
    if "__main__" in found.name or "triton" in found.name:
        continue
    result = doctest.testmod(importlib.import_module(found.name))
    results[found.name] = [result.attempted, result.failed]
print(json.dumps(results))
"""


def test_every_example_says_what_it_shows(tmp_path):
    results = answer(PROGRAM, folder=tmp_path)

    said = (tmp_path / "command.out").read_text()
    assert {name: counts for name, counts in results.items() if counts[1]} == {}, said
    assert sum(attempted for attempted, _ in results.values()) > 10

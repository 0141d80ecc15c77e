"""The examples in the reference's docstrings are true."""

import json

from spec_tests.reference_tests.launch import run

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
    ended = run(PROGRAM, folder=tmp_path)

    assert ended.status == 0, ended.err
    results = json.loads(ended.out.splitlines()[-1])
    assert {name: counts for name, counts in results.items() if counts[1]} == {}, ended.out
    assert sum(attempted for attempted, _ in results.values()) > 10

"""A failure that needs what earlier cases left in the ranks: said, and shown again by its line."""

from __future__ import annotations

import shlex
from pathlib import Path

from spec_tests.rig.report.eventlog import read_log
from spec_tests.rig_tests.helpers import python

# Of each process: the calls of `ddp` after the LAST double the gradients.
KEEPS_STATE = """
from torch.nn.parallel import DistributedDataParallel

calls = []


def ddp(module, *, process_group=None):
    calls.append(module)
    for parameter in module.parameters() if len(calls) > LAST else ():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: 2 * gradient)
    return DistributedDataParallel(module, process_group=process_group)
"""
CLAUSES = ("ddp.gradients.mean", "ddp.gradients.tied-parameter", "ddp.gradients.frozen-stay-none")


def judged(arguments: list[str], folder: Path) -> list[tuple[str, str, str, str]]:
    """Clause, case, outcome and message of everything that did not pass or was not offered."""
    python(*arguments, "--report", str(folder))
    return [
        (event["clause"], event["case"], event["rerun"], event["message"])
        for event in read_log(folder / "events.jsonl")
        if event["event"] == "result" and event["outcome"] not in ("passed", "not_offered")
    ]


def test_what_fails_only_after_other_cases_says_so_and_fails_again(tmp_path: Path):
    mine = tmp_path / "mine.py"
    mine.write_text(f"LAST = 3\n{KEEPS_STATE}", encoding="utf-8")
    selected = [word for name in CLAUSES for word in ("--clause", name)]
    command = ["-m", "spec_tests", "--impl", str(mine), *selected]
    ((clause, case, again, message),) = judged(command, tmp_path / "first")
    assert (clause, case) == (CLAUSES[2], "ddp-w2")
    assert "\nalone on fresh ranks this case passes: it fails after other cases" in message
    assert f"--clause {CLAUSES[1]} --clause {CLAUSES[2]}" in again
    assert f"\nagain: {again}\n" in message
    ((clause, case, _, _),) = judged(shlex.split(again)[1:], tmp_path / "again")
    assert (clause, case) == (CLAUSES[2], "ddp-w2")


def test_what_fails_alone_has_the_line_that_it_always_had(tmp_path: Path):
    mine = tmp_path / "mine.py"
    mine.write_text(f"LAST = 0\n{KEEPS_STATE}", encoding="utf-8")
    found = judged(
        ["-m", "spec_tests", "--impl", str(mine), "--clause", CLAUSES[0]], tmp_path / "first"
    )
    assert found
    for clause, _, again, message in found:
        assert again == f"python -m spec_tests --impl {mine} --clause {clause}"
        assert "fresh ranks" not in message

"""A failing case is tried again, on gloo or alone on fresh ranks; the message says what came of it.

Where no ranks can be simulated, that is said.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_tests import impls
from spec_tests.rig import plugin
from spec_tests.rig.clause import Clause
from spec_tests.rig.judge import replay, runner
from spec_tests.rig.ledger import load_all
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks.world import World, Worlds
from spec_tests.rig.report.eventlog import read_log
from spec_tests.rig.sim import Schedule
from spec_tests.tests.rig.helpers import python

CLAUSES = {clause.id: clause for clause in load_all()}


def note(worlds: Worlds, clause: Clause, impostor: str, **case: Any) -> str:
    """What the replay says about an impostor that the clause rejects on sim."""
    faulty = worlds.world(2, impls.parse(f"impostor:{impostor}"), transport="sim")
    with pytest.raises(Exception) as caught, replay.telling(clause, case, faulty):
        clause.test(world=faulty, **case)
    return str(caught.value.__notes__[-1])


def test_a_finding_that_gloo_shows_too_is_told_with_what_gloo_says(worlds: Worlds):
    clause = CLAUSES["ddp.gradients.mean"]
    said = note(worlds, clause, "ddp.sum-for-mean", subject="ddp", situation="mlp: backward 0")
    assert said.startswith("replayed on gloo: failed as well: rank 0, 'first.weight'")


def test_a_finding_that_only_a_schedule_shows_passes_on_gloo(worlds: Worlds):
    clause = CLAUSES["ddp.schedule.waits-for-every-launch"]
    said = note(worlds, clause, "ddp.waits-for-last-only", subject="ddp_bucketed")
    assert said.startswith("replayed on gloo: ")
    assert said.endswith("; live ranks take no schedule")


def test_of_a_property_the_shrunk_example_is_replayed(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
):
    def keep(clause: Clause, values: dict[str, Any], world: World) -> str:
        seen.append(values)
        return "replayed"

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(replay, "_on_gloo", keep)
    clause = CLAUSES["ddp.schedule.same-gradients"]
    note(worlds, clause, "ddp.gathers-by-completion", subject="ddp_bucketed")
    (values,) = seen
    assert values["subject"] == "ddp_bucketed"
    assert isinstance(values["schedule"], Schedule)


def test_what_passes_is_not_replayed(worlds: Worlds, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replay, "_on_gloo", lambda *_: pytest.fail("replayed"))
    clause = CLAUSES["ddp.gradients.mean"]
    world = worlds.world(2, impls.parse("solution"), transport="sim")
    with replay.telling(clause, {}, world):
        clause.test(world=world, subject="ddp", situation="mlp: backward 0")


def test_a_torch_without_a_hook_is_told_and_clauses_of_schedules_are_not_judged(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(torch._C._distributed_c10d, "FakeProcessGroup")
    clause = CLAUSES["ddp.schedule.waits-for-every-launch"]
    found = runner.run_case(clause, impls.parse("solution"), {"world": 2, "subject": "ddp"}, worlds)
    assert found.outcome is Outcome.NOT_HERE
    assert "lacks ..._distributed_c10d.FakeProcessGroup" in found.message


def test_a_run_on_sim_falls_back_to_gloo_and_says_why(monkeypatch: pytest.MonkeyPatch):
    options = {"--impl": ["solution"], "--transport": "sim", "--points": None, "--level": None}
    config = SimpleNamespace(getoption=options.get)
    assert plugin._make_run(config).transport == "sim"  # type: ignore[arg-type]  # all that it asks for
    monkeypatch.delattr(torch._C._distributed_c10d, "FakeProcessGroup")
    run = plugin._make_run(config)  # type: ignore[arg-type]  # likewise
    assert (run.transport, run.worlds.transport) == ("gloo", "gloo")
    (notice,) = run.notices
    assert "lacks ..._distributed_c10d.FakeProcessGroup: judged on gloo instead of sim" in notice


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
NEEDED = ("ddp.gradients.mean", "ddp.gradients.tied-parameter", "ddp.gradients.frozen-stay-none")


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
    selected = [word for name in NEEDED for word in ("--clause", name)]
    command = ["-m", "spec_tests", "--impl", str(mine), *selected]
    ((clause, case, again, message),) = judged(command, tmp_path / "first")
    first = (clause, case)
    assert clause in NEEDED
    assert "\nalone on fresh ranks this case passed: it fails after other cases" in message
    assert again.endswith(f"--clause {clause}")
    assert again.count("--clause") > 1
    assert f"\nagain: {again}\n" in message
    ((clause, case, _, _),) = judged(shlex.split(again)[1:], tmp_path / "again")
    assert (clause, case) == first
    assert judged([*command, "--fresh"], tmp_path / "fresh") == []


def test_what_fails_alone_has_the_line_that_it_always_had(tmp_path: Path):
    mine = tmp_path / "mine.py"
    mine.write_text(f"LAST = 0\n{KEEPS_STATE}", encoding="utf-8")
    found = judged(
        ["-m", "spec_tests", "--impl", str(mine), "--clause", NEEDED[0]], tmp_path / "first"
    )
    assert found
    for clause, _, again, message in found:
        assert again == f"python -m spec_tests --impl {mine} --clause {clause}"
        assert "fresh ranks" not in message

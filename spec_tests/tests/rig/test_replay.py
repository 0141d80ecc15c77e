"""A failing case is tried again, on gloo or alone on fresh ranks; the message says what came of it.

Where no ranks can be simulated, that is said. On the same ranks it is run once more: what differs
from run to run is the whole finding.
"""

from __future__ import annotations

import shlex
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_tests import impls
from spec_tests.rig import plugin
from spec_tests.rig.clause import Clause
from spec_tests.rig.judge import repeat, replay, runner
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks.errors import DIFFERS, RankRaised
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.report.eventlog import read_log
from spec_tests.rig.sim import shared
from spec_tests.tests.rig.helpers import MEAN, clause_named, python


def note(worlds: Worlds, clause: Clause, impostor: str, **case: Any) -> str:
    """What the replay says about an impostor that the clause rejects on sim."""
    faulty = worlds.world(2, impls.parse(f"impostor:{impostor}"), transport="sim")
    with pytest.raises(Exception) as caught, replay.telling(clause, case, faulty):
        clause.test(world=faulty, **case)
    return str(caught.value.__notes__[-1])


def test_a_finding_that_gloo_shows_too_is_told_with_what_gloo_says(worlds: Worlds):
    clause = clause_named("ddp.gradients.mean")
    said = note(worlds, clause, "ddp.sum-for-mean", subject="ddp", situation="mlp: backward 0")
    assert said.startswith("replayed on gloo: failed as well: rank 0, 'first.weight'")


def test_a_finding_that_only_a_schedule_shows_passes_on_gloo(worlds: Worlds):
    clause = clause_named("ddp.schedule.waits-for-every-launch")
    said = note(worlds, clause, "ddp.waits-for-last-only", subject="ddp_bucketed")
    assert said.startswith("replayed on gloo: ")
    assert said.endswith("; live ranks take no schedule")


# Of each process: who came first. Simulated ranks are of one process.
SHARES_STATE = """
import torch.distributed as dist

first = {}


def ddp(module, *, process_group=None):
    return module


def finish_gradient_synchronization(wrapped):
    for parameter in wrapped.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
        parameter.grad += first.setdefault("rank", dist.get_rank()) != dist.get_rank()
"""


def test_what_only_simulated_ranks_show_of_modules_with_state_is_not_judged(
    worlds: Worlds, tmp_path: Path
):
    (file := tmp_path / "mine.py").write_text(SHARES_STATE)
    clause, case = MEAN, {"subject": "ddp", "situation": "mlp: backward 0"}
    world = worlds.world(2, impls.parse(str(file)), transport="sim")
    said = "not here: simulated ranks are of one process, and share mine.py:4: `first = {}`"
    with pytest.raises(unittest.SkipTest, match=said), replay.telling(clause, case, world):
        clause.test(world=world, **case)


FORGETS_TO_WAIT = SHARES_STATE.replace(
    'parameter.grad += first.setdefault("rank", dist.get_rank()) != dist.get_rank()',
    "first[id(parameter)] = dist.all_reduce(parameter.grad.clone(), async_op=True)",
)


def test_work_that_nobody_waits_for_is_a_finding_whatever_modules_keep(
    worlds: Worlds, tmp_path: Path
):
    (file := tmp_path / "mine.py").write_text(FORGETS_TO_WAIT)
    clause, case = MEAN, {"subject": "ddp", "situation": "mlp: backward 0"}
    world = worlds.world(2, impls.parse(str(file)), transport="sim")
    # What is skipped would skip this test.
    with pytest.raises((RankRaised, unittest.SkipTest), match="raised UnwaitedWork"):
        with replay.telling(clause, case, world):
            clause.test(world=world, **case)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("n = 0\ndef f():\n    global n\n    n += 1\n", "mine.py:3: `n`"),
        ("seen: dict = {}\ndef f(x):\n    seen[x] = 1\n", "mine.py:1: `seen: dict = {}`"),
        ("numbers = count(1)\ndef f():\n    return next(numbers)\n", "numbers = count(1)"),
        ("names = set(('a',))\nempty = []\ndef f(x):\n    return x in names, empty\n", ""),
        ("def f(:\n", ""),
        ("# coding: latin-1\na = '\xe4'\ns = []\ndef f(x):\n    s.append(x)\n", "mine.py:3: `s"),
    ],
)
def test_state_in_a_module_is_what_a_function_changes(tmp_path: Path, text: str, state: str):
    (file := tmp_path / "mine.py").write_bytes(text.encode("latin-1"))
    found = shared.state_of(impls.parse(str(file)))
    assert (state in found) if state else found == ""


def test_a_torch_without_a_hook_is_told_and_clauses_of_schedules_are_not_judged(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(torch._C._distributed_c10d, "FakeProcessGroup")
    clause = clause_named("ddp.schedule.waits-for-every-launch")
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
NEEDED = ("ddp.gradients.frozen-stay-none", "ddp.gradients.called-by-keyword")
"""On three ranks each, in one case."""


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
    mine.write_text(f"LAST = 1\n{KEEPS_STATE}", encoding="utf-8")
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


# ---------------------------------------------------------------------- once more on the same ranks


CASE = {"subject": "ddp", "situation": "mlp: backward 0"}

DDP = """
import torch.distributed as dist

calls, works = [], []


def ddp(module, *, process_group=None):
    calls.append(module)
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, src=0)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    return module


def reduce(parameter):
    REDUCE


def finish_gradient_synchronization(wrapped):
    while works:
        works.pop().wait()
"""
# Doubled, so that it is wrong whenever the division comes.
DIVIDED_IN_FLIGHT = """
    parameter.grad *= 2
    works.append(dist.all_reduce(parameter.grad, async_op=True))
    parameter.grad /= dist.get_world_size()
"""
SUMMED = "works.append(dist.all_reduce(parameter.grad, async_op=True))"
COUNTED = "parameter.grad *= len(calls)"


def found(
    worlds: Worlds, folder: Path, reduce: str, clause: Clause = MEAN, **case: Any
) -> Exception:
    """What a clause says of DDP with this hook, after a second run."""
    mine = folder / "mine.py"
    mine.write_text(DDP.replace("REDUCE", reduce.strip()), encoding="utf-8")
    world = worlds.world(3, impls.parse(str(mine)))
    case = case or CASE
    telling = repeat.Repeats().telling(clause, {**case, "world": 3}, world)
    with pytest.raises(Exception) as caught, telling:
        clause.test(world=world, **case)
    return caught.value


def test_what_is_written_in_flight_differs_and_simulated_ranks_prove_it(
    worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Whether two runs differ is chance on live ranks; that they do is given here.
    runs = iter(["[x]  Y.\nrank 1, 'b' (3,): expected z\nlargest error 5 at (0,)"])
    monkeypatch.setattr(repeat, "_run", lambda *_: next(runs))
    said = str(found(worlds, tmp_path, DIVIDED_IN_FLIGHT)).splitlines()
    assert said[1] == DIFFERS
    assert said[2].startswith("one run: rank 0, '")
    assert said[2].endswith("another: rank 1, 'b' (3,) is off by 5")
    assert "on simulated ranks: " in said[3]
    assert "wrote to a buffer that will receive the result" in said[3]
    assert [line[:7] for line in said[4:]] == ["given: "], "no other story"


@pytest.mark.parametrize("name", ["ddp.gradients.mean", "ddp.training.equals-full-batch"])
def test_what_is_the_same_twice_is_told_as_before(worlds: Worlds, tmp_path: Path, name: str):
    """Of a property the second run has the values that were drawn: others differ."""
    case = CASE if name == "ddp.gradients.mean" else {"subject": "ddp"}
    said = str(found(worlds, tmp_path, SUMMED, clause_named(name), **case))
    assert "likely: summed and not divided by the world size" in said
    assert "differs" not in said


def test_state_that_changes_from_call_to_call_is_no_race(worlds: Worlds, tmp_path: Path):
    """Its second run differs as well, and on fresh ranks in the same way."""
    said = str(found(worlds, tmp_path, COUNTED))
    assert "expected the mean gradient" in said
    assert "differs" not in said

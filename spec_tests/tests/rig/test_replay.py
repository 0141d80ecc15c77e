"""A failing case is tried again, on gloo or alone on fresh ranks; the message says what came of it.

Where no ranks can be simulated, that is said. On the same ranks it is run once more: what differs
from run to run is the whole finding.
"""

from __future__ import annotations

import re
import shlex
import unittest
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_tests import impls
from spec_tests.rig import judge, plugin
from spec_tests.rig.judge import replay, runner
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks.errors import DIFFERS, RankRaised
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.report.eventlog import read_log
from spec_tests.rig.sim import shared
from spec_tests.rig.target import Target
from spec_tests.tests.rig.helpers import MEAN, clause_named, python

CASE = {"subject": "ddp", "situation": "mlp: backward 0"}


@pytest.mark.parametrize(
    ("impostor", "clause", "case", "said"),
    [
        (
            *("ddp.sum-for-mean", "ddp.gradients.mean", CASE),
            r"failed as well: rank 0, 'first\.weight'",
        ),
        (
            *("ddp.waits-for-last-only", "ddp.schedule.waits-for-every-launch"),
            *({"subject": "ddp_bucketed"}, r".*; live ranks take no schedule$"),
        ),
    ],
)
def test_a_finding_of_simulated_ranks_is_told_with_what_gloo_says(
    worlds: Worlds, impostor: str, clause: str, case: dict[str, str], said: str
):
    faulty = worlds.world(2, impls.parse(f"impostor:{impostor}"), transport="sim")
    rejecting = clause_named(clause)
    with pytest.raises(Exception) as caught, replay.Replays().telling(rejecting, case, faulty):
        rejecting.test(world=faulty, **case)
    assert re.match(f"replayed on gloo: {said}", caught.value.__notes__[-1])


# A dictionary of each process, of which simulated ranks have one.
DDP = """
import os, time
import torch.distributed as dist

first = {}


def ddp(module, *, process_group=None):
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, src=0)
    return module


def finish_gradient_synchronization(wrapped):
    for parameter in wrapped.parameters():
        """
SUMMED = "dist.all_reduce(parameter.grad)"
COUNTED = "first[len(first)] = parameter; parameter.grad *= len(first)"
# Doubled, so that it is wrong whenever the division comes.
DIVIDED_IN_FLIGHT = """parameter.grad *= 2
        work = dist.all_reduce(parameter.grad, async_op=True)
        parameter.grad /= dist.get_world_size()
        work.wait()
"""
MEANT = f"{SUMMED}; parameter.grad /= dist.get_world_size(); "
SHARED = 'parameter.grad += first.setdefault("rank", dist.get_rank()) != dist.get_rank()'
POLLED = """open(f"{__file__}.{dist.get_rank()}", "w").close()
        while not os.path.exists(f"{__file__}.{1 - dist.get_rank()}"):
            time.sleep(0.01)
"""
FORGOTTEN = "first[id(parameter)] = dist.all_reduce(parameter.grad.clone(), async_op=True)"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (SHARED, "not here: simulated ranks are of one process, and share mine.py:5: `first = {}`"),
        (POLLED, "not here: simulated ranks take turns: one waits for others outside of a"),
        (FORGOTTEN, "raised UnwaitedWork"),  # whatever modules keep
    ],
)
def test_what_only_simulated_ranks_show_of_modules_with_state_is_not_judged(
    worlds: Worlds, mine, line: str, said: str
):
    world = worlds.world(2, mine(DDP + MEANT + line), transport="sim")
    # What is skipped would skip this test.
    with pytest.raises((RankRaised, unittest.SkipTest), match=said):
        with replay.Replays().telling(MEAN, CASE, world):
            MEAN.test(world=world, **CASE)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("n = 0\ndef f():\n    global n\n    n += 1\n", "mine.py:3: `n`"),
        ("seen: dict = {}\ndef f(x):\n    seen[x] = 1\n", "mine.py:1: `seen: dict = {}`"),
        ("numbers = count(1)\ndef f():\n    return next(numbers)\n", "numbers = count(1)"),
        (
            "class A:\n    ids = count()\n    def f(self):\n        self.i = next(A.ids)\n",
            "mine.py:2",
        ),
        ("class A:\n    n = 0\n    def f(self):\n        A.n += 1\n", "mine.py:4: `A.n`"),
        ("@lru_cache(None)\ndef group(ranks): ...\n", "mine.py:2: `@lru_cache(None)`"),
        ("ids, seen = count(), {}\ndef f(x):\n    seen[x] = 1\n", "mine.py:1: `ids, seen"),
        ("from beside import f\n", "beside.py:1: `kept = []`"),
        ("import framework.part\n", "part.py:1: `kept = []`"),
        ("import tool\n", ""),
        ("import sys, torch\n", ""),
        ("class A:\n    def f(self):\n        self.n = []; self.n.append(1)\n", ""),
        ("names = set(('a',))\ndef f(x):\n    return x in names, []\n", ""),
        ("def f(:\n", ""),
        ("# coding: latin-1\na = '\xe4'\ns = []\ndef f(x):\n    s.append(x)\n", "mine.py:3: `s"),
    ],
)
def test_state_in_a_module_is_what_is_there_to_be_changed(tmp_path: Path, text: str, state: str):
    (file := tmp_path / "mine.py").write_bytes(text.encode("latin-1"))
    (tmp_path / "far").mkdir()
    (part := tmp_path / "far" / "part.py").write_text("kept = []\ndef f(x): kept.append(x)\n")
    (tmp_path / "beside.py").write_bytes(part.read_bytes())
    (ranks := tmp_path / "far" / "ranks.py").write_text("import torch.distributed as dist\n")
    names = ("framework.part", "torch.part", "sys", "other", "tool")
    modules = {name: str(part) for name in names} | {"framework": str(ranks), "torch": str(ranks)}
    found = shared.state_of(impls.parse(str(file)), modules)
    assert (state in found) if state else found == ""


def test_a_torch_without_a_hook_is_told_and_clauses_of_schedules_are_not_judged(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
):
    clause = clause_named("ddp.schedule.waits-for-every-launch")  # imports what is deleted here
    monkeypatch.delattr(torch._C._distributed_c10d, "FakeProcessGroup")
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


# Of each process: the calls of `ddp` after the first double the gradients.
KEEPS_STATE = """
from torch.nn.parallel import DistributedDataParallel

calls = []


def ddp(module, *, process_group=None):
    calls.append(module)
    for parameter in module.parameters() if len(calls) > 1 else ():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: 2 * gradient)
    return DistributedDataParallel(module, process_group=process_group)


def clip_grad_norm_(parameters, max_norm, norm_type=2.0, *, error_if_nonfinite=False):
    return None
"""
NEEDED = ("ddp.gradients.frozen-stay-none", "ddp.gradients.called-by-keyword")
"""On three ranks each, in one case."""
WRONG = "clip.norm.any-iterable"
"""In one case as well."""


def judged(arguments: list[str], folder: Path) -> dict[str, tuple[str, str, str]]:
    """By clause, case, command and message of what did not pass or was not offered."""
    python(*arguments, "--report", str(folder))
    return {
        event["clause"]: (event["case"], event["rerun"], event["message"])
        for event in read_log(folder / "events.jsonl")
        if event["event"] == "result" and event["outcome"] not in ("passed", "not_offered")
    }


def test_what_fails_only_after_other_cases_says_so_and_fails_again(tmp_path: Path):
    mine = tmp_path / "mine.py"
    mine.write_text(KEEPS_STATE, encoding="utf-8")
    selected = [word for name in (*NEEDED, WRONG) for word in ("--clause", name)]
    command = ["-m", "spec_tests", "--impl", str(mine), *selected]
    found = judged(command, tmp_path / "first")
    _, again, message = found.pop(WRONG)
    assert again == f"python -m spec_tests --impl {mine} --clause {WRONG}"
    assert "fresh ranks" not in message
    ((clause, (case, again, message)),) = found.items()
    assert clause in NEEDED
    assert "\nalone on fresh ranks this case passed: it fails after other cases" in message
    assert again.endswith(f"--clause {clause}")
    assert again.count("--clause") > 1
    assert f"\nagain: {again}\n" in message
    assert judged(shlex.split(again)[1:], tmp_path / "again")[clause][0] == case
    assert judged([*command, "--fresh"], tmp_path / "fresh").keys() == {WRONG}


# ---------------------------------------------------------------------- once more on the same ranks


def found(worlds: Worlds, which: Target, id: str = MEAN.id, case: Mapping[str, Any] = CASE) -> str:
    """What a clause says of an implementation after a second run."""
    world, clause = worlds.world(3, which), clause_named(id)
    telling = replay.Replays().telling(clause, {**case, "world": 3}, world)
    # Its own, or words of a case that was judged before in this process are told with it.
    with judge.judging(judge.Situation()), pytest.raises(Exception) as caught, telling:
        clause.test(world=world, **case)
    return str(caught.value)


def test_what_is_written_in_flight_differs_and_simulated_ranks_prove_it(
    worlds: Worlds, mine, monkeypatch: pytest.MonkeyPatch
):
    # Whether two runs differ is chance on live ranks; that they do is given here.
    runs = iter(["[x]  Y.\nrank 1, 'b' (3,): expected z\nlargest error 5 at (0,)"])
    monkeypatch.setattr(replay, "_run", lambda *_: next(runs))
    said = found(worlds, mine(DDP + DIVIDED_IN_FLIGHT)).splitlines()
    assert said[1] == DIFFERS
    assert said[2].startswith("one run: rank 0, '")
    assert said[2].endswith("another: rank 1, 'b' (3,) is off by 5")
    assert "on simulated ranks: " in said[3]
    assert "wrote to a buffer that will receive the result" in said[3]
    assert [line[:7] for line in said[4:]] == ["given: "], "no other story"


@pytest.mark.parametrize(
    ("line", "clause", "case", "told"),
    [
        (SUMMED, MEAN.id, CASE, "likely: summed and not divided by the world size\n"),
        # The second run of a property has the values that were drawn: others differ.
        (SUMMED, "ddp.training.equals-full-batch", {"subject": "ddp"}, "likely: summed and not"),
        # The second run of what counts differs as well, and on fresh ranks in the same way.
        (COUNTED, MEAN.id, CASE, "expected the mean gradient"),
    ],
)
def test_what_is_the_same_twice_is_told_as_before(
    worlds: Worlds, mine, line: str, clause: str, case: dict[str, str], told: str
):
    said = found(worlds, mine(DDP + line), clause, case)
    assert told in said
    assert "differs" not in said

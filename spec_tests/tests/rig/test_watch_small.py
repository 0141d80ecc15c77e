"""`trainspec watch` on small scripts, with exactly the expected causes, and on faults of real ones.

With `--compare`: the first step and tensor where two runs of a script part.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from spec_tests.tests.rig.watched import PREAMBLE, SCRIPTS, Fault, Small, faults, small, told_by
from spec_tests.tests.rig.watched import __main__ as results
from spec_tests.tests.rig.watched.trial import run
from spec_tests.watch import compare
from spec_tests.watch.command import norms
from spec_tests.watch.norm import is_must
from spec_tests.watch.verdict import render


@pytest.mark.parametrize("case", small(), ids=lambda case: case.id)
def test_a_small_script_is_told_as_it_should_be(case: Small, tmp_path: Path):
    path, trainings = case.write(tmp_path), case.trainings
    outcome = run(path, case.world, options=case.options, trainings=trainings)
    screen = render(outcome.verdict)
    shown = f"{screen}\nstatus {outcome.status}\n{outcome.output[-3000:]}"
    causes = [(cause.finding.norm, is_must(cause.finding)) for cause in outcome.verdict.causes]
    assert [norm for norm, must in causes if must] == case.must, shown
    assert [norm for norm, must in causes if not must] == case.should, shown
    assert [words for words in case.says if words not in screen] == [], shown
    assert [words for words in case.hides if words in screen] == [], shown
    assert outcome.verdict.steps, shown
    assert not any(" failed" in each for each in outcome.verdict.unseen), shown


LIBRARY = """
import torch

class Trainer:
    def __init__(self, model):
        self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(self, batches):
        for batch in batches:
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
"""
USER = """
import sys; sys.path.insert(0, FOLDER)
import bigtrainer
trainer = bigtrainer.Trainer(net())
trainer.train([torch.randn(6, 8) for _ in range(3)])
"""


def test_the_line_of_a_library_s_loop_is_that_of_the_user_s_call(tmp_path: Path):
    package = tmp_path / "lib" / "site-packages" / "bigtrainer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LIBRARY)
    text = PREAMBLE.lstrip() + USER.lstrip().replace("FOLDER", repr(str(package.parent)))
    (tmp_path / "train.py").write_text(text)
    (cause,) = run(tmp_path / "train.py", 2).verdict.causes
    assert cause.finding.norm == "watch.batches.distinct"
    assert cause.finding.place == f"train.py:{len(text.splitlines())}"


# --------------------------------------------------------------------------- faults of real scripts


# One of each norm that no small script shows; `python -m spec_tests.tests.rig.watched` tries all.
BY_SMALL = {norm for case in small() for norm in (*case.must, *case.should)}
_SHOWN = [f for f in faults() if f.check not in BY_SMALL and not (f.missed or f.needs or f.spare)]
TOLD = {fault.check: fault for fault in _SHOWN}.values()
PAGE = results.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("fault", TOLD, ids=lambda fault: fault.id)
def test_a_fault_is_named(fault: Fault):
    outcome = results.try_fault(fault)
    shown = f"{render(outcome.verdict)}\nstatus {outcome.status}\n{outcome.output[-3000:]}"
    assert fault.check in outcome.norms, shown
    first = outcome.verdict.causes[0].finding
    assert "rank" in first.text
    assert first.place or first.likely
    kept = results.rows_of(PAGE)[fault.id]
    again = f"python -m spec_tests.tests.rig.watched --only {fault.id}"
    assert said(results.fault_row(fault, outcome)) == said(kept), f"again: {again}"


def said(row: str) -> list[str]:
    """Return whether a fault was told, in which step, and by which norm."""
    _, _, told, step, words, _ = row.split("|", 5)
    return [told, step, words.partition(":")[0]]


def test_the_page_has_a_row_of_each_script_and_each_fault():
    rows = results.rows_of(PAGE)
    assert results.page(rows) == PAGE, "again: python -m spec_tests.tests.rig.watched"
    assert {*SCRIPTS, *(fault.id for fault in faults())} == rows.keys() - {"script", "fault"}
    assert results.summary(rows)[1]


def test_each_norm_is_shown_by_a_fault_or_by_a_small_script():
    assert {norm.id for norm in norms()} == {*told_by()} == BY_SMALL | {f.check for f in TOLD}


# ----------------------------------------------------------------------------------------- two runs


SCRIPT = (
    PREAMBLE
    + """
model = net()
{wrap}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
draws = torch.Generator().manual_seed(1)
for step in range(6):
    x = torch.randn(12, 8, generator=draws)
    if step == {odd}:
        x[0] *= 1.1
    nn.functional.cross_entropy(model(x[rank::size]), x[rank::size].argmax(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)
SHARDED = """
from torch.distributed.fsdp import fully_shard
[fully_shard(layer) for layer in model]; fully_shard(model)
"""


def script(folder: Path, wrap: str = "model = DDP(model)", odd: int = -1) -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(wrap=wrap, odd=odd).lstrip())
    return path


def test_a_run_is_compared_with_one_of_another_size_and_wrapper(tmp_path: Path):
    first = run(script(tmp_path), 2)
    (tmp_path / compare.FILE).write_text(json.dumps(first.records))
    options = ("--compare", str(tmp_path))
    same = run(script(tmp_path, SHARDED), 3, options=options).verdict
    assert same.status == 0, render(same)
    assert "compare: 6 steps agree with the earlier run: weights" in render(same)
    other = run(script(tmp_path, SHARDED, odd=3), 3, options=options).verdict
    assert other.status == 1
    assert "the first difference beyond rounding: step 4, loss" in render(other)


def steps(**changes: list[float | None]) -> list[compare.Record]:
    """Four steps of a run; `changes` are norms of a gradient, one for each step."""
    found: list[compare.Record] = []
    for number in range(4):
        norms = {"a": 1.0, "zero": 1e-9, "b": 0.3} | {n: v[number] for n, v in changes.items()}
        record: compare.Record = {"at": [0, number + 1], "loss": 2.0, "options": [[0.1, 0.0]]}
        record["gradients"] = {name: value for name, value in norms.items() if value is not None}
        found.append(record | {"weights": {}, "is_low": False})
    return found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"a": [1.0, 1 + 2e-6, 1 + 1e-5, 1 + 6e-5]}, ""),  # it grows as rounding does
        ({"zero": [1e-9, 3e-9, 0.0, 2e-9]}, ""),  # rounding is all that it has
        ({"a": [1.0, math.nan, 1.0, 1.0]}, "step 2, gradient of 'a', norm nan against 1"),
        ({"a": [1.0, 1.0, None, 1.0]}, "step 3, gradient of 'a', norm none against 1"),
        (
            {"a": [1, 1, 1.01, 1], "b": [0.3, 0.3, 0.33, 0.3]},
            "step 3, gradient of 'b', norm 0.33 against 0.3; before it: losses exactly, gradients "
            "exactly agree",
        ),
    ],
    ids=["grows", "noise", "nan", "none", "jumps"],
)
def test_what_is_larger_than_rounding_is_told(changes: dict[str, Any], said: str):
    parts, words = compare.compare(steps(**changes), steps())
    assert (parts, said in words) == (bool(said), True), words


def test_runs_without_a_common_step_and_folders_without_a_report_are_told(tmp_path: Path):
    assert compare.compare(steps(), []) == (True, "the runs have no step in common")
    with pytest.raises(Exception, match="expected a folder that watch --report wrote"):
        compare.earlier(str(tmp_path))

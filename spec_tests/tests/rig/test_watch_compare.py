"""`trainspec watch --compare`: the first step and tensor where two runs of a script part."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from spec_tests.tests.rig.watched.small import PREAMBLE
from spec_tests.tests.rig.watched.trial import run
from spec_tests.watch import compare
from spec_tests.watch.verdict import render

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


def steps(**changes: Any) -> list[compare.Record]:
    """Four steps of a run; `changes` are norms of a gradient, one for each step."""
    found: list[compare.Record] = []
    for number in range(4):
        all_of = {"a": 1.0, "zero": 1e-9, "b": 0.3} | {n: v[number] for n, v in changes.items()}
        gradients = {name: value for name, value in all_of.items() if value is not None}
        record: compare.Record = {"at": [0, number + 1], "loss": 2.0, "options": [[0.1, 0.0]]}
        record |= {"gradients": gradients, "weights": {}, "is_low": False}
        found.append(record)
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

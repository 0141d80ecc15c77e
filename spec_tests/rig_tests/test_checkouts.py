"""Solutions in the layouts of three courses, judged as their authors would: one command.

Those in `checkouts/` were written for these tests, one right and one faulty in each layout; what is
faulty passes the course's own tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spec_tests import target
from spec_tests.rig.eventlog import read_log
from spec_tests.rig.outcomes import cells, judge_run

ROOT = Path(__file__).parents[2]
CHECKOUTS = "spec_tests/rig_tests/checkouts"
CS336 = [f"cs336:{CHECKOUTS}/cs336_{name}" for name in ("2026", "2025", "faulty")]
EFFDL, COURSE = f"effdl:{CHECKOUTS}/effdl/fsdp.py", f"course:{CHECKOUTS}/course"


def judged(folder: Path, implementations: list[str], *clauses: str, level: str = "course"):
    """The events of one run, and its exit status."""
    chosen = [word for each in implementations for word in ("--impl", each)]
    chosen += [word for each in clauses for word in ("--clause", each)]
    # A run within a run of xdist would take itself for a worker.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    ended = subprocess.run(
        [sys.executable, "-m", "spec_tests", *chosen, "--level", level, "--report", str(folder)],
        cwd=ROOT,
        env=kept,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert (folder / "events.jsonl").is_file(), ended.stdout + ended.stderr
    return read_log(folder / "events.jsonl"), ended.returncode


def outcomes(events, implementation: str) -> dict[str, list[str]]:
    """Outcome to the clauses that came to it."""
    found: dict[str, list[str]] = {}
    for cell in cells(events):
        if cell.implementation == implementation:
            found.setdefault(str(cell.outcome), []).append(cell.clause)
    return found


def messages(events) -> dict[str, str]:
    """Clause to what was said of the last case that failed."""
    return {e["clause"]: e["message"] for e in events if e.get("outcome") == "failed"}


@pytest.fixture(scope="module")
def cs336(tmp_path_factory: pytest.TempPathFactory):
    """What became of the three checkouts of CS336."""
    return judged(
        tmp_path_factory.mktemp("cs336"),
        CS336,
        "ddp.construction.forward-is-unchanged",
        "ddp.gradients.frozen-stay-none",
        "zero1.state.divided",
        "zero1.groups.live",
        "fsdp.precision.computes-in-its-dtype",
        "fsdp.footprint.shards-alone-stay",
        "attention.*.values",
    )


def test_a_right_checkout_of_2026_passes_what_its_course_asks(cs336):
    events, _ = cs336
    found = outcomes(events, CS336[0])
    assert found.keys() == {"passed"}
    assert len(found["passed"]) == 8
    # What raises NotImplementedError is not offered, and hides nothing beside it.
    alone = [e for e in events if e.get("implementation") == CS336[0] and e["event"] == "result"]
    assert {e["outcome"] for e in alone if "triton" in e["case"]} == {"not_offered"}
    assert {e["outcome"] for e in alone if "ddp_bucketed" in e["case"]} == {"not_offered"}


def test_the_hooks_of_2025_are_called_where_a_batch_begins_and_ends(cs336):
    events, _ = cs336
    found = outcomes(events, CS336[1])
    assert found.keys() == {"passed", "not_offered"}
    assert {clause.partition(".")[0] for clause in found["passed"]} == {"ddp"}
    cases = {
        e["case"]: e["outcome"]
        for e in events
        if e.get("implementation") == CS336[1] and e["clause"] == "ddp.gradients.frozen-stay-none"
    }
    assert cases == {"ddp-w2": "passed", "ddp_bucketed-w2": "passed"}


def test_what_the_courses_own_tests_let_pass_is_found(cs336):
    events, status = cs336
    assert outcomes(events, CS336[2])["failed"] == [
        "ddp.gradients.frozen-stay-none",
        "zero1.state.divided",
        "fsdp.footprint.shards-alone-stay",
        "fsdp.precision.computes-in-its-dtype",
    ]
    said = messages(events)
    assert "local gradient: it was never reduced" in said["ddp.gradients.frozen-stay-none"]
    assert "nothing is divided" in said["zero1.state.divided"]
    assert status == judge_run(events).status == 1


def broken(source: Path, old: str, new: str) -> str:
    """A file with one place of it changed."""
    text = source.read_text(encoding="utf-8")
    assert text.count(old) == 1
    return text.replace(old, new)


def test_one_file_of_efficient_dl_runs_without_cuda_and_a_faulty_one_is_found(tmp_path: Path):
    right = ROOT / CHECKOUTS / "effdl" / "fsdp.py"
    summed = broken(right, "op=dist.ReduceOp.AVG", "op=dist.ReduceOp.SUM")
    (tmp_path / "fsdp.py").write_text(summed, encoding="utf-8")
    faulty = f"effdl:{tmp_path}"
    clauses = ("fsdp.forward.equals-plain", "fsdp.precision.computes-*", "fsdp.backward.mean-*")
    events, status = judged(tmp_path / "out", [EFFDL, faulty], *clauses)
    assert outcomes(events, EFFDL).keys() == {"passed"}
    assert outcomes(events, faulty)["failed"] == ["fsdp.backward.mean-gradient"]
    assert "summed and not divided" in messages(events)["fsdp.backward.mean-gradient"]
    assert status == 1


def test_the_parts_of_the_ddp_course_are_judged_and_a_faulty_one_is_found(tmp_path: Path):
    faulty = shutil.copytree(ROOT / CHECKOUTS / "course", tmp_path / "course")
    for name, change in {
        "data/distributed_data_loader.py": ("self.rank * self.local_batch_size", "0"),
        "train/distributed_trainer.py": ("micro_batch_size * world_size", "micro_batch_size"),
    }.items():
        (faulty / name).write_text(broken(faulty / name, *change), encoding="utf-8")
    named = f"course:{faulty}"
    clauses = ("data.*", "models.*", "training.accumulation.*", "training.records.*")
    events, status = judged(tmp_path / "out", [COURSE, named], *clauses)
    found = outcomes(events, COURSE)
    assert found.keys() == {"passed"}, "PyTorch's wrapper is lent to it, and not judged"
    assert len(found["passed"]) == 9
    assert outcomes(events, named)["failed"] == [
        "data.partition.ranks-differ",
        "training.accumulation.fills-the-global-batch",
    ]
    assert status == 1


# ------------------------------------------------------------------------------------- the words


@pytest.mark.parametrize("words", [*CS336, EFFDL, COURSE])
def test_a_layout_is_named_with_its_course(words: str):
    found = target.parse(words)
    layout, _, path = words.partition(":")
    assert (found.name, found.layout, found.path) == (words, layout, (ROOT / path).resolve())


@pytest.mark.parametrize("layout", target.LAYOUTS)
def test_a_folder_without_the_files_of_its_layout_is_refused(tmp_path: Path, layout: str):
    for path in (tmp_path, tmp_path / "nowhere", ""):
        with pytest.raises(ValueError) as caught:
            target.parse(f"{layout}:{path}")
        assert f"expected {layout}:PATH, a folder that holds " in str(caught.value)
        assert target.LAYOUTS[layout][0] in str(caught.value)

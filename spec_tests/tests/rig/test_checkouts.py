"""Solutions in the layouts of three courses, judged as their authors would: a command for each.

Those in `checkouts/` were written for these tests, a right one in each layout. The faulty ones are
made of these, and pass the course's own tests.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from spec_tests import impls
from spec_tests.rig.outcomes import cells, judge_run
from spec_tests.rig.report import points
from spec_tests.rig.report.eventlog import read_log
from spec_tests.tests.rig.helpers import (
    CHECKOUTS,
    checkout_of_2025,
    faulty_checkout,
    python,
    replaced,
)

PLACE = "spec_tests/tests/rig/checkouts"  # from the repository's root
CS336, EFFDL = f"cs336:{PLACE}/cs336_2026", f"effdl:{PLACE}/effdl/fsdp.py"
COURSE = f"course:{PLACE}/course"

FSDP = (
    "fsdp.backward.mean-gradient",
    "fsdp.precision.computes-in-its-dtype",
    "fsdp.precision.gathers-in-its-dtype",
    "fsdp.footprint.shards-alone-stay",
)
CLAUSES = {
    "cs336": (
        *FSDP,
        "ddp.gradients.frozen-stay-none",
        "zero1.state.divided",
        "zero1.groups.own-options",
        "fsdp.backward.replicated-rest",
        "attention.*.values",
        "attention.forward.lse-values",
        "attention.shapes.without-heads",
    ),
    "effdl": FSDP,
    "course": (
        "ddp.gradients.frozen-stay-none",  # lent to it, so not offered
        "data.*",
        "models.*",
        "training.accumulation.fills-the-global-batch",
        "training.gradient.several-steps",
    ),
}
"""By course: the fewest clauses that show the right one passing and each fault found."""


def faulty_effdl(folder: Path) -> str:
    """The right file with a sum where the mean belongs."""
    shutil.copytree(CHECKOUTS / "effdl", folder)
    replaced(folder / "fsdp.py", ("op=dist.ReduceOp.AVG", "op=dist.ReduceOp.SUM"))
    return f"effdl:{folder}"


def faulty_course(folder: Path) -> str:
    """The right parts, where all ranks read the same rows and the number of ranks is forgotten."""
    shutil.copytree(CHECKOUTS / "course", folder)
    loader, trainer = "data/distributed_data_loader.py", "train/distributed_trainer.py"
    replaced(folder / loader, ("self.rank * self.local_batch_size", "0"))
    replaced(folder / trainer, ("micro_batch_size * world_size", "micro_batch_size"))
    return f"course:{folder}"


@pytest.fixture(scope="session")
def judged(tmp_path_factory: pytest.TempPathFactory):
    """A command for each course: all events, who is of 2025, and who the faulty ones are."""
    folder = tmp_path_factory.mktemp("checkouts")
    of_2025 = checkout_of_2025(folder / "cs336_2025")
    makers = {"cs336": faulty_checkout, "effdl": faulty_effdl, "course": faulty_course}
    faulty = [makers[course](folder / course) for course in CLAUSES]
    right = (CS336, of_2025), (EFFDL,), (COURSE,)
    events = []
    for course, own, wrong in zip(CLAUSES, right, faulty, strict=True):
        chosen = [word for each in (*own, wrong) for word in ("--impl", each)]
        chosen += ["--clause", ",".join(CLAUSES[course])]
        report = folder / f"{course}-report"
        flags = ["--level", "course", "--points", "cs336", "--report", str(report)]
        ended = python("-m", "spec_tests", *chosen, *flags, "--transport", "sim")
        assert (report / "events.jsonl").is_file(), ended.stdout + ended.stderr
        found = read_log(report / "events.jsonl")
        assert ended.returncode == judge_run(found).status == 1
        events += found
    return events, of_2025, faulty


def outcomes(events, implementation: str) -> dict[str, list[str]]:
    """Outcome to the clauses that came to it."""
    found: dict[str, list[str]] = {}
    for cell in cells(events):
        if cell.implementation == implementation:
            found.setdefault(str(cell.outcome), []).append(cell.clause)
    return found


def messages(events, implementation: str) -> dict[str, str]:
    """Clause to what was said of the last case that failed."""
    return {
        e["clause"]: e["message"]
        for e in events
        if e.get("implementation") == implementation and e.get("outcome") == "failed"
    }


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        (CS336, {"ddp", "zero1", "fsdp", "attention"}),
        ("", {"ddp"}),  # of 2025
        (EFFDL, {"fsdp"}),  # where there is no CUDA
        (COURSE, {"data", "models", "training"}),  # and not what is lent to it
    ],
)
def test_a_right_checkout_passes_what_its_course_asks(judged, words: str, passed: set[str]):
    found = outcomes(judged[0], words or judged[1])
    assert found.keys() == {"passed", "not_offered"}
    assert {clause.partition(".")[0] for clause in found["passed"]} == passed


def test_what_is_left_open_hides_nothing_beside_it_and_hooks_are_called(judged):
    # The hooks of 2025 are called where a batch begins and ends.
    for words, bucketed in ((CS336, "not_offered"), (judged[1], "passed")):
        passed = outcomes(judged[0], words)["passed"]
        alone = {
            e["case"]: e["outcome"]
            for e in judged[0]
            if e.get("implementation") == words and e["event"] == "result" and e["clause"] in passed
        }
        assert {alone[case] for case in alone if "triton" in case} <= {"not_offered"}
        assert {alone[case] for case in alone if "ddp_bucketed" in case} == {bucketed}


def test_attention_has_its_points_but_for_the_kernel_that_is_not_there(judged):
    found = points.score(judged[0], CS336)
    assert found is not None
    got = {item["name"]: item for item in found["items"]}
    assert got["FlashAttention-2, backward"]["points"] == 5
    forward = got["FlashAttention-2, forward"]
    assert forward["points"] == 0
    assert forward["missing"].keys() == {"attention.causal.values"}, "asked of kernels alone"
    assert found["of"] == 20, "the clauses of other items were not run"


def test_what_the_courses_own_tests_let_pass_is_found(judged):
    events, _, (cs336, effdl, course) = judged
    assert sorted(outcomes(events, cs336)["failed"]) == [
        "ddp.gradients.frozen-stay-none",
        "fsdp.footprint.shards-alone-stay",
        "fsdp.precision.computes-in-its-dtype",
        "fsdp.precision.gathers-in-its-dtype",
        "zero1.state.divided",
    ]
    said = messages(events, cs336)
    assert "local gradient: it was never reduced" in said["ddp.gradients.frozen-stay-none"]
    assert "nothing is divided" in said["zero1.state.divided"]

    assert outcomes(events, effdl)["failed"] == ["fsdp.backward.mean-gradient"]
    said = messages(events, effdl)
    assert "summed and not divided" in said["fsdp.backward.mean-gradient"]

    assert sorted(outcomes(events, course)["failed"]) == [
        "data.partition.ranks-differ",
        "training.accumulation.fills-the-global-batch",
        "training.gradient.several-steps",
    ]


# ------------------------------------------------------------------------------------- the words


@pytest.mark.parametrize("layout", impls.LAYOUTS)
def test_a_folder_without_the_files_of_its_layout_is_refused(tmp_path: Path, layout: str):
    for path in (tmp_path, tmp_path / "nowhere", ""):
        with pytest.raises(ValueError) as caught:
            impls.parse(f"{layout}:{path}")
        assert f"expected {layout}:PATH, a folder that holds " in str(caught.value)
        assert impls.LAYOUTS[layout][0] in str(caught.value)


def test_whoever_is_one_step_beside_a_checkout_is_told_where_it_is():
    """A checkout of 2024 holds the exercise in a folder below."""
    with pytest.raises(ValueError, match="give the folder 'cs336_2026' in it"):
        impls.parse(f"cs336:{CHECKOUTS}")
    with pytest.raises(ValueError, match=r"give cs336:.*cs336_2026$"):
        impls.parse(str(CHECKOUTS / "cs336_2026"))

"""The suite has teeth and bites nobody else: every impostor, the controls, the patches."""

import inspect
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec_tests import museum
from spec_tests.museum import command, matrix
from spec_tests.museum.card import Impostor
from spec_tests.museum.crew import Crew, Job, Verdict
from spec_tests.museum.patching import StalePatchError, forget, patched
from spec_tests.rig.ranks.world import Worlds

NEAR_MISSES = [card for card in museum.CATALOGUE.values() if not card.is_benign]
WEIGHS = "fsdp.programs.any-production-situation"
"""It looks at memory, which simulated ranks share: nobody weighs them."""
FROZEN = "ddp.gradients.frozen-stay-none"


@pytest.fixture(scope="session")
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    """A process per core, or one in a worker of xdist, each with worlds that nobody else uses."""
    size = 1 if hasattr(request.config, "workerinput") else os.cpu_count() or 1
    with Crew(size) as members:
        yield members


@pytest.fixture(scope="session")
def verdict_on(crew: Crew, request: pytest.FixtureRequest) -> Callable[[Impostor], Verdict]:
    """What came of a near-miss; those that this run will ask for are judged side by side.

    Three of four are tried on simulated ranks, which start faster. Live ranks try the rest, what
    ends or blocks a rank, what shows in memory, and what simulated ranks do not reject.
    """
    asked = [getattr(item, "callspec", None) for item in request.session.items]
    cards = [found.params["impostor"] for found in asked if found and "impostor" in found.params]
    # A worker of xdist knows the whole session and gets a part of it.
    ahead = [] if hasattr(request.config, "workerinput") else cards

    def begun(card: Impostor, *, is_live: bool = False) -> Future[Verdict]:
        is_live = is_live or zlib.crc32(card.id.encode()) % 4 == 0
        is_live = is_live or card.outcomes != ("failed",) or card.rejected_by == (WEIGHS,)
        return crew.submit(Job(card.id, repeat=1, transport="gloo" if is_live else "sim"))

    futures = {card.id: begun(card) for card in ahead}

    def verdict(card: Impostor) -> Verdict:
        found = (futures.get(card.id) or begun(card)).result()
        return begun(card, is_live=True).result() if found.complaints else found

    return verdict


@pytest.mark.parametrize("impostor", NEAR_MISSES, ids=lambda card: card.id)
def test_every_clause_that_an_impostor_names_rejects_it(verdict_on, impostor: Impostor):
    assert verdict_on(impostor).complaints == []


@pytest.mark.parametrize(
    ("id", "outcomes", "said"),
    [
        ("benign.plain", ("failed",), f"rejected by {FROZEN} (failed): all passed"),
        ("ddp.sum-for-mean", ("hang",), f"rejected by {FROZEN} (hang): failed"),
    ],
    ids=["right code", "a failure of another kind"],
)
def test_what_is_no_rejection_is_reported(own: Worlds, id: str, outcomes, said: str):
    accused = Impostor(id, "", "", "", (FROZEN,), outcomes=outcomes)
    (complaint,) = matrix.must_reject(matrix.rejections(accused, own))
    assert said in complaint


def test_a_crew_reports_what_is_wrong_and_goes_on(crew: Crew):
    right, wrong = "ddp.gradients.weights-untouched", "ddp.gradients.mean"
    jobs = [
        Job("ddp.no-such-impostor", repeat=1),
        Job("ddp.sum-for-mean", repeat=2, accepted_by=(right, wrong)),
        Job("benign.plain", accepted_by=(right,)),
    ]
    lost, accused, free = [crew.submit(job).result() for job in jobs]
    (complaint,) = lost.complaints
    assert complaint.startswith("ddp.no-such-impostor: ValueError: no impostor 'ddp.no-such-")
    (complaint,) = accused.complaints
    assert f"ddp.sum-for-mean must be accepted by {wrong}: failed" in complaint
    assert "likely: summed and not divided by the world size" in complaint
    assert (free.impostor, free.complaints) == ("benign.plain", [])


def test_margins_begin_with_the_clause_whose_tolerance_has_the_least_room():
    said = {
        "ddp.one": (
            {"ddp.wide": 1e9, "ddp.tight": 1.4, "ddp.missed": 0.9},
            ["ddp.noisy", "ddp.exact"],
        ),
        "ddp.two": ({"ddp.wide": 1e7}, []),
        "control.reference": ({"ddp.wide": 0.1, "ddp.noisy": 0.8, "ddp.missed": 0.5}, []),
    }
    verdicts = {
        name: Verdict(name, [], numbers, [*numbers, *exact], 0.0)
        for name, (numbers, exact) in said.items()
    }
    verdicts["control.reference"].complaints.append("control.reference must be accepted")

    def submit(job: Job) -> Any:
        assert {*job.accepted_by} == {*verdicts["ddp.one"].judged}
        return SimpleNamespace(result=lambda: verdicts[job.impostor])

    crew: Any = SimpleNamespace(submit=submit)
    lines, complaints = command.margins([verdicts["ddp.one"], verdicts["ddp.two"]], crew)
    assert [line.split() for line in lines[2:-1]] == [
        ["0.8", "-", "ddp.noisy", "(none", "was", "compared)"],
        ["-", "1.4", "ddp.tight", "(ddp.one)"],
        ["0.5", "-", "ddp.missed", "(none", "was", "compared)"],
        ["0.1", "1e+07", "ddp.wide", "(ddp.two)"],
    ]
    assert lines[-1].startswith("1 other clauses have no tolerance")
    assert complaints == ["control.reference must be accepted"]


def test_a_process_that_ends_is_an_error_that_names_the_impostor(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with Crew(1) as crew, pytest.raises(ChildProcessError, match=r"on ddp.lost, but .* ended with"):
        crew.submit(Job("ddp.lost")).result()


def test_a_card_names_clauses_that_exist_and_is_unrelated_to_other_chapters_alone():
    card = Impostor("ddp.lost", "", "", "", ("ddp.gradients.mean", "ddp.no.such"))
    with pytest.raises(ValueError, match=r"names clauses that do not exist: \['ddp.no.such'\]"):
        matrix.named_clauses(card)
    chapters = {clause.chapter for clause in matrix.unrelated_clauses(NEAR_MISSES[0], 999)}
    assert NEAR_MISSES[0].id.partition(".")[0] not in chapters


# ------------------------------------------------------------------------------------------ patches


@pytest.fixture
def victim(tmp_path: Path, monkeypatch) -> Iterator[str]:
    """The name of a module that nobody has imported."""
    name = "trainspec_victim_of_patches"
    (tmp_path / f"{name}.py").write_text("one = 1\ntwo = 1 + 1\nthree = 3\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_a_patch_changes_the_import_and_no_file(victim: str, tmp_path: Path):
    before = (tmp_path / f"{victim}.py").read_bytes()
    with patched(((victim, "three = 3", "three = 4"), (victim, "one = 1", "one = 5"))):
        module = __import__(victim)
    assert (module.one, module.two, module.three) == (5, 2, 4)
    assert "three = 4" in inspect.getsource(module), "Triton compiles this"
    assert (tmp_path / f"{victim}.py").read_bytes() == before
    sys.modules.pop(victim)
    assert __import__(victim).three == 3, "neither by way of cached bytecode"
    with pytest.raises(StalePatchError, match="already imported, too late to patch: trainspec"):
        with patched(((victim, "one = 1", "one = 2"),)):
            raise AssertionError("never entered")
    forget(victim)
    with patched(((victim, "one = 1", "one = 5"),)):
        assert __import__(victim).one == 5


@pytest.mark.parametrize(("find", "times"), [("four = 4", 0), ("1 +", 1), (" = 1", 2)])
def test_an_anchor_fits_exactly_once_or_the_patch_is_stale(victim: str, find: str, times: int):
    before = list(sys.meta_path)
    if times == 1:
        with patched(((victim, find, "2 +"),)):
            assert __import__(victim).two == 3
    else:
        said = f"expected '{find}' once, found it {times} times"
        with pytest.raises(StalePatchError, match=said), patched(((victim, find, "x"),)):
            __import__(victim)
    assert sys.meta_path == before, "no import hook is left behind"


def test_a_patch_of_what_nobody_imports_is_stale(victim: str):
    with pytest.raises(StalePatchError, match="never imported, so never patched: trainspec"):
        with patched(((victim, "one = 1", "one = 2"),)):
            pass

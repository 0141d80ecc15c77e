"""`repro`: a script shows the fault of a file, stops when the fault is mended, or words say why."""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from spec_tests.programs.repro import __main__ as command
from spec_tests.programs.repro.script import head_of, written
from spec_tests.programs.repro.situations import FOLDER, recipe_of, recipes_of
from spec_tests.rig import ledger
from spec_tests.tests.reference.launch import run_script
from spec_tests.tests.rig.helpers import forked

LINES = 115
RIGHT = "from spec_tests import plain\nfrom spec_tests.plain import *\n"
JUDGED = "data.partition.ranks-differ"
UNREDUCED = "finish_gradient_synchronization = lambda wrapped: None"
DOUBLED = "flash_attention = lambda *of, **how: 2 * plain.flash_attention(*of, **how)"
FAULTS = {
    "ddp.gradients.mean": UNREDUCED,
    "ddp.programs.any-situation": UNREDUCED,
    "attention.forward.values": DOUBLED,
    "zero1.step.equals-unsharded": "sharded_optimizer = lambda parameters, make, **how: "
    "plain.sharded_optimizer([*parameters][:1], make, **how)",
    "clip.norm.global": "clip_grad_norm_ = lambda *of, **how: 2 * plain.clip_grad_norm_(*of)",
    "data.partition.ranks-differ": "token_loader = lambda paths, **how: "
    "plain.token_loader(paths, **{**how, 'rank': 0})",
}
"""Clause to a line that makes right code wrong in a way that a script for the clause shows."""
SHOWN = (
    "ddp: mlp not-the-ends: backward 0, zero_grad zero, accumulate 1, both 2 3, finish, step",
    "ddp_bucketed: tied one: nested 2 3, leave, backward 4, zero_grad none, aside 5, backward 6, "
    "zero_grad none, begun 7, evaluate_apart 8, finish",
    "fully_shard: mlp nested freed: accumulate 0, backward 1, step, record 2, save, reshard, write "
    "local-tensors, evaluate 2, reshard, load copied, forward 3, pending, keep True, keep False, "
    "zero_grad none, early 4, backward 5",
    "sharded_optimizer: mlp adamw own-options: deal 0 all, update, rate 0.5, decay, add_group, "
    "freeze 1, thaw 1, zero_grad zero, deal 1 half, closure 2 deals, write one-parameter, state",
)
"""A function of PyTorch's and a situation in which it does what the world model says."""


def run_forked(text: str) -> tuple[int, str]:
    """As the command runs a script, without the import of torch."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run_script(text, Path(folder))
    assert "Traceback" not in ended.err.partition("Process ")[0], ended.err
    return ended.status, ended.out


def repro(tmp_path: Path, impl: str, clause: str) -> int:
    return command.main(["--impl", impl, "--clause", clause, str(tmp_path / "out")])


@pytest.mark.parametrize("clause", FAULTS)
def test_a_script_shows_the_fault_until_it_is_mended(
    clause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One clause is judged; the findings of the others are made up."""
    which = next(each for each in ledger.load_all() if each.id == clause)
    label, size = which.label(case := next(which.cases())), case["world"]
    message = f"[id]  S\nfound\nso\ngiven: mlp: backward 0, {label}, mine.py"
    finding = {"case": label, "world_size": size, "message": message}
    if clause == JUDGED:
        monkeypatch.setattr(subprocess, "run", forked)
    else:
        monkeypatch.setattr(command, "_finding", lambda impl, id: finding)
    monkeypatch.setattr(command, "_run", run_forked)
    mine = tmp_path / "mine.py"
    mine.write_text(RIGHT + FAULTS[clause])
    assert repro(tmp_path, str(mine), clause) == 0, capsys.readouterr().err
    (script,) = (tmp_path / "out").iterdir()
    assert str(script) in capsys.readouterr().out
    text = script.read_text()
    assert len(text.splitlines()) <= LINES
    assert "spec_tests" not in text.replace("python -m spec_tests", "")
    assert repro(tmp_path, str(mine), clause) == 2
    assert "something of that name" in capsys.readouterr().err

    mine.write_text(RIGHT)
    if clause != "ddp.gradients.mean":
        assert run_forked(text) == (0, "as expected\n")
        return
    words = [sys.executable, str(script)]  # as its reader runs it, with spawned ranks
    mended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (mended.returncode, mended.stdout) == (0, "as expected\n"), mended.stderr


@pytest.mark.parametrize(
    ("impl", "clause", "words"),
    [
        ("mine.py", "ddp.gradients.meen", "near it: ddp.gradients.mean"),
        ("mine.py", "ddp.schedule.same-gradients", "no template builds its situation"),
        ("mine.py", "training.loss.is-the-mean", "expected the id of one clause"),
        ("mine.py", "attention.forward.values", "could not be judged on"),
        ("mine.py", "ddp.gradients.frozen-stay-none", "nothing to show: "),
        ("nowhere.py", "ddp.gradients.mean", "expected a .py file"),
        ("impostor:ddp.sum-for-mean", "ddp.gradients.mean", "got an impostor"),
        ("plain", "ddp.gradients.mean", "got a part of this suite"),
    ],
)
def test_where_there_is_no_script_words_say_why(
    tmp_path: Path, monkeypatch, capsys, impl: str, clause: str, words: str
):
    monkeypatch.setattr(subprocess, "run", forked)
    (tmp_path / "mine.py").write_text(RIGHT.replace("*", "ddp, finish_gradient_synchronization"))
    given = str(tmp_path / impl) if impl.endswith(".py") else impl
    assert repro(tmp_path, given, clause) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_script_that_does_not_show_the_finding_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The finding is made up, and the file is right: every script exits with 0."""
    (tmp_path / "mine.py").write_text(RIGHT)
    finding = {"case": "flash_attention-w1", "world_size": 1, "message": "[id]  S\nfound\nso"}
    monkeypatch.setattr(command, "_finding", lambda impl, id: finding)
    monkeypatch.setattr(command, "_run", run_forked)
    assert repro(tmp_path, str(tmp_path / "mine.py"), "attention.forward.values") == 2
    assert "no small script shows this finding: 1 tried" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_every_recipe_is_of_a_clause_and_makes_a_short_script_that_compiles():
    made, clauses = 0, {clause.id: clause for clause in ledger.load_all()}
    tables = tomllib.loads((FOLDER / "verbs.toml").read_text())["clauses"].keys()
    assert tables <= clauses.keys()
    for clause in clauses.values():
        first = next(clause.cases(), {}).get("situation", "")
        for subject in clause.judges or clause.needs[:1] or ("",):
            for recipe in recipes_of(clause.id, subject, 2, first):
                head = head_of(clause.sentence, clause.id, "[id]  S\nrank 0: expected\nlikely: so")
                text = written(recipe, head, "mine", Path("folder", "mine.py"))
                compile(text, clause.id, "exec")
                assert len(text.splitlines()) <= LINES, clause.id
                assert "# only:" not in text
                assert "$" not in text
                made += 1
    assert made > 150


@pytest.mark.parametrize("line", SHOWN, ids=lambda line: line.partition(":")[0])
def test_a_script_of_a_right_program_of_every_verb_exits_with_0(line: str):
    """Of PyTorch's own, whose faults these programs do not meet."""
    subject, _, situation = line.partition(": ")
    text = written(recipe_of(situation, subject, 2, is_torchs=True), "Head.", is_short=False)
    assert run_forked(text) == (0, "as expected\n")

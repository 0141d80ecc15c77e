"""The findings that show where PyTorch deviates: complete, short; their scripts run alone."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spec_tests.rig import ledger
from spec_tests.rig.judge import expectations
from spec_tests.rig.repro import findings
from spec_tests.rig.target import PACKAGE_ROOT

FOLDER = PACKAGE_ROOT / "impls" / "torch_repros"
SCRIPTS = sorted(FOLDER.glob("*.py"))
DECLARED = expectations.load(PACKAGE_ROOT / "impls" / "torch.toml")
FAST = (
    "attention_causal_skips_hidden_tiles",
    "clip_norm_tied_once",
    "fsdp_lifecycle_fresh_after_step_kept",
    "fsdp_refusals_unequal_scalar",
    "zero1_groups_generators",
)
LINES = 95
HEAD = ("Expected", "Got", "Versions", "Clause")
WITHOUT = {
    "attention.shapes.empty": "torch 2.13 has mended it",
    "clip.nonfinite.error-on-all-ranks": "as clip.nonfinite.largest-of-nan",
    "fsdp.backward.unused-on-some-ranks": "two of its four cases have one; one hangs",
    "fsdp.footprint.part-of-a-list": "torch 2.13 has mended it",
    "fsdp.lifecycle.fresh-after-exception-in-a-whole-model": "as fresh-after-exception",
    "fsdp.lifecycle.fresh-after-interrupted-backward": "as fsdp.lifecycle.fresh-after-load",
    "fsdp.lifecycle.fresh-after-evaluation-in-part": "as fsdp.lifecycle.fresh-after-evaluation",
    "fsdp.traffic.wait-after-reshard": "a choice: the documentation does not say",
    "fsdp.order.runs-ahead-of-a-straggler": "a choice: FSDP2 overlaps by CUDA streams",
    "fsdp.refusals.unequal-ranks-of-a-mesh": "as fsdp.refusals.unequal-ranks",
    "measure.memory.static-terms-of-any-model": "as measure.memory.peak",
    "measure.throughput.warms-up-until-steady": "a choice: Timer documents a fixed warm-up",
    "trainer.lifecycle.after-an-exception": "as fsdp.accumulation.zero-grad-discards",
    "trainer.parameters.thawed-later": "a choice: DDP documents it",
}
"""Clauses with a declared deviation and no script, and why."""

scripts = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def head_of(script: Path) -> dict[str, str]:
    """The named parts of the docstring; continuation lines are indented."""
    docstring = ast.get_docstring(ast.parse(script.read_text()), clean=False) or ""
    return dict(re.findall(r"^(\w+): (.+)$", docstring, flags=re.MULTILINE))


@scripts
def test_a_script_compiles_is_short_and_imports_torch_alone(script: Path):
    text = findings.whole(script)
    compile(text, script.name, "exec")
    roots = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots.add((node.module or "").partition(".")[0])
    assert roots - {"torch"} <= sys.stdlib_module_names
    assert len(text.splitlines()) <= LINES


@scripts
def test_the_head_names_a_clause_and_case_that_are_declared(script: Path):
    head = head_of(script)
    assert [part for part in HEAD if part not in head] == []
    clauses = {clause.id for clause in ledger.load_all()}
    assert head["Clause"] in clauses
    declared = {(entry.clause, entry.case) for entry in DECLARED}
    assert (head["Clause"], head.get("Case", "*")) in declared
    assert script.stem.startswith(head["Clause"].partition(".")[0] + "_")


def test_every_declared_deviation_has_a_script_or_a_reason_for_none():
    shown = {(head["Clause"], head.get("Case", "*")) for head in map(head_of, SCRIPTS)}
    lacking = {
        (entry.clause, entry.case)
        for entry in DECLARED
        if entry.is_active("2.13.0") and entry.clause not in WITHOUT
    }
    assert lacking - shown == set()
    assert set(WITHOUT) <= {entry.clause for entry in DECLARED}


@pytest.mark.parametrize("name", FAST)
def test_a_script_runs_alone_and_shows_the_fault(name: str, tmp_path: Path):
    copy = tmp_path / f"{name}.py"
    copy.write_text(findings.whole(FOLDER / f"{name}.py"))
    ended = subprocess.run(
        [sys.executable, "-I", copy], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    expected, got = ended.stdout.splitlines()[-2:]
    assert expected.startswith("expected: ")
    assert got.startswith("got: ")

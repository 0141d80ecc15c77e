"""The findings in PyTorch and in libraries: complete, short; their scripts run alone."""

import ast
import builtins
import subprocess
import sys
from pathlib import Path

import pytest

from spec_tests.impls import LEAGUE, findings, is_installed
from spec_tests.impls.findings import Finding
from spec_tests.programs.repro.findings import script, write
from spec_tests.rig import ledger
from spec_tests.rig.judge import expectations
from spec_tests.rig.target import ADAPTERS
from spec_tests.tests.reference.launch import run_script

EVERY = findings.named("*")
TORCHS = findings.of("torch")
DECLARED = expectations.load(ADAPTERS / "torch.toml")
BODIES = (
    "fsdp_lifecycle_registered_method",  # on ranks
    "attention_causal_skips_hidden_tiles",
    "clip_norm_tied_once",
    "ddp_gradients_unused_on_a_whole_rank",  # by how each rank ends
    "measure_memory_frozen",
)
SITUATIONS = (
    "ddp_accumulation_backward_twice",
    "fsdp_accumulation_all_reduce_unused_in_last",
    "fsdp_lifecycle_fresh_after_exception",
    "zero1_groups_generators",
    "zero1_state_load_replaces",
)
LINES = 115
WORDS = ("what", "got", "clause", "checked")
WITHOUT = {
    "attention.shapes.empty": "torch 2.13 has mended it",
    "clip.nonfinite.error-on-all-ranks": "as clip.nonfinite.largest-of-nan",
    "clip.norm.absent-on-one-rank": "a choice: ranks have to have the same gradients",
    "ddp.lifecycle.parameters-added-later": "a choice: its documentation forbids it",
    "fsdp.backward.unused-on-some-ranks": "one of its cases has one",
    "fsdp.footprint.part-of-a-list": "torch 2.13 has mended it",
    "fsdp.traffic.wait-after-reshard": "a choice: the documentation does not say",
    "fsdp.order.runs-ahead-of-a-straggler": "a choice: FSDP2 overlaps by CUDA streams",
    "fsdp.lifecycle.fresh-after-step": "one case has one; set_reshard_after_backward keeps weights",
    "fsdp.refusals.parameters-added-later": "a choice: added before fully_shard",
    "fsdp.refusals.unequal-ranks": "a choice: ranks have to have the same modules",
    "fsdp.refusals.unequal-ranks-of-a-mesh": "as fsdp.refusals.unequal-ranks",
    "measure.memory.static-terms-of-any-model": "as measure.memory.peak",
    "measure.throughput.warms-up-until-steady": "a choice: Timer documents a fixed warm-up",
    "trainer.lifecycle.after-an-exception": "as fsdp.accumulation.zero-grad-discards",
    "trainer.parameters.thawed-later": "a choice: DDP documents it",
    "zero1.refusals.unequal-ranks": "a choice: ranks have to have the same parameters",
}
"""Clauses with a deviation declared of torch and no finding, and why."""

each_finding = pytest.mark.parametrize("finding", EVERY, ids=lambda finding: finding.name)


def imported(tree: ast.Module) -> set[str]:
    """The packages that a script imports, without the standard library's."""
    nodes = [*ast.walk(tree)]
    names = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    names += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def unknown_names(tree: ast.Module) -> set[str]:
    """Names that a script reads and that neither it nor Python defines."""
    nodes = [*ast.walk(tree)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    known = {name.id for name in names if not isinstance(name.ctx, ast.Load)} | {*dir(builtins)}
    known |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    known |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    known |= {n.name for n in nodes if isinstance(n, ast.ExceptHandler) and n.name}
    imports = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    known |= {(a.asname or a.name).partition(".")[0] for n in imports for a in n.names}
    return {name.id for name in names} - known - {"__name__"}


@each_finding
def test_a_script_is_short_and_knows_torch_and_its_library_alone(finding: Finding):
    text = script(finding)
    tree = ast.parse(text)
    library = {LEAGUE[finding.owner][0]} if finding.owner in LEAGUE else set()
    assert imported(tree) <= {"torch"} | library
    assert unknown_names(tree) == set()
    assert len(text.splitlines()) <= LINES
    assert "# only:" not in text


@each_finding
def test_an_entry_is_complete_and_names_clauses_that_are_declared(finding: Finding):
    wanted = [*WORDS] if finding.owner == "torch" else [*WORDS, "known"]
    wanted += ["situation", "judges"] if "situation" in finding.entry else ["expected", "body"]
    assert [part for part in wanted if part not in finding.entry] == []
    entries = expectations.load(ADAPTERS / f"{finding.owner}.toml")
    declared = {entry.clause for entry in entries if not entry.is_inherited}
    assert finding.clauses <= declared & {clause.id for clause in ledger.load_all()}
    assert finding.owner != "torch" or finding.deviation() is not None
    prefix = min(finding.clauses).partition(".")[0] if finding.owner == "torch" else finding.owner
    assert finding.name.startswith(f"{prefix.partition('_')[0]}_")


def test_every_deviation_of_torch_has_a_finding_or_a_reason_for_none():
    shown = {(clause, each.case) for each in TORCHS for clause in each.clauses}
    lacking = {
        (entry.clause, entry.case)
        for entry in DECLARED
        if entry.is_active("2.13.0") and entry.clause not in WITHOUT
    }
    assert lacking - shown == set()
    assert set(WITHOUT) <= {entry.clause for entry in DECLARED}


def run(name: str, folder: Path) -> tuple[int, str, str]:
    """Write the script of a finding and run it, with the packages that are installed alone."""
    [path] = write(name, folder)
    command = [sys.executable, "-I", str(path)]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("name", [*BODIES, *SITUATIONS])
def test_a_script_shows_the_fault(name: str, tmp_path: Path):
    """Without the import of torch; `test_repro` runs one script as its reader does."""
    (finding,) = findings.named(name)
    text = script(finding).replace("SECONDS = 20", "SECONDS = 5")  # of a rank that waits
    ended = run_script(text, tmp_path)
    assert ended.status == 1, ended
    assert ("rank 0: " if name in SITUATIONS else "\nexpected: ") in f"\n{ended.out}"
    assert name in SITUATIONS or ended.out.splitlines()[-1].startswith("got: ")


@pytest.mark.parametrize("owner", sorted({each.owner for each in EVERY} - {"torch"}))
def test_the_first_script_of_a_library_shows_the_fault(owner: str, tmp_path: Path):
    if not is_installed(owner):
        pytest.skip(f"needs {LEAGUE[owner][1]}")
    status, out, err = run(findings.of(owner)[0].name, tmp_path)
    assert status == 1, out + err


def test_a_finding_is_written_once_and_an_unknown_one_is_refused(tmp_path: Path):
    assert [path.name for path in write("clip_norm_t*", tmp_path)] == ["clip_norm_tied_once.py"]
    with pytest.raises(ValueError, match="which exist; nothing was changed"):
        write("clip_*", tmp_path)
    assert len([*tmp_path.iterdir()]) == 1
    near = r"got 'clip_norm_once'; near it: clip_norm_tied_once\b.* To list all: grep"
    with pytest.raises(ValueError, match=near):
        write("clip_norm_once", tmp_path)

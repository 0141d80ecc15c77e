"""`python -m spec_tests` as its users start it: exit status, messages, files, from anywhere.

Every command of the repository answers `--help`: `python -m X`, and each subcommand.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from spec_tests import __main__ as command
from spec_tests.bench.__main__ import BENCHMARKS
from spec_tests.rig.outcome_hooks import Run
from spec_tests.rig.plugin import _nothing_to_run
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.report.eventlog import read_log
from spec_tests.rig.report.text import INCOMPLETE
from spec_tests.tests.reference import launch
from spec_tests.tests.rig.helpers import RIGHT, ROOT, python, within

WRONG = """\
import torch.distributed as dist
def ddp(module, *, process_group=None):
    for p in filter(lambda p: p.requires_grad, module.parameters()):
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return module
"""
FROZEN, UNTOUCHED = "ddp.gradients.frozen-stay-none", "ddp.gradients.weights-untouched"
CLAUSES = ("--clause", FROZEN, "--clause", UNTOUCHED)
"""The first knows the mean, on three ranks; the second, on two, accepts the sum as well."""
DEVIATIONS = f"""\
[[deviation]]
clause = "{FROZEN}"
reason = "it sums"
[[deviation]]
clause = "{UNTOUCHED}"
reason = "it was so once"
"""


# As under xdist, whose variables a run within a worker inherits.
WORKERS = {"PYTEST_XDIST_WORKER": "gw0", "PYTEST_XDIST_WORKER_COUNT": "2"}


def spec_tests(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command; the suite is found however it was started."""
    return python("-m", "spec_tests", *arguments, **options)


CLOSED = """
import os, sys
read, write = os.pipe()
os.close(read)
os.dup2(write, 1)
sys.argv += ["--help"]
from spec_tests.__main__ import trainspec
trainspec()
"""


def test_an_output_that_is_closed_ends_the_command_in_one_line():
    """As `| head` does."""
    ended = python("-c", CLOSED)
    said = "stopped: the output was closed, nobody reads the rest\n"
    assert (ended.returncode, ended.stderr) == (2, said)


def tells_what_is_wrong(ended: subprocess.CompletedProcess[str]) -> None:
    """See that a run over WRONG says what is wrong and how to run it again."""
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "ddp         FAIL 1, pass 1 " in ended.stdout
    assert not re.search(r"\d (passed|deselected)", ended.stdout), "pytest's, in cases"
    assert ended.stdout.count(f"[{FROZEN}]  Frozen parameters MUST keep") == 1
    assert "likely: summed and not divided by the world size" in ended.stdout
    assert "again: python -m spec_tests --impl " in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


def test_workers_tell_what_is_wrong_as_one_process_does(tmp_path: Path):
    (tmp_path / "mine.py").write_text(WRONG)
    ended = spec_tests("--impl", str(tmp_path / "mine.py"), "-n", "2", *CLAUSES)
    tells_what_is_wrong(ended)
    said = re.sub(r"^after .* min: .*\n", "", ended.stdout)  # on a busy machine
    assert said.startswith("ddp         FAIL 1, "), "no letters, nor words of xdist"
    assert not (ROOT / "events.jsonl").exists(), "no report where none was asked for"


def test_declared_deviations_are_honoured_and_stale_ones_are_loud(tmp_path: Path):
    (tmp_path / "mine.py").write_text(WRONG)
    (tmp_path / "mine.toml").write_text(DEVIATIONS)
    ended = spec_tests(
        *("--impl", str(tmp_path / "mine.py"), *CLAUSES, "--report", str(tmp_path / "out"))
    )
    events = read_log(tmp_path / "out" / "events.jsonl")
    outcomes = {(e["clause"], e["case"]): e["outcome"] for e in events if e["event"] == "result"}
    assert outcomes[FROZEN, "ddp-w3"] == "expected_failure"
    assert outcomes[UNTOUCHED, "ddp-w2"] == "unexpected_pass"
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "it was so once" in ended.stdout, "and the message says what was declared"


BUSY = """\
import os, time
def ddp(module, *, process_group=None):
    open(f"inside-{os.getpid()}", "w").close()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass
"""
"""Busy and not asleep: a rank that moves is slow and no hang, however late the signal comes."""


def processes_of(session: int) -> list[str]:
    """The command lines of what still runs in a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # After the name, which may hold blanks and brackets: state, parent, group, session.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has ended meanwhile
            continue
    return found


def take_interrupts() -> None:
    """As at a terminal: what a shell starts in the background ignores them from birth on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="counts processes under /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_run_shows_its_ending_and_leaves_no_process(tmp_path: Path, number: int):
    (tmp_path / "mine.py").write_text(BUSY)
    words = ["--impl", "mine.py", "--clause", UNTOUCHED, "--report", "out"]
    with subprocess.Popen(
        [sys.executable, "-m", "spec_tests", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=take_interrupts,
    ) as command:
        try:
            assert within(60, lambda: len(list(tmp_path.glob("inside-*"))) == 2), "no ranks"
            # A terminal, and `timeout`, tell every process of the command: the first one decides.
            os.killpg(command.pid, number)
            said, _ = command.communicate(timeout=100)
            is_gone = within(10, lambda: not processes_of(command.pid))
        finally:
            left = processes_of(command.pid)
            if left or command.poll() is None:
                os.killpg(command.pid, signal.SIGKILL)
    assert is_gone, left
    assert command.returncode == 2, said
    assert "Traceback" not in said
    assert f"interrupted during {UNTOUCHED} (ddp-w2) on mine.py, 0 of 1 clauses were judged" in said
    assert said.count(INCOMPLETE) == 1, "no verdict, and no rank that was told to end is a finding"
    assert "nothing fails" not in said
    for page in ("index.html", "summary.md"):
        assert INCOMPLETE in (tmp_path / "out" / page).read_text()


MISSPELT = "no clause id matches; close to it: ddp.gradients.mean"
BROKEN = {
    "no such points": ("--points {folder}/points.toml", "no MUST clause matches 'ddp.nothing'"),
    "unknown to workers": ("-n 2 --clause ddp.gradients.meen,clip.no", MISSPELT),
    "no such file": ("--impl nowhere/mine.py", "expected a .py file or a package folder"),
    "nobody can call it": (
        f"--impl {{folder}}/uncallable.py --clause {FROZEN},{UNTOUCHED}",
        "blocked: 2 clauses not tried on ",
    ),
    "import fails": ("--impl {folder}/broken.py", "ModuleNotFoundError: No module named"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_run_that_cannot_judge_says_why(tmp_path: Path, what: str):
    (tmp_path / "broken.py").write_text("import no_such_module_at_all\n")
    (tmp_path / "uncallable.py").write_text("def ddp(model, group):\n    return model\n")
    item = "[[item]]\nname = 'a'\npoints = 1\nclauses = ['ddp.nothing']\n"
    (tmp_path / "points.toml").write_text("title = 'x'\n" + item)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "index.html").write_text("conforms")
    arguments, said = BROKEN[what]
    # Two reports, as `make check ARGS="--report DIR"` gives: the last one is asked for, however it
    # is spelled.
    words = f"--report {{folder}}/other --report={{folder}}/out {arguments}".split()
    ended = spec_tests(*(word.format(folder=tmp_path) for word in words))
    assert ended.returncode == 2
    old = tmp_path / "out" / "index.html"
    assert not old.exists() or "conforms" not in old.read_text(), "that was another run"
    assert "what does not hold" not in ended.stdout
    assert said in ended.stdout + ended.stderr
    assert ended.stdout.count("a function that can be called") == ("nobody" in what), "one fault"
    assert "INTERNALERROR" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("level", "pattern", "needed"),
    [
        ("course", "attention.forward.lse", "--level correct"),
        ("course", "attention.operator.compiles", "--level production"),
        ("correct", "attention.*", "--level production"),
        ("production", "attention.operator.compiles", "no such clause is in the given paths"),
    ],
)
def test_a_clause_above_the_level_says_which_one_it_has(level: str, pattern: str, needed: str):
    run = Run([], {"mine.py": level}, "gloo", {}, Worlds())
    assert _nothing_to_run([pattern], run).endswith(needed)


POINTS = f"""\
title = "Two items"
[[item]]
name = "Weights"
points = 2
clauses = ["{UNTOUCHED}"]
[[item]]
name = "Both"
points = 3
clauses = ["{FROZEN}", "{UNTOUCHED}"]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """A folder in which a user judged wrong and right code, with a report of each; how that ended.

    The configuration and the tests that are there have no part in the verdict.
    """
    folder, ended = tmp_path_factory.mktemp("command"), {}
    (folder / "points.toml").write_text(POINTS)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (folder / "test_theirs.py").write_text("def test_fails():\n    assert False\n")
    for name, text in (("wrong", WRONG), ("right", RIGHT)):
        (folder / "mine.py").write_text(text)
        flags = ("--impl", "mine.py", "--points", "points.toml", "--report", name)
        ended[name] = spec_tests(*flags, *CLAUSES, cwd=folder, **WORKERS)
    return folder, ended


def test_right_code_of_a_users_own_conforms_from_any_folder(runs):
    folder, ended = runs
    assert ended["right"].returncode == 0, ended["right"].stdout + ended["right"].stderr
    assert "(level correct; exit status 0)" in ended["right"].stdout
    counts = read_log(folder / "right" / "events.jsonl")[-1]["counts"]
    assert (counts["passed"], counts["not_offered"]) == (2, 2), "ddp_bucketed is not in the file"
    assert FROZEN in (folder / "right" / "summary.md").read_text()
    # For those who read JUnit: what pytest has no word for is a property.
    cases = ElementTree.parse(folder / "right" / "junit.xml").findall(".//testcase")
    properties = [{p.attrib["name"]: p.attrib["value"] for p in c.iter("property")} for c in cases]
    assert {p["case"]: p["outcome"] for p in properties if p["clause"] == FROZEN} == {
        "ddp-w3": "passed",
        "ddp_bucketed-w3": "not_offered",
    }


def test_a_report_has_its_points_and_compares_with_the_next(runs):
    folder, ended = runs
    tells_what_is_wrong(ended["wrong"])
    for name, points in (("wrong", 2), ("right", 5)):
        assert f"mine.py: {points} of 5 points, Two items" in ended[name].stdout
    graded = json.loads((folder / "wrong" / "results.json").read_text())
    assert [test["score"] for test in graded["tests"]] == [2, 0]
    page = (folder / "wrong" / "index.html").read_text()
    assert "Frozen parameters MUST keep" in page, "the norm"
    assert "Who had this bug before" in page, "the stories of its impostors"
    better = spec_tests("compare", "wrong", "right", cwd=folder)
    assert (better.returncode, f"- {FROZEN} on mine.py: FAIL → pass" in better.stdout) == (0, True)
    assert "## What got better: 1" in better.stdout
    worse = spec_tests("compare", "right", "wrong", cwd=folder)
    assert (worse.returncode, "likely: summed" in worse.stdout) == (1, True), worse.stdout


def test_an_installed_suite_serves_pytest_from_another_folder(tmp_path: Path):
    (tmp_path / "mine.py").write_text(RIGHT)
    flags = ["--impl", "mine.py", "--clause", FROZEN, "--report", "out", "-p", "no:cacheprovider"]
    suite = ["-p", "spec_tests.rig.plugin", "--pyargs", "spec_tests.chapters.ddp.test_gradients"]
    ended = python("-m", "pytest", *suite, *flags, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert read_log(tmp_path / "out" / "events.jsonl")[-1]["counts"]["passed"] == 1


def test_a_conftest_of_a_folder_above_the_suite_is_not_run(tmp_path: Path):
    folder = tmp_path / "beneath"
    shutil.copytree(ROOT / "spec_tests", folder / "spec_tests")
    (tmp_path / "conftest.py").write_text("raise SystemExit('it was run')\n")
    (folder / "mine.py").write_text(RIGHT)
    program = """
import runpy, sys
for name in [each for each in sys.modules if each.partition(".")[0] == "spec_tests"]:
    del sys.modules[name]  # the copy is to be imported
runpy.run_module("spec_tests", run_name="__main__", alter_sys=True)
"""
    ended = python("-c", program, "--impl", "mine.py", "--clause", "ddp.gradients.meen", cwd=folder)
    assert (ended.returncode, MISSPELT in ended.stderr) == (2, True), ended.stdout + ended.stderr


def test_a_clause_that_hung_twice_is_not_run_again(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import threading\ndef ddp(module):\n    threading.Event().wait()\n"
    )
    report = tmp_path / "report"
    words = ("--impl", str(tmp_path / "mine.py"), "--clause", "ddp.gradients.mean")
    done = spec_tests(*words, "--report", str(report))
    assert done.returncode == 1
    events = read_log(report / "events.jsonl")
    first, second, *others = [event for event in events if event["event"] == "result"]
    assert (first["outcome"], second["outcome"]) == ("hang", "hang")
    assert {event["outcome"] for event in others} == {"skipped", "not_offered"}
    skipped = next(event for event in others if event["outcome"] == "skipped")
    assert f"hung already, in {first['case']} and {second['case']}" in skipped["message"]


# --------------------------------------------------------------------------------------------- help


NO_COMMANDS = {"checkouts": "a course's code"}
HELPS = """
import contextlib, io, json, runpy, sys
sys.path.append(sys.argv[2])  # as where a script is run as a file
found = {}
for words in json.loads(sys.argv[1]):
    module, *rest = words.split()
    sys.argv, said, status = [module, *rest, "--help"], io.StringIO(), "returned"
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            if module == "spec_tests":  # its entry point ends the process
                from spec_tests.__main__ import main
                status = main(sys.argv[1:])
            else:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code or 0
    except ModuleNotFoundError as error:
        status = f"lacks {error.name}"
    except BaseException as error:
        status = repr(error)
    found[words] = [status, said.getvalue()]
print(json.dumps(found))
"""


SKELETONS = "spec_tests.contract.skeletons."  # a learner's file: its end runs a toy on two ranks


def is_guard(node: ast.stmt) -> bool:
    """Whether it is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def modules() -> list[str]:
    """What `python -m` can start: every file with a guard, but those that are no commands."""
    found = []
    for path in sorted(
        each for top in ("spec_tests", "solution") for each in (ROOT / top).rglob("*.py")
    ):
        words = path.relative_to(ROOT).with_suffix("").parts
        if {*words} & {*NO_COMMANDS} or not any(map(is_guard, ast.parse(path.read_text()).body)):
            continue
        found.append(".".join(words).removesuffix(".__main__"))
    return [name for name in found if not name.startswith(SKELETONS)]


def test_every_command_answers_help(tmp_path: Path):
    subcommands = {"", *re.findall(r"python -m spec_tests (\w+) ", command.__doc__)}
    assert {*command.COMMANDS} < subcommands
    words = [f"spec_tests {name}".strip() for name in sorted(subcommands)]
    words += [f"spec_tests.bench {name}" for name in BENCHMARKS]
    words += modules()
    assert {"spec_tests.bench", "spec_tests.museum.rule"} < {*words}

    scripts = ROOT / "spec_tests" / "tests" / "rig" / "watched"
    ended = launch.run(HELPS, json.dumps(words), str(scripts), folder=tmp_path)

    found = json.loads(ended.out.splitlines()[-1])
    bad = {
        name: (status, text)
        for name, (status, text) in found.items()
        if status != 0 or "usage" not in text
    }
    assert bad == {}
    _, manual = found["spec_tests"]
    assert "Exit status" in manual
    assert "--level" in manual, "the options of check"
    assert [name for name in command.COMMANDS if f"spec_tests {name} " not in manual] == []

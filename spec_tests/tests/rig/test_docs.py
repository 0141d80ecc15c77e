"""What the pages for readers say is so: links, commands, files, examples."""

import fnmatch
import importlib.util
import itertools
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spec_tests import museum
from spec_tests.__main__ import COMMANDS
from spec_tests.contract import FUNCTIONS
from spec_tests.contract.skeletons import SUBJECTS
from spec_tests.impls import parse
from spec_tests.museum import CATALOGUE
from spec_tests.programs import law, seeds
from spec_tests.programs.scene import Scene
from spec_tests.rig import clause, judge, ledger
from spec_tests.rig.judge import expectations
from spec_tests.rig.outcomes import Outcome, compose, results
from spec_tests.rig.report.eventlog import read_log
from spec_tests.rig.target import PACKAGE_ROOT, REPOSITORY_ROOT
from spec_tests.tests.rig.helpers import python

SUITE = PACKAGE_ROOT
REFERENCE = REPOSITORY_ROOT / "solution"
PAGES = [SUITE / "README.md", SUITE / "DISPUTE.md", SUITE / "museum" / "README.md"]
PAGES += [REFERENCE / "README.md", REFERENCE / "COMING_FROM.md"] if REFERENCE.is_dir() else []
SUBCOMMANDS = {"check", "ledger", "impostors", *COMMANDS}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Lines of sh blocks and words in backquotes that begin with python."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    lines += re.findall(r"`(python -m [^`]*)`", page.read_text())
    split = [shlex.split(line, comments=True) for line in lines if line.startswith("python -m ")]
    return [words[2:] for words in split]


@pages
def test_every_link_to_a_file_leads_somewhere(page: Path):
    targets = re.findall(r"\]\(([^)#\s]+)\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pages
def test_every_command_names_what_exists(page: Path):
    ids = [clause.id for clause in ledger.load_all()]
    for module, *rest in commands(page):
        assert importlib.util.find_spec(module) is not None, module
        if module == "spec_tests" and rest and not rest[0].startswith("-"):
            assert rest[0] in SUBCOMMANDS, rest
            assert rest[0] != "new" or rest[1] in SUBJECTS
        for option, value in itertools.pairwise(rest):
            if option == "--clause":
                assert fnmatch.filter(ids, value), value
            if option == "--only" and rest[0] == "explore":
                assert Scene.of(value)  # words of a scene
            elif option == "--only":
                assert fnmatch.filter(CATALOGUE, value), value
            if option == "--line":
                assert law.read(value)
            if option == "--impl" and value.startswith("impostor:"):
                assert museum.find(value.removeprefix("impostor:"))


def test_every_clause_that_is_named_anywhere_exists():
    """In prose, code and TOML; the tests of the rig itself make up ids of their own."""
    known = {clause.id for clause in ledger.load_all()} | {seed.formerly for seed in seeds.load()}
    word = r"[a-z0-9]+(?:-[a-z0-9]+)*"
    chapter = "|".join(ledger.CHAPTERS)
    # Neither a module ("chapters.data.x"), nor a file, a call or a pattern ("ddp.traffic.*").
    named = re.compile(rf"(?<![\w./*-])(?:{chapter})(?:\.{word}){{2,3}}(?![\w/(*-]|\.[a-z*])")
    own = SUITE / "tests" / "rig"
    files = [
        file
        for folder in (SUITE, REFERENCE, REPOSITORY_ROOT / ".github")
        for file in folder.rglob("*")
        if file.suffix in {".py", ".md", ".toml", ".yml"} and own not in file.parents
    ]
    unknown = {
        f"{file.relative_to(REPOSITORY_ROOT)}: {id}"
        for file in [*files, REPOSITORY_ROOT / "README.md"]
        for id in named.findall(file.read_text(encoding="utf-8"))
        if id not in known and not id.endswith((".weight", ".bias"))  # parameters of a model
    }
    assert unknown == set()


def test_the_five_lines_are_an_implementation(tmp_path: Path):
    (text,) = [block for block in blocks(SUITE / "README.md", "python") if "def ddp" in block]
    assert len([line for line in text.splitlines() if line]) <= 5
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert parse(str(file)).path == file
    defined: dict[str, object] = {}
    exec(compile(text, "README.md", "exec"), defined)
    assert FUNCTIONS.keys() & defined.keys() == {"ddp"}


def test_the_example_of_a_row_is_a_clause(monkeypatch: pytest.MonkeyPatch):
    (text,) = [block for block in blocks(SUITE / "README.md", "python") if "rows(" in block]
    monkeypatch.setattr(clause, "REGISTER", {})
    defined: dict[str, Any] = {"__name__": "example"}
    exec(compile(text, "README.md", "exec"), defined)
    (found,) = clause.REGISTER.values()
    assert defined["test_evaluation_in_between"] is found.test
    for case in found.cases():
        assert law.legal(case["situation"], case["subject"], case["world"])


def test_the_table_of_a_message_has_the_lines_of_a_message_in_their_order():
    _, _, page = (SUITE / "README.md").read_text().partition("## Read a failure\n")
    told = re.findall(r"^\| `(\S+)", page.partition("\n## ")[0], flags=re.MULTILINE)
    here = judge.Situation("ddp.gradients.mean", "Every rank MUST.", "mine.py", "w2", 2, "run", "L")
    with judge.judging(replace(here, in_words="held")):
        text = str(judge.violated("rank 1: wrong", likely="so", detail="largest error", given="g"))
    assert len(told) == 8
    assert [line.split()[0] for line in text.splitlines()] == told


@pytest.mark.parametrize(("page", "begins"), [("DISPUTE.md", "disputed: "), ("README.md", "")])
def test_the_example_of_a_deviation_is_valid(tmp_path: Path, page: str, begins: str):
    (text,) = [each for each in blocks(SUITE / page, "toml") if "[[deviation]]" in each]
    (tmp_path / "mine.toml").write_text(text)
    (deviation,) = expectations.load(tmp_path / "mine.toml")
    assert deviation.clause in {clause.id for clause in ledger.load_all()}
    assert deviation.reason.startswith(begins)


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="the reference is not beside the suite")
def test_the_reference_s_page_names_files_that_exist_and_every_folder():
    whole = (REFERENCE / "README.md").read_text()
    text = re.sub(r"\[[^\]]*\]\([^)]*\)", "", whole)  # links are tested
    known = {path.relative_to(REFERENCE).as_posix() for path in REFERENCE.rglob("*.py")}
    names = {Path(name).name for name in known}
    # "triton_*", "train_*.py" stand for several; a name without a folder is of the folder before.
    named = set(re.findall(r"(?<![\w*/.])((?:\w+/)*\w+\.py)\b", text))
    assert len(named) > 35
    assert {name for name in named if name not in known and name not in names} == set()
    folders = {path.parent.name for path in REFERENCE.glob("*/__init__.py")}
    assert {folder for folder in folders if f"{folder}/" not in whole} == set()


# ---------------------------------------------------------------------- the repository's README


README = REPOSITORY_ROOT / "README.md"
with_readme = pytest.mark.skipif(
    not README.is_file(), reason="an installed suite has no README beside it"
)


def example(language: str, first_words: str) -> str:
    """The fenced block of README that begins with the given words."""
    (found,) = [each for each in blocks(README, language) if each.startswith(first_words)]
    return found


@with_readme
def test_the_table_of_defects_names_files_that_exist():
    files = re.findall(r"`(tests/reference/[\w./-]+)`", (SUITE / "DEFECTS.md").read_text())
    assert [name for name in files if not (SUITE / name).is_file()] == []


@with_readme
def test_every_make_target_that_is_named_exists():
    makefile = (REPOSITORY_ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", README.read_text(), flags=re.MULTILINE))
    assert named <= targets


@with_readme
def test_the_example_is_told_its_three_faults_in_words_and_pictures(tmp_path):
    (tmp_path / "mine.py").write_text(example("python", "# mine.py"))
    wanted = [
        "ddp.gradients.mean",
        "ddp.gradients.frozen-stay-none",
        "ddp.group.*",
        "fsdp.footprint.no-growth",
    ]
    options = [word for pattern in wanted for word in ("--clause", pattern)]

    asked = ["-m", "spec_tests", "--impl", "mine.py", "--report", "out", *options]
    ran = python(*asked, cwd=tmp_path)

    assert ran.returncode == 1, ran.stdout + ran.stderr
    events = read_log(tmp_path / "out" / "events.jsonl")
    cells: dict[str, list[str]] = {}
    for event in results(events):
        cells.setdefault(event["clause"], []).append(event["outcome"])
    assert {clause: str(compose(map(Outcome, found))) for clause, found in cells.items()} == {
        "ddp.gradients.mean": "failed",
        "ddp.gradients.frozen-stay-none": "failed",
        "ddp.group.divides-by-its-size": "failed",
        "ddp.group.keeps-to-itself": "passed",  # by its error, which is allowed there
        "ddp.group.starts-from-its-first-rank": "passed",
        "fsdp.footprint.no-growth": "not_offered",
    }
    transcript = example("text", "[ddp.gradients.mean]").rstrip().splitlines()
    missing = [line for line in transcript if line not in ran.stdout]
    assert not missing, f"README's transcript is not what is printed: {missing}"
    page = (tmp_path / "out" / "index.html").read_text()
    assert re.search(r'class="hit">→ +\d+ +dist.all_reduce\(parameter.grad\)</span>', page)
    assert len(page) < 80_000
    kinds = {kind for event in events for kind in event.get("evidence", {})}
    assert kinds == {"source", "wrong"}
    assert "Clauses on what is not offered: fsdp 1</summary>" in page
    assert '<li>fsdp: <span class="id">fully_shard, fsdp</span>' in page

"""The house rules that no linter knows: budgets of lines, and what no file may hold."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = ROOT / "pyproject.toml"
if not PROJECT.is_file():
    pytest.skip("needs a checkout", allow_module_level=True)
HOUSE = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["house"]
PACKAGES = ("solution", "spec_tests")
FUNCTION_LINES = 50
TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".cfg", ".txt", ".ipynb", ""}


def tracked() -> list[Path]:
    """Every file that git knows, or would take."""
    asked = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def sources() -> dict[str, str]:
    """Relative path to text of every Python file of the two packages."""
    found = {p.relative_to(ROOT).as_posix(): p for p in tracked() if p.suffix == ".py"}
    return {
        name: path.read_text(encoding="utf-8")
        for name, path in found.items()
        if name.partition("/")[0] in PACKAGES
    }


def test_no_file_is_longer_than_its_budget():
    lengths = {name: len(text.splitlines()) for name, text in sources().items()}
    most = HOUSE["file-lines"]
    found = {name: length for name, length in lengths.items() if length > most}
    assert found == {}, f"longer than {most} lines: take another file of that concern, or cut one"


@pytest.mark.parametrize("folder", HOUSE["folder-lines"])
def test_no_folder_is_longer_than_its_budget(folder: str):
    found = [path for path in tracked() if path.suffix == ".py"]
    inside = [path for path in found if path.is_relative_to(ROOT / folder)]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in inside)
    allowed = HOUSE["folder-lines"][folder]
    words = f"{folder or 'all'}: {lines} lines, allowed {allowed}"
    assert lines <= allowed, (
        f"{words}: a clause may raise the number of {folder!r} in pyproject.toml by its own lines"
    )


def test_no_function_is_longer_than_a_page():
    """Without its docstring."""
    found = {}
    for name, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                code = node.body[ast.get_docstring(node) is not None :]
                length = (node.end_lineno or 0) - code[0].lineno + 1 if code else 0
                if length > FUNCTION_LINES:
                    found[f"{name}::{node.name}"] = length
    assert found == {}


# Written in pieces, or this file would hold what it forbids.
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.}])/(?:home|Users|root|work|mnt)/[\w.-]+"),
    "a file in somebody's temporary folder": re.compile(r"(?<![\w.])/t" + r"mp/\w+"),
    "an address of a private network": re.compile(
        r"\b(?:10|192\.168)\.\d{1,3}\.\d{1,3}\.\d{1,3}\b"
    ),
    "a token": re.compile(r"\b(?:hf_|ghp_|sk-)[A-Za-z0-9]{20,}"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what: str):
    found = []
    for path in tracked():
        if path.suffix not in TEXT or path.stat().st_size > 1_000_000:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if FORBIDDEN[what].search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == [], f"these lines hold {what}: take another one, or write it in pieces"


def test_nothing_in_the_suite_needs_the_network():
    hosts = re.compile(r"\b(?:urlopen|requests\.get|socket\.create_connection|snapshot_download)\(")
    found = {name for name, text in sources().items() if hosts.search(text)}
    assert found == set()

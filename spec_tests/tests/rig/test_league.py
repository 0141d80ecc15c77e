"""The league: its page is current, what failed is explained, a missing library is named."""

import json
from pathlib import Path

import pytest

from spec_tests.impls import LEAGUE, league
from spec_tests.rig.judge import expectations
from spec_tests.tests.reference import launch


def test_every_library_has_a_result_and_the_page_is_current():
    assert {*LEAGUE, "torch"} == {path.stem for path in league.RESULTS.glob("*.json")}
    assert league.main(["--check"]) == 0


@pytest.mark.parametrize("name", [*LEAGUE, "torch"])
def test_every_clause_that_failed_is_explained(name: str):
    result = json.loads((league.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    entries = {entry.clause for entry in expectations.load(league.FOLDER / f"{name}.toml")}
    assert {*result["failed"]} <= entries
    assert result["passed"] <= result["judged"]


def test_a_library_that_is_not_installed_ends_the_command_with_status_2(tmp_path: Path):
    """In an interpreter that finds no installed package of that name."""
    hidden = "import sys; sys.modules['fairscale'] = None\n"
    code = f"{hidden}from spec_tests.__main__ import main; sys.exit(main(['--impl', 'fairscale']))"
    says = "--impl fairscale: install fairscale: pip install fairscale"
    launch.run(code, folder=tmp_path, status=2, says=says)

"""`trainspec watch` on small scripts: of each exactly the expected causes are reported."""

from pathlib import Path

import pytest

from spec_tests.rig_tests.watched.small import Small, small
from spec_tests.rig_tests.watched.trial import run
from spec_tests.watch.norm import is_must
from spec_tests.watch.verdict import render


@pytest.mark.parametrize("case", small(), ids=lambda case: case.id)
def test_a_small_script_is_told_as_it_should_be(case: Small, tmp_path: Path):
    outcome = run(case.write(tmp_path), case.world, options=case.options)
    screen = render(outcome.verdict)
    shown = f"{screen}\nstatus {outcome.status}\n{outcome.output[-3000:]}"
    causes = [(cause.finding.norm, is_must(cause.finding)) for cause in outcome.verdict.causes]
    assert [norm for norm, must in causes if must] == case.must, shown
    assert [norm for norm, must in causes if not must] == case.should, shown
    assert [words for words in case.says if words not in screen] == [], shown
    assert [words for words in case.hides if words in screen] == [], shown
    assert outcome.verdict.steps, shown
    assert not any(" failed" in each for each in outcome.verdict.unseen), shown

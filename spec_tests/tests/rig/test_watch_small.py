"""`trainspec watch` on small scripts: of each exactly the expected causes are reported."""

from pathlib import Path

import pytest

from spec_tests.tests.rig.watched.small import PREAMBLE, Small, small
from spec_tests.tests.rig.watched.trial import run
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


LIBRARY = """
import torch

class Trainer:
    def __init__(self, model):
        self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(self, batches):
        for batch in batches:
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
"""
USER = """
import sys; sys.path.insert(0, FOLDER)
import bigtrainer
trainer = bigtrainer.Trainer(net())
trainer.train([torch.randn(6, 8) for _ in range(3)])
"""


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_the_line_of_a_library_s_loop_is_that_of_the_user_s_call(folder: str, tmp_path: Path):
    package = tmp_path / "lib" / folder / "bigtrainer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LIBRARY)
    text = PREAMBLE.lstrip() + USER.lstrip().replace("FOLDER", repr(str(package.parent)))
    (tmp_path / "train.py").write_text(text)
    (cause,) = run(tmp_path / "train.py", 2).verdict.causes
    line = 1 + text.splitlines().index("trainer.train([torch.randn(6, 8) for _ in range(3)])")
    assert cause.finding.norm == "watch.batches.distinct"
    assert cause.finding.place == f"train.py:{line}"

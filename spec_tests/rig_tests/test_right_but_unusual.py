"""Right but unusual code that clauses of level `production` must accept."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_tests import target
from spec_tests.clause import clause_of
from spec_tests.ddp import test_lifecycle
from spec_tests.rig import runner
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.world import Worlds

FLAT = """
import torch
from torch.nn.parallel import DistributedDataParallel

def ddp(module, *, process_group=None):
    parameters = list(module.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        parameter.data = part.view(parameter.shape)
    {and_more}
    return DistributedDataParallel(module)
"""


@pytest.mark.parametrize(
    ("and_more", "outcome"),
    [
        ("pass", Outcome.PASSED),
        ("module.kept = [torch.zeros_like(flat), torch.zeros_like(flat)]", Outcome.FAILED),
    ],
    ids=["moved", "moved, and copied twice"],
)
def test_a_module_that_was_moved_is_no_growth_of_gradients(
    worlds: Worlds, tmp_path: Path, and_more: str, outcome: Outcome
):
    file = tmp_path / "flat.py"
    file.write_text(FLAT.format(and_more=and_more), encoding="utf-8")
    clause = clause_of(test_lifecycle.test_gradients_cost_two_copies_at_most)
    assert clause is not None
    case = {"world": 2, "subject": "ddp"}
    found = runner.run_case(clause, target.parse(str(file)), case, worlds)
    assert found.outcome is outcome, found.message

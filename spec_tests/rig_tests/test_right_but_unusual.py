"""Right but unusual code that clauses of level `production` must accept."""

from __future__ import annotations

import pytest

from spec_tests.ddp import test_lifecycle
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig_tests.helpers import judged

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
    worlds: Worlds, mine, and_more: str, outcome: Outcome
):
    which = mine(FLAT.format(and_more=and_more))
    test = test_lifecycle.test_gradients_cost_two_copies_at_most
    found = judged(which, worlds, test, {"world": 2, "subject": "ddp"})
    assert found.outcome is outcome, found.message

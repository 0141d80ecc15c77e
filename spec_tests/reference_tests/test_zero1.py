"""What the reference's sharded optimizer refuses, and how it says so."""

from __future__ import annotations

import torch

from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.target import parse


def of_a_sparse_parameter(ctx: Context) -> str:
    """What it says to a sparse parameter beside a dense one."""
    dense, sparse = (torch.nn.Parameter(t) for t in (torch.ones(3), torch.eye(3).to_sparse()))
    try:
        ctx.impl.sharded_optimizer([("dense", dense), ("sparse", sparse)], torch.optim.SGD, lr=0.5)
    except ValueError as error:
        return str(error)
    return ""


def test_a_sparse_parameter_is_refused_by_its_name(worlds: Worlds):
    for said in worlds.world(2, parse("solution")).run(of_a_sparse_parameter):
        assert "expected parameter 'sparse' to be dense" in said

"""Refusals: where ranks were given different arguments, all of them raise before they train.

Every rank decides for itself who owns what. Where one has another model, or another rate, they
send each other what does not fit, wait for what nobody sends, or train each parameter with the rate
of whoever owns it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clause

ZERO = ("sharded_optimizer",)


def unequal(ctx, difference):
    """Construct and step where the last rank differs; the error, or "" if there was none."""
    is_other = ctx.rank == ctx.world_size - 1
    torch.manual_seed(7)
    layers = [nn.Linear(4, 4) for _ in range(3)]
    if is_other and difference == "shape":
        layers[1] = nn.Linear(4, 5)
    rate = 0.5 if is_other and difference == "rate" else 0.25
    parameters = list(nn.ModuleList(layers).parameters())
    with refusal.caught((ValueError, RuntimeError)) as error:
        optimizer = ctx.impl.sharded_optimizer(parameters, torch.optim.SGD, lr=rate)
        if difference == "added-rate":
            parameters.append(nn.Parameter(torch.ones(4)))
            optimizer.add_param_group({"params": parameters[-1:], "lr": 0.5 + is_other})
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return error["error"]


@clause(
    "zero1.refusals.unequal-ranks",
    level="production",
    needs=ZERO,
    source="contract: unequal-ranks; "
    "DistributedDataParallel verifies parameters across ranks at construction",
)
@pytest.mark.parametrize("difference", ["shape", "rate", "added-rate"])
def test_ranks_with_unequal_parameters_are_told(world, difference):
    """Where ranks differ in parameters or options, all MUST raise by the first step; none hangs."""
    refusal.on_all_ranks(
        world.run(unequal, difference),
        likely="nothing is compared: each parameter trains with its owner's idea of it",
        given=f"the last rank has another {difference}",
    )


def of_a_sparse_parameter(ctx):
    """A sparse parameter after a step, or the error."""
    sparse = nn.Parameter(torch.eye(3).to_sparse())
    parameters = [nn.Parameter(torch.ones(3)), sparse]
    with refusal.caught() as error:
        optimizer = ctx.impl.sharded_optimizer(parameters, torch.optim.SGD, lr=0.5)
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        return sparse.detach().to_dense()
    return error["error"]


@clause(
    "zero1.refusals.sparse",
    level="production",
    needs=ZERO,
    source="contract: sparse; ZeroRedundancyOptimizer: one dense type for all parameters",
)
def test_a_sparse_parameter_is_updated_or_refused_as_such(world):
    """A sparse parameter MUST be updated, or be refused with an error that says "sparse"."""
    for rank, found in enumerate(world.run(of_a_sparse_parameter)):
        if isinstance(found, str):
            expected = f"rank {rank}: expected an error that says 'sparse', got {found!r}"
            judge.holds("sparse" in found.lower(), expected, likely="its memory is asked for")
        else:
            judge.tensors([{"sparse": found}], {"sparse": torch.eye(3) / 2}, quantity="weight")

"""Refusals: what cannot be sharded is said at once, by name, on every rank.

An error that comes later comes in a collective, on some ranks, while the others wait.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from spec_tests.clause import MUST, clause
from spec_tests.fsdp.sharded import FULLY_SHARD
from spec_tests.rig import judge

PAGE = "torch.distributed.fsdp.fully_shard; test_fully_shard_init"


class Scaled(nn.Module):
    """A layer with a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.ones(()))


class Strided(nn.Module):
    """A parameter whose rows do not lie one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.ones(6, 4).T)


CASES = {
    "scalar": (Scaled, "temperature"),
    "strided": (Strided, ""),
    "container": (lambda: nn.ModuleList([nn.Linear(4, 4)]), "ModuleList"),
    "mesh-of-three": (lambda: nn.Linear(4, 4), ""),
}


def refused(ctx, subject, case):
    """What was raised, and whether the module is as it was."""
    build, _ = CASES[case]
    module = build().to(ctx.device)
    before = {name: id(p) for name, p in module.named_parameters()}
    options = {}
    if case == "mesh-of-three":
        names = ("a", "b", "c")
        options["mesh"] = init_device_mesh(
            ctx.device.type, (1, 1, ctx.world_size), mesh_dim_names=names
        )
    try:
        ctx.impl.fully_shard(module, **options)
    except (ValueError, NotImplementedError, TypeError) as error:
        after = {name: id(p) for name, p in module.named_parameters()}
        return {"error": type(error).__name__, "says": str(error), "intact": after == before}
    return {"error": "", "says": "", "intact": True}


@clause(
    "fsdp.refusals.at-once-and-by-name",
    MUST,
    level="correct",
    judges=FULLY_SHARD,
    source=PAGE,
)
@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_sharded_is_refused_at_once(world, subject, case):
    """Scalars, strided parameters, containers and odd meshes MUST be refused when sharding."""
    ranks = world.run(refused, subject, case)

    word = CASES[case][1]
    for rank, seen in enumerate(ranks):
        judge.holds(
            bool(seen["error"]) and word in seen["says"],
            f"rank {rank}, {case}: expected an error"
            + (f" that says {word!r}" if word else "")
            + f", got {seen['error'] or 'none'}: {seen['says'][:200]!r}",
            likely="it is found out later, in a collective, on some ranks",
        )

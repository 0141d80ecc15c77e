"""State dict: what a sharded model gives and takes, whatever it has just done.

A checkpoint may be written after an evaluation, in the middle of a window, before the first step.
Full weights that happen to be alive must not get into it, and a load has to reach the shards.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from spec_tests.clause import clauses
from spec_tests.fsdp.sharded import FULLY_SHARD, Sharded
from spec_tests.rig import judge, oracle
from spec_tests.rig.toys import TOYS

clause = clauses(judges=FULLY_SHARD, level="correct")

PAGE = "test_fully_shard_state_dict; pytorch issues 131965 and 154655"


def at_a_moment(ctx, subject, toy, seed, moment):
    """Keys and kinds of the state dict, and its values put together."""
    sharded = Sharded(ctx, subject, toy, seed)
    if moment == "after-evaluation":
        with torch.no_grad():
            sharded.loss()
    elif moment == "unsharded-by-hand":
        sharded.unshard_all()
    state: dict[str, Any] = sharded.wrapped.state_dict()
    names = dict(sharded.module.named_buffers())
    return {
        "keys": list(state),
        "whole": sorted(n for n, v in state.items() if n not in names and type(v) is not DTensor),
        "values": {
            n: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for n, v in state.items()
        },
    }


@clause("fsdp.state-dict.sharded-at-any-moment", source=PAGE, worlds=(2, 3))
@pytest.mark.parametrize("moment", ["at-once", "after-evaluation", "unsharded-by-hand"])
def test_a_state_dict_is_sharded_whatever_came_before(world, subject, moment):
    """A state dict MUST hold shards under the plain model's keys, whatever is unsharded."""
    ranks = world.run(at_a_moment, subject, "stack", 7, moment)

    judge.equal(
        [rank["keys"] for rank in ranks], list(TOYS["stack"].build(7).state_dict()), quantity="keys"
    )
    judge.equal([rank["whole"] for rank in ranks], [], quantity="entries that are not sharded")
    judge.tensors(
        [rank["values"] for rank in ranks],
        oracle.parameters("stack", 7),
        quantity="value in the state dict",
        given=moment,
    )


def carried_over(ctx, subject, toy, seed):
    """Output and weights of a model that loaded what another one had after a step."""
    first = Sharded(ctx, subject, toy, seed)
    first.backward(0)
    first.optimizer.step()
    state = {name: value.clone() for name, value in first.wrapped.state_dict().items()}
    second = Sharded(ctx, subject, toy, seed + 1)
    with torch.no_grad():
        second.loss()
    missing = second.wrapped.load_state_dict(state, strict=True)
    first.optimizer.zero_grad()
    return {
        "complaints": [*missing.missing_keys, *missing.unexpected_keys],
        "first": first.full(),
        "second": second.full(),
        "expected": {"output": first.wrapped(first.batch(3)).detach()},
        "output": {"output": second.wrapped(first.batch(3)).detach()},
    }


@clause("fsdp.state-dict.round-trip", source=PAGE, worlds=(3,))
@pytest.mark.parametrize("toy", ["ragged", "tied"])
def test_what_one_model_gives_another_takes(world, subject, toy):
    """A state dict, loaded into another model, MUST give it the weights and the output."""
    ranks = world.run(carried_over, subject, toy, 7)

    judge.equal([rank["complaints"] for rank in ranks], [], quantity="missing or unexpected keys")
    judge.tensors(
        [rank["second"] for rank in ranks],
        [rank["first"] for rank in ranks],
        quantity="weight of the model that gave",
    )
    judge.tensors(
        [rank["output"] for rank in ranks],
        [rank["expected"] for rank in ranks],
        quantity="output of the model that gave",
    )

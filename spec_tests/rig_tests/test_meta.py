"""Programs that must fail, on live and on simulated ranks: the proof that the rig sees failure."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.modules import module as hooks

from spec_tests.rig.ranks.errors import RankDied, RankHung, RankRaised
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import World, Worlds
from spec_tests.rig_tests import bodies

# What it is, and how it is told: on live ranks, on simulated ones.
FAILURES: dict[str, tuple[Any, Any]] = {
    "raise": (RankRaised, RankRaised),
    "exit": (RankRaised, RankRaised),
    "os-exit": (RankDied, RankDied),
    "leave": (RankHung, RankHung),
    "mismatch": ((RankDied, RankRaised), RankRaised),
}


@pytest.fixture(params=["gloo", "sim"])
def pair(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    return worlds.world(2, transport=request.param)


@pytest.mark.parametrize("how", FAILURES)
def test_what_must_fail_fails_and_the_next_call_is_well(pair: World, how: str):
    with pytest.raises(FAILURES[how][pair.transport == "sim"]):
        pair.run(bodies.fail, how, 1, grace_s=0.5)
    assert pair.run(bodies.who) == [(0, 2, ""), (1, 2, "")]


def unpicklable(ctx: Context) -> object:
    return lambda: ctx.rank


def test_a_result_that_cannot_travel_is_told(pair: World):
    with pytest.raises(RankRaised, match=r"(?i)pickle"):
        pair.run(unpicklable)


def draw(ctx: Context) -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_random_numbers_do_not_leak_into_the_next_call(pair: World):
    first = pair.run(draw, seed=5)
    assert first[0] != first[1]
    assert pair.run(draw, seed=5) == first


def leave_behind(ctx: Context) -> None:
    torch.set_default_dtype(torch.float64)
    hooks.register_module_forward_hook(lambda *args: None)
    torch.set_grad_enabled(False)


def state(ctx: Context) -> tuple[torch.dtype, int, bool]:
    return torch.get_default_dtype(), len(hooks._global_forward_hooks), torch.is_grad_enabled()


def test_dtype_hooks_and_grad_mode_do_not_leak_and_are_told(pair: World):
    leaks = " ".join(pair.run(leave_behind).leaks)
    for name in ("default dtype", "global module hooks", "grad mode"):
        assert name in leaks
    assert pair.run(state) == [(torch.float32, 0, True)] * 2

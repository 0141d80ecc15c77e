"""Laws of attention that need no reference: sums that are conserved, and changes that must show.

They hold for every dtype, mask and grouping of heads, at any size, and judge gradients that nobody
could compute twice. The weights of a row sum to one, so a gradient of v is dO distributed; a shift
of all scores of a row changes nothing, so dK sums to zero; scores are linear in q and in k, so
<Q, dQ> = <K, dK>. They cannot see a mask or a scale that is wrong both ways; `test_masks` can.
"""

from __future__ import annotations

import math
import unittest
from functools import partial

import pytest
import torch

from spec_tests.chapters.attention import law, rules
from spec_tests.chapters.attention.bodies import ATTENTION
from spec_tests.chapters.attention.problem import (
    ALL,
    OUTPUT_AND_GRADIENTS,
    WHOLE_TILES,
    Problem,
    inputs,
    same,
)
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=ATTENTION, level="correct", worlds=(1,))

# Relative to the sum of magnitudes. Right code was measured at 1e-7, 2e-5 and eight times that.
OF_A_SUM = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2.4e-2}
# Lengths that no tile divides, two heads on one key head, more keys than queries: no blind row.
GROUPED = law.varied(Problem(seq_q=40, seq_k=70, kv_heads=1), causal=law.BOTH, dtype=[*OF_A_SUM])


def judge_small(world, subject, problem, what, excess, size):
    """An excess must be small beside the magnitudes of what was summed."""
    __tracebackhide__ = True
    is_rounded = problem.dtype == "float32" and law.is_tf32(world, subject)
    allowed = OF_A_SUM["float16" if is_rounded else problem.dtype]
    share = float((excess.abs() / size).max())
    bound = rules.Bound(what, share, allowed)
    rules.note(bound)
    judge.holds(
        bound.is_kept,
        f"{what}: expected zero to {allowed:.1e} of the magnitudes, got {share:.2e}",
        likely="a tile, a head of a group or the scale is missing on one side, or delta is wrong",
    )


@clause(
    "attention.laws.masses",
    source="contract: values; weights of a row sum to one; a shift of its scores changes nothing",
)
@law.problems(GROUPED)
def test_gradients_of_keys_and_values_have_the_sums_they_must(world, subject, problem):
    """Per key head, dV MUST sum to the dO of its queries over all keys, and dK to zero."""
    problem = law.fitting(world, subject, problem)
    [seen] = law.asked(world, subject, problem, ("dQ", "dK", "dV"), same)

    dk, dv = seen["dK"].double(), seen["dV"].double()
    do = inputs(problem).do.double().unflatten(1, (problem.num_kv_heads, -1))
    excess, size = dv.sum(2) - do.sum((2, 3)), do.abs().sum((2, 3))
    judge_small(world, subject, problem, "sum of dV minus sum of dO", excess, size)
    judge_small(world, subject, problem, "sum of dK", dk.sum(2), dk.abs().sum(2))


@clause(
    "attention.laws.products",
    source="contract: values; Euler: scores are linear in q and in k, the output is linear in v",
)
@law.problems(GROUPED)
def test_gradients_obey_euler(world, subject, problem):
    """Per key head <Q, dQ> MUST be <K, dK>, and <O, dO> MUST be <V, dV>."""
    problem = law.fitting(world, subject, problem)
    [seen] = law.asked(world, subject, problem, OUTPUT_AND_GRADIENTS, same)

    x = inputs(problem)
    for what, (q, dq), (k, dk) in (
        ("<Q dQ> - <K dK>", (x.q, seen["dQ"]), (x.k, seen["dK"])),
        ("<O dO> - <V dV>", (seen["O"], x.do), (x.v, seen["dV"])),
    ):
        left = (q.double() * dq.double()).unflatten(1, (problem.num_kv_heads, -1))
        right = k.double() * dk.double()
        size = left.abs().sum((2, 3, 4)) + right.abs().sum((2, 3))
        excess = left.sum((2, 3, 4)) - right.sum((2, 3))
        judge_small(world, subject, problem, what, excess, size)


SHIFT = torch.linspace(-2.0, 2.0, 16)


def shifted(x):
    """A vector is added to all keys."""
    return x.but(k=x.k + SHIFT.to(x.k.device))


def permuted(x):
    """The keys, with their values, in another order."""
    order = torch.randperm(x.k.shape[2], generator=torch.Generator().manual_seed(5))
    return x.but(k=x.k[:, :, order], v=x.v[:, :, order])


@clause(
    "attention.laws.changes-of-keys",
    source="contract: values; softmax knows differences only, and no order",
)
@pytest.mark.parametrize("change", [shifted, permuted], ids=["shifted", "permuted"])
def test_a_shift_or_an_order_of_keys_does_not_matter(world, subject, change):
    """A vector added to all keys MUST move L alone, and an order of keys nothing."""
    problem = law.fitting(world, subject, Problem(seq_q=40, seq_k=70))
    before, after = law.asked(world, subject, problem, ("O", "L", "dQ"), same, change)

    if change is shifted and "L" in before:
        moved = (inputs(problem).q.double() @ SHIFT.double() * problem.factor).float()
        before["L"] = before["L"] + moved
    law.near(world, subject, after, before, f"keys {change.__name__}")


@clause(
    "attention.laws.between-extremes",
    source="contract: values; weights are positive and sum to one",
)
@law.problems(law.varied(Problem(seq_q=50, seq_k=70), causal=law.BOTH, data=("normal", "large")))
def test_the_output_lies_between_the_values_it_sees(world, subject, problem):
    """O MUST lie between the least and largest value seen, L between max score and that + ln n."""
    problem = law.fitting(world, subject, problem)
    [seen] = law.asked(world, subject, problem, ("O", "L"), same)

    x, hidden = inputs(problem), ~problem.visible()
    spread = x.v[:, :, None].double()  # [B, H, 1, K, D]
    most = spread.masked_fill(hidden[..., None], -torch.inf).amax(3)
    least = spread.masked_fill(hidden[..., None], torch.inf).amin(3)
    scores = x.q.double() @ x.k.double().transpose(-1, -2) * problem.factor
    top = scores.masked_fill(hidden, -torch.inf).amax(-1)
    count = problem.visible().sum(-1).double()
    unit = rules.TF32 if law.is_tf32(world, subject) else 2.0**-20
    for name, low, high, size in (
        ("O", least, most, float(x.v.abs().max())),
        ("L", top, top + count.log(), max(1.0, float(top.abs().max()))),
    ):
        if name not in seen:
            continue
        below, above = low - seen[name].double(), seen[name].double() - high
        worst = float(torch.maximum(below, above).max())
        judge.holds(
            worst <= unit * size,
            f"{name}: expected values between the least and the largest possible, got one that is "
            f"{worst:.3g} outside",
            likely="weights that do not sum to one: a normaliser that misses or counts a tile "
            "twice",
        )


def unequal(world, subject, seq_k):
    """A problem with more keys than queries, where that can be asked for."""
    problem = law.fitting(world, subject, Problem(seq_q=40, seq_k=seq_k))
    if "equal lengths" in problem.fit:
        raise unittest.SkipTest("it takes equal lengths only, for which attention.shapes.* fail")
    return problem


def part(x, first=None, end=None):
    return x.but(k=x.k[:, :, first:end].contiguous(), v=x.v[:, :, first:end].contiguous())


@clause(
    "attention.laws.split-keys-merge",
    source="contract: lse-values, values; "
    "Liu et al. 2023, ring attention; xformers, test_fmha_merge_attentions",
)
@pytest.mark.parametrize("at", [1, 37, 48])
def test_parts_of_the_keys_merge_by_their_log_sum_exp(world, subject, at):
    """Results over k[:n] and k[n:] MUST merge by their L into the result over k, none left out.

    Ring attention, split-KV decoding and prefix caches are this law.
    """
    problem = unequal(world, subject, 64)
    if "whole tiles" in problem.fit:  # so have both parts to be
        problem, at = problem.but(seq_k=2 * WHOLE_TILES), WHOLE_TILES
    changes = (same, partial(part, end=at), partial(part, first=at))
    whole, *halves = law.asked(world, subject, problem, ("O", "L"), *changes)

    lse = torch.logaddexp(*(half["L"] for half in halves))
    one, other = (half["O"] * (half["L"] - lse).exp()[..., None] for half in halves)
    law.near(world, subject, whole, {"O": one + other, "L": lse}, f"split at {at}")


def doubled(x):
    """Each key and value twice."""
    return x.but(k=x.k.repeat_interleave(2, dim=2), v=x.v.repeat_interleave(2, dim=2))


@clause(
    "attention.laws.doubled-keys",
    source="contract: lse-values, values; "
    "a key that is there twice has twice the weight, as all others",
)
def test_doubling_every_key_adds_ln_2_to_the_log_sum_exp(world, subject):
    """Doubling every key and value MUST leave O and the sum of dV, and add ln 2 to L."""
    problem = unequal(world, subject, 50)
    once, twice = law.asked(world, subject, problem, ("O", "L", "dV"), same, doubled)

    twice["dV"] = twice["dV"].unflatten(2, (-1, 2)).sum(3)
    law.near(world, subject, twice, {**once, "L": once["L"] + math.log(2.0)}, "keys doubled")


def scaled(x):
    """4 q, k / 4, 8 v and 2 dO."""
    return x.but(q=4 * x.q, k=x.k / 4, v=8 * x.v, do=2 * x.do)


@clause(
    "attention.laws.powers-of-two",
    source="contract: values; in binary floating point a power of two moves the exponent alone",
)
@law.problems(law.varied(Problem(seq_q=40, seq_k=50), causal=law.BOTH))
def test_powers_of_two_come_through_exactly(world, subject, problem):
    """In float32, (4 q, k / 4, 8 v, 2 dO) MUST give the same bits, scaled: nothing is clamped."""
    problem = law.fitting(world, subject, problem)
    before, after = law.asked(world, subject, problem, ALL, same, scaled)
    law.require_finite(before)

    by = {"O": 8, "L": 1, "dQ": 2 * 8 / 4, "dK": 2 * 8 * 4, "dV": 2}
    scaled_back = {name: value / by[name] for name, value in after.items()}
    judge.tensors([scaled_back], before, quantity="answer scaled by powers of two")

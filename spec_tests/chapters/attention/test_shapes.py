"""Shapes: lengths that no tile divides, heads that share keys, and sizes of one and of none.

Inside, a kernel sees tiles, padded head dims and flat offsets. Each of these clauses is one way in
which they can be seen from outside: a tail that is counted, a head that reads its neighbour's keys,
an offset that only ever worked for a batch of one.
"""

from __future__ import annotations

import pytest
import torch

from spec_tests.chapters.attention import bodies, rules
from spec_tests.chapters.attention.bodies import ATTENTION, call, observe
from spec_tests.chapters.attention.defined import (
    ALL,
    OUTPUT_AND_GRADIENTS,
    as_defined,
    fitting,
    is_tf32,
    require_causal,
)
from spec_tests.chapters.attention.problem import AS_THE_EXERCISE, RAGGED, Problem, inputs
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.tolerance import rounding

clause = clauses(judges=ATTENTION, level="correct", worlds=(1,))

# Around tiles of 16, 32, 64 and 128; the last are what `fitting` tries.
LENGTHS = {
    "17-130": Problem(seq_q=17, seq_k=130),
    "33-31": Problem(seq_q=33, seq_k=31),
    "129-65": Problem(seq_q=129, seq_k=65),
    "2-200": Problem(seq_q=2, seq_k=200),
    "70-90": RAGGED.but(head_dim=16),
    "70-90-causal": RAGGED.but(head_dim=16, causal=True),
    "70-70-causal": RAGGED.but(head_dim=16, causal=True, seq_k=None),
}


@clause(
    "attention.shapes.ragged-lengths",
    source="contract: any-size; flash-attn tests: lengths (113, 203), (1023, 1024), (1, 239)",
)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths_need_no_tile_to_divide_them(world, subject, lengths):
    """Any seq_q and seq_k MUST give the definition's output and gradients, not only whole tiles."""
    require_causal(world, subject, LENGTHS[lengths])
    as_defined(world, subject, LENGTHS[lengths], *OUTPUT_AND_GRADIENTS)


FORWARD_LENGTHS = {
    "128-256": Problem(seq_q=128, seq_k=256),
    "256-128": Problem(seq_q=256, seq_k=128),
    "128-90": Problem(seq_q=128, seq_k=90),
    "90-128": Problem(seq_q=90, seq_k=128),
    "90-90": Problem(seq_q=90),
}
"""Lengths that differ and are whole tiles, one length of whole tiles, and none."""


@clause(
    "attention.shapes.lengths-of-the-forward",
    source="contract: any-size; kernels that take the number of keys from q, or count padded keys",
)
@pytest.mark.parametrize("lengths", FORWARD_LENGTHS)
def test_any_lengths_give_the_definitions_output(world, subject, lengths):
    """Any seq_q and seq_k MUST give the definition's output, whatever the backward does."""
    as_defined(world, subject, FORWARD_LENGTHS[lengths], "O")


@clause(
    "attention.shapes.head-dims",
    source="contract: any-size; flash-attn tests: any head dim up to 256, padded inside",
)
@pytest.mark.parametrize("head_dim", [16, 24, 40, 80, 111, 128])
def test_any_head_dim_is_right(world, subject, head_dim):
    """Any head dim MUST give the definition's values, a power of two or not."""
    problem = fitting(world, subject, Problem(seq_q=40, head_dim=head_dim)).but(head_dim=head_dim)
    as_defined(world, subject, problem, *OUTPUT_AND_GRADIENTS)


@clause(
    "attention.shapes.large-head-dims",
    source="contract: large-dims; kernels end at 128 or 256, and what lies beyond is another row",
)
def test_a_head_dim_beyond_256_is_right_or_refused(world, subject):
    """A head dim of 320 MUST give the definition's values, or be refused with an error."""
    problem = fitting(world, subject, Problem(seq_q=20, heads=1)).but(head_dim=320)
    seen = observe(world, subject, bodies.or_refused, problem)

    if not isinstance(seen, str):
        rules.close(seen, problem, names=ALL, tf32=is_tf32(world, subject))


@clause(
    "attention.shapes.without-heads",
    level="course",
    source="contract: three-dims; CS336 assignment 2: [batch, seq, head_dim]",
)
def test_inputs_without_heads_are_taken(world, subject):
    """3-D inputs [batch, seq, head_dim] MUST be attention of one head, and give 3-D outputs.

    A batch of three: four sequences of 128 queries are as many as tiles of 32, so that in the
    exercise's own test a grid with its axes exchanged is right.
    """
    problem = AS_THE_EXERCISE.but(heads=1, batch=3)
    seen = observe(world, subject, flat, problem)

    shape = (problem.batch, problem.seq_q, problem.head_dim)
    judge.equal([tuple(t.shape) for t in seen.values()], shape, quantity="shape")
    with_heads = {name: t.unsqueeze(1) for name, t in seen.items()}
    rules.close(with_heads, problem, names=OUTPUT_AND_GRADIENTS, tf32=is_tf32(world, subject))


def flat(ctx, subject, problem):
    """O and gradients of the same problem without the dim of heads."""
    x = inputs(problem)
    q, k, v, do = (t.squeeze(1).to(ctx.device) for t in (x.q, x.k, x.v, x.do))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = call(ctx, subject, *leaves, causal=problem.causal)
    found = torch.autograd.grad(out, leaves, do)
    return {"O": out, **dict(zip(rules.GRADIENTS, found, strict=True))}


@clause(
    "attention.shapes.grouped-heads",
    source="contract: grouped; Ainslie et al. 2023; levanter issue 449",
)
@pytest.mark.parametrize("heads", ["4-1", "4-2", "4-4", "6-2", "6-3"])
def test_query_heads_share_keys_in_neighbouring_groups(world, subject, heads):
    """Query head h MUST read key head h // (heads // kv_heads), and dK, dV MUST sum over its group.

    h modulo kv_heads reads the wrong keys, and is the same where there is one key head or as many
    as query heads: those that most tests have. Powers of two hide shifts in place of quotients.
    """
    num_heads, kv_heads = map(int, heads.split("-"))
    problem = Problem(seq_q=30, heads=num_heads, kv_heads=kv_heads)
    problem = fitting(world, subject, problem)
    as_defined(world, subject, problem, *OUTPUT_AND_GRADIENTS)


@clause(
    "attention.shapes.grouped-sums-are-wide",
    source="contract: one-rounding, grouped; "
    "levanter issue 449, ffpa issue 301: sums over the group in half precision",
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_a_group_are_summed_before_they_are_rounded(world, subject, dtype):
    """dK and dV of a group of 32 MUST be rounded once, after the sum: within 1.25 u in norm."""
    problem = Problem(seq_q=20, seq_k=24, heads=32, kv_heads=1, dtype=dtype)
    problem = fitting(world, subject, problem)
    as_defined(world, subject, problem, "dK", "dV")


@clause("attention.shapes.one-of-each", source="contract: any-size; flash-attn tests, length 1")
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_one_query_and_one_key_give_the_value_itself(world, subject, mask):
    """With one query and one key, O MUST be v and dV MUST be dO, and dQ and dK vanish."""
    problem = Problem(seq_q=1, causal=mask == "causal")
    seen = observe(world, subject, bodies.gradients, problem)

    x = inputs(problem)
    # One weight over itself: a product and a quotient.
    within = rounding(torch.float32, terms=1)
    # dP and delta are the same sum of head_dim products, formed in two ways.
    size = float(x.do.norm() * x.v.norm() * max(x.q.abs().max(), x.k.abs().max()))
    vanishing = rounding(torch.float32, terms=problem.head_dim, floor=size)
    if is_tf32(world, subject):
        within, vanishing = (
            bound.plus(2 * rules.TF32, "products of eleven bits") for bound in (within, vanishing)
        )
    copies, zeros = {"O": x.v, "dV": x.do}, {"dQ": 0 * x.q, "dK": 0 * x.k}
    judge.tensors(
        [{name: seen[name] for name in copies}],
        copies,
        quantity="value of the only key",
        within=within,
        given=repr(problem),
    )
    judge.tensors(
        [{name: seen[name] for name in zeros}], zeros, quantity="gradient", within=vanishing
    )


EMPTY = {
    "no-batch": Problem(batch=0, seq_q=20),
    "no-heads": Problem(heads=0, seq_q=20),
    "no-queries": Problem(seq_q=0, seq_k=20),
    "no-keys": Problem(seq_q=20, seq_k=0),
    "no-keys-causal": Problem(seq_q=20, seq_k=0, causal=True),
}


@clause(
    "attention.shapes.empty",
    level="production",
    source="contract: empty; xformers, test_empty_tensors",
)
@pytest.mark.parametrize("size", EMPTY)
def test_sizes_of_zero_give_empty_or_blind_answers(world, subject, size):
    """Sizes of zero MUST give shapes of zero; without keys, zeros and -inf; gradients are zero."""
    problem = EMPTY[size]
    seen = observe(world, subject, bodies.everything, problem)

    x = inputs(problem)
    wanted = {"O": x.q, "dQ": x.q, "dK": x.k, "dV": x.v}
    judge.tensors(
        [seen],
        {
            **{name: torch.zeros_like(t) for name, t in wanted.items()},
            "L": torch.full(x.q.shape[:-1], -torch.inf),
        },
        quantity="answer",
        given=repr(problem),
    )


def permuted(ctx, subject, problem):
    """O and L, with the batch and the heads in order and permuted (keys with their group)."""
    x = inputs(problem).to(ctx.device)
    batch, groups = torch.tensor([1, 0]), torch.tensor([1, 0])
    size = problem.heads // problem.num_kv_heads
    heads = (groups[:, None] * size + torch.arange(size)).flatten()
    found = {}
    for name, order in (
        ("in order", (slice(None), slice(None), slice(None))),
        ("permuted", (batch, heads, groups)),
    ):
        q, k, v = x.q[order[0]][:, order[1]], x.k[order[0]][:, order[2]], x.v[order[0]][:, order[2]]
        out, lse = call(ctx, subject, q, k, v, causal=problem.causal, return_lse=True)
        found[name] = {"O": out, "L": lse}
    moved = {name: t[batch][:, heads] for name, t in found["in order"].items()}
    return moved, found["permuted"]


@clause(
    "attention.shapes.batch-and-heads-are-independent",
    source="contract: rows-apart; Triton issues 6242 and 5816: the test had a batch of one",
)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_order_of_batch_and_heads_does_not_matter(world, subject, mask):
    """Permuting sequences and groups of heads MUST permute the results and change nothing else."""
    problem = Problem(batch=2, heads=4, kv_heads=2, seq_q=20, causal=mask == "causal")
    problem = fitting(world, subject, problem)
    moved, permuted_answer = observe(world, subject, permuted, problem)

    rules.near(
        permuted_answer,
        moved,
        given=repr(problem),
        tf32=is_tf32(world, subject),
        likely="an offset of batch or head is wrong: one reads what belongs to another",
    )

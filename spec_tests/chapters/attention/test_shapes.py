"""Shapes: lengths that no tile divides, heads that share keys, and sizes of one and of none.

Inside, a kernel sees tiles, padded head dims and flat offsets. Each of these clauses is one way in
which they can be seen from outside: a tail that is counted, a head that reads its neighbour's keys,
an offset that only ever worked for a batch of one.
"""

from __future__ import annotations

import torch

from spec_tests.chapters.attention import bodies, law, rules
from spec_tests.chapters.attention.bodies import ATTENTION, observe
from spec_tests.chapters.attention.problem import (
    ALL,
    AS_THE_EXERCISE,
    OUTPUT_AND_GRADIENTS,
    RAGGED,
    Problem,
    inputs,
    same,
)
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.judge.tolerance import rounding

clause = clauses(judges=ATTENTION, level="correct", worlds=(1,))
defined, fitted = rows(clause, law.as_defined), rows(clause, law.as_fitted)

LENGTHS = {
    "17-130": Problem(seq_q=17, seq_k=130),
    "33-31": Problem(seq_q=33, seq_k=31),
    "129-65": Problem(seq_q=129, seq_k=65),
    "2-200": Problem(seq_q=2, seq_k=200),
    "70-90": RAGGED.but(head_dim=16),
    "70-90-causal": RAGGED.but(head_dim=16, causal=True),
    "70-70-causal": RAGGED.but(head_dim=16, causal=True, seq_k=None),
}
"""Around tiles of 16, 32, 64 and 128; the last are what `fitting` tries."""


@clause(
    "attention.shapes.ragged-lengths",
    source="contract: any-size; flash-attn tests: lengths (113, 203), (1023, 1024), (1, 239)",
)
@law.problems(LENGTHS)
def test_lengths_need_no_tile_to_divide_them(world, subject, problem):
    """Any seq_q and seq_k MUST give the definition's output and gradients, not only whole tiles."""
    law.require_causal(world, subject, problem)
    law.as_defined(world, subject, problem, OUTPUT_AND_GRADIENTS)


test_lengths_of_the_forward = defined(
    "attention.shapes.lengths-of-the-forward",
    "Any seq_q and seq_k MUST give the definition's output, whatever the backward does.",
    # Lengths that differ and are whole tiles, one length of whole tiles, and none.
    {
        f"{q}-{k}": Problem(seq_q=q, seq_k=k)
        for q, k in ((128, 256), (256, 128), (128, 90), (90, 128), (90, 90))
    },
    names=("O",),
    source="contract: any-size; kernels that take the number of keys from q, or count padded keys",
)


@clause(
    "attention.shapes.head-dims",
    source="contract: any-size; flash-attn tests: any head dim up to 256, padded inside",
)
@law.problems(law.varied(Problem(seq_q=40), head_dim=(24, 40, 80, 111, 128)))
def test_any_head_dim_is_right(world, subject, problem):
    """Any head dim MUST give the definition's values, a power of two or not."""
    fitted = law.fitting(world, subject, problem).but(head_dim=problem.head_dim)
    law.as_defined(world, subject, fitted, OUTPUT_AND_GRADIENTS)


@clause(
    "attention.shapes.large-head-dims",
    source="contract: large-dims; kernels end at 128 or 256, and what lies beyond is another row",
)
def test_a_head_dim_beyond_256_is_right_or_refused(world, subject):
    """A head dim of 320 MUST give the definition's values, or be refused with an error."""
    problem = law.fitting(world, subject, Problem(seq_q=20, heads=1)).but(head_dim=320)
    seen = observe(world, subject, bodies.or_refused, problem)

    if not isinstance(seen, str):
        law.close(world, subject, seen, problem)


def without_heads(x):
    """The same of one head, without the dim of heads."""
    return x.each(lambda t: t.squeeze(1))


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
    [seen] = law.asked(world, subject, problem, OUTPUT_AND_GRADIENTS, without_heads)

    shape = (problem.batch, problem.seq_q, problem.head_dim)
    judge.equal([tuple(t.shape) for t in seen.values()], shape, quantity="shape")
    with_heads = {name: t.unsqueeze(1) for name, t in seen.items()}
    law.close(world, subject, with_heads, problem, *OUTPUT_AND_GRADIENTS)


test_grouped_heads = fitted(
    "attention.shapes.grouped-heads",
    "Query head h MUST read key head h // (heads // kv_heads), and dK, dV MUST sum over its group.",
    # h modulo kv_heads reads the wrong keys, and is the same where there is one key head or as many
    # as query heads: those that most tests have. Powers of two hide shifts in place of quotients.
    {
        f"{heads}-{groups}": Problem(seq_q=30, heads=heads, kv_heads=groups)
        for heads, groups in ((4, 1), (4, 2), (6, 2), (6, 3))
    },
    names=OUTPUT_AND_GRADIENTS,
    source="contract: grouped; Ainslie et al. 2023; levanter issue 449",
)

test_grouped_sums_are_wide = fitted(
    "attention.shapes.grouped-sums-are-wide",
    "dK and dV of a group of 32 MUST be rounded once, after the sum: within 1.25 u in norm.",
    law.varied(Problem(seq_q=20, seq_k=24, heads=32, kv_heads=1), dtype=("float16", "bfloat16")),
    names=("dK", "dV"),
    source="contract: one-rounding, grouped; "
    "levanter issue 449, ffpa issue 301: sums over the group in half precision",
)


@clause("attention.shapes.one-of-each", source="contract: any-size; flash-attn tests, length 1")
@law.problems(law.varied(Problem(seq_q=1), causal=law.BOTH))
def test_one_query_and_one_key_give_the_value_itself(world, subject, problem):
    """With one query and one key, O MUST be v and dV MUST be dO, and dQ and dK vanish."""
    [seen] = law.asked(world, subject, problem, OUTPUT_AND_GRADIENTS, same)

    x = inputs(problem)
    # One weight over itself: a product and a quotient.
    within = rounding(torch.float32, terms=1)
    # dP and delta are the same sum of head_dim products, formed in two ways.
    size = float(x.do.norm() * x.v.norm() * max(x.q.abs().max(), x.k.abs().max()))
    vanishing = rounding(torch.float32, terms=problem.head_dim, floor=size)
    for wanted, bound, quantity in (
        ({"O": x.v, "dV": x.do}, within, "value of the only key"),
        ({"dQ": 0 * x.q, "dK": 0 * x.k}, vanishing, "gradient"),
    ):
        if law.is_tf32(world, subject):
            bound = bound.plus(2 * rules.TF32, "products of eleven bits")
        found = {name: seen[name] for name in wanted}
        judge.tensors([found], wanted, quantity=quantity, within=bound)


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
@law.problems(EMPTY)
def test_sizes_of_zero_give_empty_or_blind_answers(world, subject, problem):
    """Sizes of zero MUST give shapes of zero; without keys, zeros and -inf; gradients are zero."""
    seen = law.asked(world, subject, problem, ALL, same)

    zeros = inputs(problem).each(torch.zeros_like)
    wanted = {"O": zeros.q, "dQ": zeros.q, "dK": zeros.k, "dV": zeros.v}
    wanted["L"] = torch.full(zeros.q.shape[:-1], -torch.inf)
    judge.tensors(seen, {name: wanted[name] for name in seen[0]}, quantity="answer")


def permuted(x):
    """Both sequences and both groups of heads exchanged."""
    heads = torch.arange(x.q.shape[1]).unflatten(0, (2, -1)).flip(0).flatten()
    return x.each(lambda t: t.flip(0)[:, heads if t.shape[1] == len(heads) else [1, 0]])


@clause(
    "attention.shapes.batch-and-heads-are-independent",
    source="contract: rows-apart; Triton issues 6242 and 5816: the test had a batch of one",
)
@law.problems(law.varied(Problem(batch=2, heads=4, kv_heads=2, seq_q=20), causal=law.BOTH))
def test_the_order_of_batch_and_heads_does_not_matter(world, subject, problem):
    """Permuting sequences and groups of heads MUST permute the results and change nothing else."""
    problem = law.fitting(world, subject, problem)
    in_order, moved = law.asked(world, subject, problem, ("O", "L"), same, permuted)

    wanted = {name: t.flip(0)[:, [2, 3, 0, 1]] for name, t in in_order.items()}
    likely = "an offset of batch or head is wrong: one reads what belongs to another"
    law.near(world, subject, moved, wanted, likely=likely)


# --------------------------------------------------------------------------------------- on a GPU
# A compiler makes another kernel for each head dim, dtype and mask, and has made wrong ones (ptxas
# 12.8 did, of attention). Gaussian inputs alone never showed it: a gradient was five times off
# where a few channels are large.

ON_A_GPU = {
    "transports": ("cuda",),
    "no_impostor": "seen on a GPU alone; what it judges is judged by value in the interpreter, too",
}
EACH = law.varied(
    Problem(seq_q=300, seq_k=333, batch=2, heads=4, kv_heads=2),
    data=("normal", "outliers", "ones"),
    causal=law.BOTH,
    dtype=("bfloat16", "float16", "float32"),
    head_dim=(16, 64, 80, 128, 256),  # one per row of a table of tiles, and some that are padded
)


@clause(
    "attention.device.every-configuration",
    source="contract: values, any-size; "
    "flash-linear-attention issue 1262, TransformerEngine issue 3216: wrong code for a tile",
    **ON_A_GPU,
)
@law.problems(EACH)
def test_every_configuration_has_the_values(world, subject, problem):
    """Every head dim, dtype and mask MUST have the definition's values on three distributions."""
    # Where all is one, dQ and dK are zero but for rounding, and norms of zero allow nothing.
    law.as_fitted(world, subject, problem, ("O", "L", "dV") if problem.data == "ones" else ALL)


test_long_sequences = defined(
    "attention.device.long-sequences",
    "Over 4096 keys in bfloat16, O MUST stay within one rounding, its gradients within 1.25.",
    law.varied(Problem(seq_q=4096, heads=1, dtype="bfloat16"), causal=law.BOTH, head_dim=(64, 128)),
    source="contract: one-rounding; "
    "accumulators in bfloat16 grow worse with length; the norm of the error shows it",
    **ON_A_GPU,
)

test_float32_is_float32 = fitted(
    "attention.device.float32-is-float32",
    "In float32 outputs and gradients MUST have its rounding, not that of TF32's eleven bits.",
    law.varied(Problem(seq_q=300, causal=True), head_dim=(64, 128)),
    tf32=False,
    level="production",
    source="contract: float32-products; "
    "products of float32 are TF32 on tensor cores unless one says otherwise",
    **ON_A_GPU,
)

test_many_sequences = defined(
    "attention.device.many-sequences",
    "More than 65 535 pairs of sequence and head MUST work like few.",
    Problem(seq_q=5, head_dim=16, batch=33_000, heads=2, dtype="float16", causal=True),
    names=OUTPUT_AND_GRADIENTS,
    source="contract: any-size; "
    "CUDA: 65 535 blocks on the second and third axis; PyTorch issue 142228",
    **ON_A_GPU,
)

"""Layout: where the numbers lie in memory has no effect on what they mean.

Models hand over views: heads as the third dim, slices of one fused projection, a value expanded
over the batch, a gradient that is a single one with strides of zero. A kernel gets pointers and
strides of each, and each tensor has its own.
"""

from __future__ import annotations

import unittest
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from spec_tests.chapters.attention import bodies, law
from spec_tests.chapters.attention.bodies import ATTENTION, observe
from spec_tests.chapters.attention.problem import (
    ALL,
    GRADIENTS,
    OUTPUT_AND_GRADIENTS,
    Problem,
    dense,
    inputs,
)
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.ranks.errors import RankRaised

clause = clauses(judges=ATTENTION, level="correct", worlds=(1,))
changed = rows(clause, law.as_changed)


def _stored(t, *order):
    """The same values, stored with the dims in this order."""
    return t.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])


def _shifted(t):
    """The same values, beginning one element into their storage."""
    storage = t.new_zeros(t.numel() + 1)
    return storage[1:].view(t.shape).copy_(t)


def _window(t, right, above=0, below=0, around=0.0):
    """The same values within a storage that holds `around` beside, before and behind the rows."""
    storage = F.pad(t, (0, right, above, below), value=around)
    return storage[:, :, above : above + t.shape[2], : t.shape[3]]


HEADS_INSIDE, HEAD_DIM_OUTSIDE, SEQ_OUTSIDE = (0, 2, 1, 3), (3, 0, 1, 2), (2, 0, 1, 3)
LAYOUTS = {
    "heads-inside": lambda x: [_stored(t, *HEADS_INSIDE) for t in x],
    "only-k": lambda x: [x[0], _stored(x[1], *HEADS_INSIDE), *x[2:]],
    "fused": lambda x: [
        *torch.stack([_stored(t, *HEADS_INSIDE) for t in x[:3]], dim=2).unbind(2),
        x[3],
    ],
    "head-dim-outside": lambda x: [_stored(t, *HEAD_DIM_OUTSIDE) for t in x],
    "one-element-in": lambda x: [_shifted(t) for t in x],
    "head-dim-outside-of-v": lambda x: [*x[:2], _stored(x[2], *HEAD_DIM_OUTSIDE), x[3]],
    "head-dim-outside-of-do": lambda x: [*x[:3], _stored(x[3], *HEAD_DIM_OUTSIDE)],
}
OF_ONE_HEAD = {
    "each-in-a-window-of-its-own": lambda x: [_window(t, extra) for extra, t in enumerate(x, 1)],
    "batches-interleaved": lambda x: [_stored(t, *SEQ_OUTSIDE) for t in x],
    **{name: LAYOUTS[name] for name in ("head-dim-outside-of-v", "head-dim-outside-of-do")},
}
"""Likewise, where [batch, 1, seq, head_dim] becomes [batch, seq, head_dim] without a copy."""


def laid_out(x, layout):
    """The same values in that layout."""
    q, k, v, do = {**LAYOUTS, **OF_ONE_HEAD}[layout]([x.q, x.k, x.v, x.do])
    return x.but(q=q, k=k, v=v, do=do)


@clause(
    "attention.layout.strides",
    source="contract: any-strides; "
    "flash-attn issues 355 and 2777; the Triton tutorial asserts that all strides are equal",
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_tensor_has_strides_of_its_own(world, subject, layout):
    """Any strides of q, k, v and dO, each its own, MUST give the same values.

    dO comes as autograd makes it: transposed after `out.transpose(1, 2)`, which is what models do.
    """
    problem = law.fitting(world, subject, Problem(seq_q=40, batch=2))
    [seen] = law.asked(world, subject, problem, ALL, partial(laid_out, layout=layout))
    law.close(world, subject, seen, problem)


@clause(
    "attention.layout.strides-without-heads",
    source="contract: any-strides; solutions of CS336 that pass one tensor's strides for another's",
)
@pytest.mark.parametrize("layout", OF_ONE_HEAD)
@law.problems(law.varied(Problem(seq_q=40, batch=2, heads=1), dtype=("float32", "float16")))
def test_each_tensor_of_one_head_has_strides_of_its_own(world, subject, layout, problem):
    """With one head, too, any strides of q, k, v and dO MUST give the same values.

    What joins batch and heads copies where there are several, and so hides a wrong stride.
    """
    problem = law.fitting(world, subject, problem)
    law.require_right(world, subject, problem)
    [seen] = law.asked(world, subject, problem, ALL, partial(laid_out, layout=layout))
    law.close(world, subject, seen, problem)


def summed(x):
    """The gradient of `out.sum()`: dO is a single one, with strides of zero."""
    return x.but(do=x.do.new_ones(()).expand_as(x.do))


test_strides_of_zero = changed(
    "attention.layout.strides-of-zero",
    "The gradients of `out.sum()` MUST be right: dO has strides of zero there.",
    # Values alone, dV above all: with dO of ones dQ and dK are a difference of equal sums.
    Problem(seq_q=40),
    change=summed,
    names=GRADIENTS,
    what="out.sum()",
    source="contract: any-strides; "
    "flash-attn issue 91: out.sum().backward() hands over strides of zero",
)


def expanded(x):
    """k and v of the first sequence, expanded over the batch."""
    return x.but(k=x.k[:1].expand_as(x.k), v=x.v[:1].expand_as(x.v))


test_expanded_keys = changed(
    "attention.layout.expanded-keys",
    "k and v expanded over the batch MUST give the values and gradients of copies.",
    Problem(seq_q=40, batch=3),
    change=expanded,
    names=OUTPUT_AND_GRADIENTS,
    what="k and v expanded",
    source="contract: any-strides; "
    "one prompt for many continuations; a gradient buffer made like an expanded input",
)


def amid(x, around):
    """q, k, v and dO are windows of storages full of `around`."""
    q, k, v, do = (_window(t, 8, 8, 72, around) for t in (x.q, x.k, x.v, x.do))
    return x.but(q=q, k=k, v=v, do=do)


@clause(
    "attention.layout.what-lies-around",
    source="contract: any-strides; "
    "xformers, test_nans_in_padding; flash-attn issue 443, overflow in padded rows",
)
@pytest.mark.parametrize("around", [float("nan"), 1e4])
def test_what_lies_around_the_tensors_does_not_matter(world, subject, around):
    """Memory before and behind rows and head dims MUST NOT change a bit of the result.

    The last tile reaches beyond seq_k, seq_q or head_dim: loads without a mask find it, and a
    weight of zero does not help against NaN.
    """
    problem = law.fitting(world, subject, Problem(seq_q=45, seq_k=50, head_dim=24))
    try:
        [clean] = law.asked(world, subject, problem, ALL, partial(amid, around=0.0))
    except RankRaised as error:
        raise unittest.SkipTest(
            "it refuses windows, for which attention.layout.strides-without-heads fails"
        ) from error
    law.require_finite(clean)
    seen = law.asked(world, subject, problem, ALL, partial(amid, around=around))

    judge.tensors(seen, clean, quantity="value among zeros")


def kept(ctx, subject, problem):
    """The inputs after forward and backward, and a forward without gradients."""
    x = inputs(problem).to(ctx.device)
    bodies.answer(ctx, subject, problem, x, GRADIENTS)
    bodies.answer(ctx, subject, problem, x, ("O",))
    return {"q": x.q, "k": x.k, "v": x.v, "dO": x.do}


@clause(
    "attention.layout.inputs-are-kept",
    source="contract: inputs-stay; a scale that is multiplied into k in place",
)
def test_inputs_are_as_they_were(world, subject):
    """q, k, v and dO MUST hold the same bits after forward and backward."""
    problem = law.fitting(world, subject, Problem(seq_q=40, head_dim=24))
    seen = observe(world, subject, kept, problem)

    x = inputs(problem)
    judge.tensors([seen], {"q": x.q, "k": x.k, "v": x.v, "dO": x.do}, quantity="input before")


def thrice(x):
    """One tensor is query, key and value."""
    return x.but(k=x.q, v=x.q)


@clause(
    "attention.layout.one-tensor-thrice",
    source="contract: values; self-attention without projections",
)
def test_one_tensor_may_be_query_key_and_value(world, subject):
    """attention(x, x, x) MUST give x the sum of the three gradients."""
    problem = law.fitting(world, subject, Problem(seq_q=40))
    [seen] = law.asked(world, subject, problem, ("O", "dQ"), thrice)

    found = dense(problem, thrice(inputs(problem)), torch.float64, scale_on_keys=False)
    total = found["dQ"] + found["dK"] + found["dV"]
    wanted = {"O": found["O"].float(), "dQ": total.float()}
    law.near(world, subject, seen, wanted, "q is k is v")


def far_apart(ctx, subject, problem, dim):
    """The answers where one stride of k is so large that offsets exceed 2**31, and where it is not.

    None if there is no answer to the latter.
    """
    x = inputs(problem)
    try:
        near_by = bodies.answer(
            ctx, subject, problem, x.but(k=_strided(x.k, dim, 2 * x.k.stride(dim)))
        )
    except NotImplementedError:
        raise
    except Exception:
        return None
    far = _strided(x.k, dim, 2**31 // (x.k.shape[dim] - 1) + 64)
    return bodies.answer(ctx, subject, problem, x.but(k=far)), near_by


def _strided(tensor, dim, stride):
    """A copy with that stride in `dim`."""
    strides = list(tensor.stride())
    strides[dim] = stride
    num_elements = sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)) + 1
    # Untouched pages of a fresh allocation cost nothing: gigabytes of addresses, not of memory.
    storage = torch.empty(num_elements, dtype=tensor.dtype, device=tensor.device)
    return storage.as_strided(tensor.shape, strides).copy_(tensor)


@clause(
    "attention.layout.offsets-of-64-bits",
    level="production",
    source="contract: any-strides; PyTorch issue 190857, SageAttention issue 386",
)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_offsets_may_exceed_two_to_the_31(world, subject, dim):
    """Offsets of batch, head or row beyond 2**31 elements MUST be right.

    Kernels form them from 32-bit indices; where only batch and head are widened, a cache of one
    long sequence still wraps round, to other values or to a fault of the process.
    """
    # Half the bytes of float32, where it is taken.
    takes_half = law.takes_dtype(world, subject, "float16", OUTPUT_AND_GRADIENTS)
    # One head or one batch: what joins the two copies nothing, and keeps the stride.
    batch, heads = [(3, 1), (1, 3), (1, 1)][dim]
    dtype = "float16" if takes_half else "float32"
    problem = Problem(seq_q=20, seq_k=40, batch=batch, heads=heads, dtype=dtype)
    problem = law.fitting(world, subject, problem)
    law.require_backward(world, subject)
    found = observe(world, subject, far_apart, problem, dim)
    if found is None:
        raise unittest.SkipTest(
            "such strides are refused, for which attention.layout.strides fails"
        )
    seen, near_by = found
    law.near(world, subject, seen, near_by, f"k far apart in dim {dim}")

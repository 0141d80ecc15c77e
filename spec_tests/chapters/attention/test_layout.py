"""Layout: where the numbers lie in memory has no effect on what they mean.

Models hand over views: heads as the third dim, slices of one fused projection, a value expanded
over the batch, a gradient that is a single one with strides of zero. A kernel gets pointers and
strides of each, and each tensor has its own.
"""

from __future__ import annotations

import functools
import unittest

import pytest
import torch

from spec_tests.chapters.attention import rules
from spec_tests.chapters.attention.bodies import ATTENTION, arguments, call, observe
from spec_tests.chapters.attention.defined import (
    ALL,
    fitting,
    is_tf32,
    require_backward,
    require_finite,
    require_right,
    takes_dtype,
)
from spec_tests.chapters.attention.problem import Problem, dense, inputs
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.ranks.errors import RankRaised

clause = clauses(judges=ATTENTION, level="correct", worlds=(1,))


def _heads_inside(t: torch.Tensor) -> torch.Tensor:
    """The same values, stored as [batch, seq, heads, head_dim]."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _head_dim_outside(t: torch.Tensor) -> torch.Tensor:
    """The same values, stored with head_dim first: the last stride is not one."""
    return t.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


def _shifted(t: torch.Tensor) -> torch.Tensor:
    """The same values, beginning one element into their storage."""
    storage = t.new_zeros(t.numel() + 1)
    return storage[1:].view(t.shape).copy_(t)


def _amid(t: torch.Tensor, around: float) -> torch.Tensor:
    """The same values, a window of a storage that holds `around` before and behind each row."""
    storage = t.new_full((*t.shape[:2], t.shape[2] + 80, t.shape[3] + 8), around)
    storage[:, :, 8:-72, :-8] = t
    return storage[:, :, 8:-72, :-8]


def _wide(t: torch.Tensor, extra: int) -> torch.Tensor:
    """The same values, `extra` elements further apart from row to row."""
    return torch.cat([t, t.new_zeros((*t.shape[:3], extra))], dim=-1)[..., : t.shape[3]]


LAYOUTS = {
    "heads-inside": lambda x: [_heads_inside(t) for t in x],
    "only-k": lambda x: [x[0], _heads_inside(x[1]), *x[2:]],
    "fused": lambda x: [*torch.stack([_heads_inside(t) for t in x[:3]], dim=2).unbind(2), x[3]],
    "head-dim-outside": lambda x: [_head_dim_outside(t) for t in x],
    "one-element-in": lambda x: [_shifted(t) for t in x],
    "head-dim-outside-of-v": lambda x: [*x[:2], _head_dim_outside(x[2]), x[3]],
    "head-dim-outside-of-do": lambda x: [*x[:3], _head_dim_outside(x[3])],
}
OF_ONE_HEAD = {
    "each-in-a-window-of-its-own": lambda x: [_wide(t, extra) for extra, t in enumerate(x, 1)],
    "batches-interleaved": lambda x: [
        t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for t in x
    ],
    **{name: LAYOUTS[name] for name in ("head-dim-outside-of-v", "head-dim-outside-of-do")},
}
"""Likewise, where [batch, 1, seq, head_dim] becomes [batch, seq, head_dim] without a copy."""


def answer(ctx, subject, problem, x):
    """O, L and the gradients of q, k and v as they lie."""
    leaves = [t.to(ctx.device).requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse = call(ctx, subject, *leaves, return_lse=True, **arguments(problem))
    found = torch.autograd.grad(out, leaves, x.do.to(ctx.device))
    return {"O": out, "L": lse, **dict(zip(rules.GRADIENTS, found, strict=True))}


def laid_out(ctx, subject, problem, layout):
    """The answer with the tensors in that layout."""
    x = inputs(problem)
    change = OF_ONE_HEAD[layout] if problem.heads == 1 else LAYOUTS[layout]
    x.q, x.k, x.v, x.do = change([x.q, x.k, x.v, x.do])
    return answer(ctx, subject, problem, x)


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
    problem = fitting(world, subject, Problem(seq_q=40, batch=2))
    seen = observe(world, subject, laid_out, problem, layout)

    rules.close(seen, problem, names=ALL, tf32=is_tf32(world, subject))


@clause(
    "attention.layout.strides-without-heads",
    source="contract: any-strides; solutions of CS336 that pass one tensor's strides for another's",
)
@pytest.mark.parametrize("layout", OF_ONE_HEAD)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_each_tensor_of_one_head_has_strides_of_its_own(world, subject, layout, dtype):
    """With one head, too, any strides of q, k, v and dO MUST give the same values.

    What joins batch and heads copies where there are several, and so hides a wrong stride.
    """
    problem = fitting(world, subject, Problem(seq_q=40, batch=2, heads=1, dtype=dtype))
    require_right(world, subject, problem)
    seen = observe(world, subject, laid_out, problem, layout)

    rules.close(seen, problem, names=ALL, tf32=is_tf32(world, subject))


def summed(ctx, subject, problem):
    """The gradients of `out.sum()`: dO is a single one, with strides of zero."""
    x = inputs(problem)
    leaves = [t.to(ctx.device).requires_grad_() for t in (x.q, x.k, x.v)]
    out = call(ctx, subject, *leaves, **arguments(problem))
    out.sum().backward()
    return {name: leaf.grad for name, leaf in zip(rules.GRADIENTS, leaves, strict=True)}


def expanded(ctx, subject, problem):
    """The answer where k and v of the first sequence are expanded over the batch."""
    x = inputs(problem)
    k, v = (t[:1].clone().to(ctx.device).requires_grad_() for t in (x.k, x.v))
    q = x.q.to(ctx.device).requires_grad_()
    out = call(ctx, subject, q, k.expand_as(x.k), v.expand_as(x.v), **arguments(problem))
    found = torch.autograd.grad(out, (q, k, v), x.do.to(ctx.device))
    return {"O": out, **dict(zip(rules.GRADIENTS, found, strict=True))}


@clause(
    "attention.layout.strides-of-zero",
    source="contract: any-strides; "
    "flash-attn issue 91: out.sum().backward() hands over strides of zero",
)
def test_an_expanded_upstream_gradient_is_read_as_one(world, subject):
    """The gradients of `out.sum()` MUST be right: dO has strides of zero there.

    Values alone, dV above all: with dO of ones dQ and dK are a difference of equal sums.
    """
    problem = fitting(world, subject, Problem(seq_q=40))
    seen = observe(world, subject, summed, problem)

    x = inputs(problem)
    x.do = torch.ones_like(x.do)
    found = dense(problem, x, torch.float64, scale_on_keys=False)
    wanted = {name: found[name].float() for name in rules.GRADIENTS}
    rules.near(seen, wanted, given=f"{problem!r}, out.sum()", tf32=is_tf32(world, subject))


@clause(
    "attention.layout.expanded-keys",
    source="contract: any-strides; "
    "one prompt for many continuations; a gradient buffer made like an expanded input",
)
def test_keys_expanded_over_the_batch_are_keys(world, subject):
    """k and v expanded over the batch MUST give the values and gradients of copies."""
    problem = fitting(world, subject, Problem(seq_q=40, batch=3))
    seen = observe(world, subject, expanded, problem)

    x = inputs(problem)
    x.k, x.v = (t[:1].expand_as(t).clone() for t in (x.k, x.v))
    found = dense(problem, x, torch.float64, scale_on_keys=False)
    for name in ("dK", "dV"):
        found[name] = found[name].sum(dim=0, keepdim=True)
    wanted = {name: found[name].float() for name in ("O", *rules.GRADIENTS)}
    rules.near(seen, wanted, given=f"{problem!r}, k and v expanded", tf32=is_tf32(world, subject))


def amid(ctx, subject, problem, around):
    """The answer where q, k, v and dO are windows of storages full of `around`."""
    x = inputs(problem)
    x.q, x.k, x.v, x.do = (_amid(t, around) for t in (x.q, x.k, x.v, x.do))
    return answer(ctx, subject, problem, x)


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
    problem = fitting(world, subject, Problem(seq_q=45, seq_k=50, head_dim=24))
    try:
        clean = observe(world, subject, amid, problem, 0.0)
    except RankRaised as error:
        raise unittest.SkipTest(
            "it refuses windows, for which attention.layout.strides-without-heads fails"
        ) from error
    require_finite(clean)
    seen = observe(world, subject, amid, problem, around)

    judge.tensors([seen], clean, quantity="value among zeros", given=repr(problem))


def kept(ctx, subject, problem):
    """The inputs after forward and backward."""
    x = inputs(problem).to(ctx.device)
    out = call(ctx, subject, x.q, x.k, x.v, **arguments(problem))
    torch.autograd.grad(out, (x.q, x.k, x.v), x.do)
    return {"q": x.q.detach(), "k": x.k.detach(), "v": x.v.detach(), "dO": x.do}


@clause(
    "attention.layout.inputs-are-kept",
    source="contract: inputs-stay; a scale that is multiplied into k in place",
)
def test_inputs_are_as_they_were(world, subject):
    """q, k, v and dO MUST hold the same bits after forward and backward."""
    problem = fitting(world, subject, Problem(seq_q=40, head_dim=24))
    seen = observe(world, subject, kept, problem)

    x = inputs(problem)
    judge.tensors([seen], {"q": x.q, "k": x.k, "v": x.v, "dO": x.do}, quantity="input before")


def thrice(ctx, subject, problem):
    """O and the gradient of x for attention(x, x, x)."""
    x = inputs(problem).to(ctx.device)
    out = call(ctx, subject, x.q, x.q, x.q, **arguments(problem))
    return {"O": out, "dX": torch.autograd.grad(out, (x.q,), x.do)[0]}


@clause(
    "attention.layout.one-tensor-thrice",
    source="contract: values; self-attention without projections",
)
def test_one_tensor_may_be_query_key_and_value(world, subject):
    """attention(x, x, x) MUST give x the sum of the three gradients."""
    problem = fitting(world, subject, Problem(seq_q=40))
    seen = observe(world, subject, thrice, problem)

    x = inputs(problem)
    x.k = x.v = x.q
    found = dense(problem, x, torch.float64, scale_on_keys=False)
    total = functools.reduce(torch.add, (found[name] for name in rules.GRADIENTS))
    wanted = {"O": found["O"].float(), "dX": total.float()}
    rules.near(seen, wanted, given=f"{problem!r}, q is k is v", tf32=is_tf32(world, subject))


def far_apart(ctx, subject, problem, dim):
    """The answers where one stride of k is so large that offsets exceed 2**31, and where it is not.

    None if there is no answer to the latter.
    """
    x = inputs(problem)
    k = x.k
    try:
        x.k = _strided(k, dim, 2 * k.stride(dim))
        near_by = answer(ctx, subject, problem, x)
    except NotImplementedError:
        raise
    except Exception:
        return None
    x.k = _strided(k, dim, 2**31 // (k.shape[dim] - 1) + 64)
    return answer(ctx, subject, problem, x), near_by


def _strided(tensor: torch.Tensor, dim: int, stride: int) -> torch.Tensor:
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
    takes_half = takes_dtype(world, subject, "float16", is_differentiated=True)
    dtype = "float16" if takes_half else "float32"
    # One head or one batch: what joins the two copies nothing, and keeps the stride.
    batch, heads = [(3, 1), (1, 3), (1, 1)][dim]
    problem = Problem(seq_q=20, seq_k=40, batch=batch, heads=heads, dtype=dtype)
    problem = fitting(world, subject, problem)
    require_backward(world, subject)
    found = observe(world, subject, far_apart, problem, dim)
    if found is None:
        raise unittest.SkipTest(
            "such strides are refused, for which attention.layout.strides fails"
        )
    seen, near_by = found

    rules.near(
        seen, near_by, given=f"{problem!r}, k far apart in dim {dim}", tf32=is_tf32(world, subject)
    )

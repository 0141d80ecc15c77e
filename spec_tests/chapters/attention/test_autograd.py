"""Attention as one node of autograd: derivatives that it has, that it refuses, and that stay.

A node whose backward is written by hand can lie in ways that one of PyTorch's own cannot: saved
tensors that changed since, a second derivative that treats the log-sum-exp as a constant, buffers
that were never filled.
"""

from __future__ import annotations

import unittest

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from spec_tests.chapters.attention import rules
from spec_tests.chapters.attention.bodies import ATTENTION, arguments, call, observe, refusal_of
from spec_tests.chapters.attention.defined import ALL, fitting, is_tf32, require_right
from spec_tests.chapters.attention.problem import Problem, inputs
from spec_tests.chapters.attention.test_layout import answer
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=ATTENTION, level="correct", worlds=(1,))


def second(ctx, subject, problem, is_in_a_sum):
    """The gradient of <dQ, dQ>, by itself or beside <O, 1>; or the words of a refusal."""
    x = inputs(problem).to(ctx.device)
    try:
        out = call(ctx, subject, x.q, x.k, x.v, **arguments(problem))
        (dq,) = torch.autograd.grad(out, (x.q,), x.do, create_graph=True)
        total = (dq * dq).sum() + (out.sum() if is_in_a_sum else 0.0)
        found = torch.autograd.grad(total, (x.q, x.k, x.v))
    except Exception as error:
        return refusal_of(ctx, subject, error)
    return dict(zip(rules.GRADIENTS, found, strict=True))


def _second_reference(problem: Problem, is_in_a_sum: bool) -> dict[str, torch.Tensor]:
    x = inputs(problem)
    q, k, v = (t.double().requires_grad_() for t in (x.q, x.k, x.v))
    out = (q @ k.mT * problem.factor).softmax(-1) @ v
    (dq,) = torch.autograd.grad(out, (q,), x.do.double(), create_graph=True)
    total = (dq * dq).sum() + (out.sum() if is_in_a_sum else 0.0)
    found = torch.autograd.grad(total, (q, k, v))
    return dict(zip(rules.GRADIENTS, found, strict=True))


@clause(
    "attention.autograd.second-derivatives",
    source="contract: second-derivative; PyTorch issue 116348",
)
def test_a_second_derivative_is_right_or_refused(world, subject):
    """A second derivative MUST be right or an error, never a number that looks like one.

    A backward of differentiable operations gives one: wrong by half, since what the forward saved
    is a constant to it.
    """
    _judge_second(world, subject, is_in_a_sum=False)


@clause(
    "attention.autograd.second-derivatives-in-a-sum",
    level="production",
    source="contract: second-derivative; `once_differentiable` lets a constant dO through",
)
def test_a_second_derivative_beside_a_first_is_right_or_refused(world, subject):
    """A penalty of the gradient, added to a loss, MUST have its gradient or be an error.

    A gradient without a graph raises where it is alone, and is dropped in silence beside another
    term: a penalty that penalises nothing.
    """
    _judge_second(world, subject, is_in_a_sum=True)


def _judge_second(world, subject, *, is_in_a_sum):
    __tracebackhide__ = True
    problem = fitting(world, subject, Problem(seq_q=20))
    seen = observe(world, subject, second, problem, is_in_a_sum)

    if isinstance(seen, str):
        return
    for name, wanted in _second_reference(problem, is_in_a_sum).items():
        error = float((seen[name].double() - wanted).norm() / wanted.norm())
        judge.holds(
            error < 1e-2,
            f"{name}: expected the second derivative or an error, got one off by {error:.2f}",
            likely="the backward is differentiated with what the forward saved held constant",
            given=repr(problem),
        )


def transformed(ctx, subject, problem, transform):
    """What a transform of torch.func gives, and the same by other means; or the refusal.

    jvp: <dO, the tangent of O> for a tangent of q, and <dQ, that tangent>. vmap: O of two problems
    at once, and one by one.
    """
    x = inputs(problem)
    q, k, v, do = (t.to(ctx.device) for t in (x.q, x.k, x.v, x.do))

    def attend(q, k, v):
        return call(ctx, subject, q, k, v, **arguments(problem))

    try:
        if transform == "jvp":
            tangent = k[:, :, : problem.seq_q]
            moved = torch.func.jvp(lambda q: attend(q, k, v), (q,), (tangent,))[1]
            q.requires_grad_()
            (dq,) = torch.autograd.grad(attend(q, k, v), (q,), do)
            return {"O": (moved * do).sum()}, {"O": (dq * tangent).sum()}
        back = (t.flip(2) for t in (q, k, v))
        one_by_one = torch.stack([attend(q, k, v), attend(*back)])
        at_once = torch.vmap(attend)(*(torch.stack([t, t.flip(2)]) for t in (q, k, v)))
        return {"O": at_once}, {"O": one_by_one}
    except Exception as error:
        return refusal_of(ctx, subject, error)


@clause(
    "attention.autograd.transforms",
    source="contract: transforms; "
    "torch.func; of an operator without forward mode PyTorch drops the tangent silently",
)
@pytest.mark.parametrize("transform", ["jvp", "vmap"])
def test_a_transform_is_right_or_refused(world, subject, transform):
    """Forward mode and vmap MUST be right or an error, never a tangent of zero.

    <dO, J t> is <J' dO, t>: forward and backward mode check each other.
    """
    problem = fitting(world, subject, Problem(seq_q=20, seq_k=24))
    seen = observe(world, subject, transformed, problem, transform)

    if isinstance(seen, str):
        return
    found, wanted = seen
    error = float((found["O"].double() - wanted["O"].double()).norm())
    size = float(wanted["O"].double().norm())
    judge.holds(
        error <= 1e-2 * size,
        f"{transform}: expected what {'the backward' if transform == 'jvp' else 'a loop'} gives or "
        f"an error, got {error / size:.2g} of it away",
        likely="tangents are dropped where the operator calls its kernel",
        given=repr(problem),
    )


def side_by_side(ctx, subject, problem, way):
    """The gradients of two calls, both forwards before both backwards; or made again for each."""
    both = [inputs(problem.but(seed=seed)).to(ctx.device) for seed in (0, 1)]

    def attend(q, k, v):
        return call(ctx, subject, q, k, v, **arguments(problem))

    outs = [
        checkpoint(attend, x.q, x.k, x.v, use_reentrant=False)
        if way == "checkpointed"
        else attend(x.q, x.k, x.v)
        for x in both
    ]
    found = []
    for x, out in zip(both, outs, strict=True):
        of_call = torch.autograd.grad(out, (x.q, x.k, x.v), x.do)
        found.append({"O": out, **dict(zip(rules.GRADIENTS, of_call, strict=True))})
    return found


@clause(
    "attention.autograd.calls-are-independent",
    source="contract: own-results; every model of two layers; torch.utils.checkpoint",
)
@pytest.mark.parametrize("way", ["interleaved", "checkpointed"])
def test_two_calls_do_not_disturb_each_other(world, subject, way):
    """Gradients of a call MUST be its own, even if a second call precedes its backward.

    With activation checkpointing each forward runs once more, within the backward.
    """
    problem = fitting(world, subject, Problem(seq_q=40))
    seen = observe(world, subject, side_by_side, problem, way)

    for seed, of_call in enumerate(seen):
        own = problem.but(seed=seed)
        rules.close(of_call, own, names=("O", *rules.GRADIENTS), tf32=is_tf32(world, subject))


def changed(ctx, subject, problem, name):
    """Gradients after a tensor was changed between forward and backward, or what was raised."""
    x = inputs(problem).to(ctx.device)
    out = call(ctx, subject, x.q, x.k, x.v, **arguments(problem))
    with torch.no_grad():
        {"q": x.q, "k": x.k, "v": x.v, "O": out}[name].mul_(3.0)
    try:
        found = torch.autograd.grad(out, (x.q, x.k, x.v), x.do)
    except refusal.NO_ANSWERS:
        raise
    except RuntimeError as error:
        return str(error)
    return dict(zip(rules.GRADIENTS, found, strict=True))


@clause(
    "attention.autograd.changes-are-noticed",
    source="contract: saved-for-backward; "
    "torch.autograd.Function: save_for_backward, version counters",
)
@pytest.mark.parametrize("name", ["q", "k", "v", "O"])
def test_a_tensor_changed_before_the_backward_is_noticed(world, subject, name):
    """If q, k, v or O was changed in place, the backward MUST raise or still be right."""
    problem = fitting(world, subject, Problem(seq_q=40))
    seen = observe(world, subject, changed, problem, name)

    if not isinstance(seen, str):
        rules.close(seen, problem, names=rules.GRADIENTS, tf32=is_tf32(world, subject))


def after_dirt(ctx, subject, problem):
    """The answer where new memory is full of NaN, torch's own and freed blocks."""
    x = inputs(problem)
    for like in (x.q, x.k, x.q[..., 0]):
        dirt = [torch.full_like(like, torch.nan, device=ctx.device) for _ in range(8)]
        del dirt
    # With it goes torch.utils.deterministic.fill_uninitialized_memory.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return answer(ctx, subject, problem, inputs(problem))
    finally:
        torch.use_deterministic_algorithms(False)


@clause(
    "attention.autograd.fills-its-buffers",
    source="contract: own-results; "
    "flash-attn issue 2324: empty_like, and rows that no program wrote",
)
def test_no_element_is_left_as_the_allocator_gave_it(world, subject):
    """Every element MUST be written: memory that was full of NaN changes nothing.

    Fresh pages are zero, which is what rows that see nothing should be; a cached block is not.
    """
    problem = fitting(world, subject, Problem(seq_q=70, seq_k=40, causal=True))
    require_right(world, subject, problem.but(seq_q=problem.seq_k))
    seen = observe(world, subject, after_dirt, problem)

    rules.close(seen, problem, names=ALL, tf32=is_tf32(world, subject))


def repeated(ctx, subject, problem, times):
    """The answers of that many calls."""
    return [answer(ctx, subject, problem, inputs(problem)) for _ in range(times)]


@clause(
    "attention.autograd.repeatable",
    level="production",
    source="flash-attn tests, deterministic backward: dQ by atomics is not",
)
def test_equal_inputs_give_equal_bits(world, subject):
    """Equal inputs MUST give equal bits of O, L, dQ, dK and dV, every time."""
    is_parallel = world.transport == "cuda"  # where there is something to race
    problem = Problem(seq_q=500 if is_parallel else 70, heads=8 if is_parallel else 1, causal=True)
    problem = fitting(world, subject, problem)
    times = 50 if is_parallel else 3
    first, *others = observe(world, subject, repeated, problem, times)

    judge.tensors(others, first, quantity="answer of the first call", given=repr(problem))


def in_batch_and_alone(ctx, subject, problem, at):
    """The answer of one sequence out of the batch, and of a call on it alone."""
    x = inputs(problem)
    whole = answer(ctx, subject, problem, x)
    x.q, x.k, x.v, x.do = (t[at : at + 1].clone() for t in (x.q, x.k, x.v, x.do))
    alone = answer(ctx, subject, problem.but(batch=1), x)
    return {name: t[at : at + 1] for name, t in whole.items()}, alone


@clause(
    "attention.autograd.batch-invariant",
    level="production",
    source="contract: rows-apart; "
    "evaluation one by one and in batches must agree; tiles that depend on the batch",
)
def test_a_sequence_does_not_feel_its_batch(world, subject):
    """A sequence MUST have the same bits in a batch of three as alone."""
    if world.transport == "cuda" and subject != "flash_attention_triton":
        raise unittest.SkipTest("cuBLAS chooses its kernels by the size of the batch")
    problem = fitting(world, subject, Problem(seq_q=70, batch=3, heads=1, causal=True))
    inside, alone = observe(world, subject, in_batch_and_alone, problem, 1)

    judge.tensors([inside], alone, quantity="answer of the sequence alone", given=repr(problem))

"""Attention as one node of autograd: derivatives that it has, that it refuses, and that stay.

A node whose backward is written by hand can lie in ways that one of PyTorch's own cannot: saved
tensors that changed since, a second derivative that treats the log-sum-exp as a constant, buffers
that were never filled.
"""

from __future__ import annotations

import unittest
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from spec_tests.chapters.attention import bodies, law
from spec_tests.chapters.attention.bodies import (
    ATTENTION,
    answer,
    arguments,
    call,
    forward,
    observe,
    refusal_of,
)
from spec_tests.chapters.attention.problem import (
    ALL,
    GRADIENTS,
    OUTPUT_AND_GRADIENTS,
    Problem,
    inputs,
    same,
)
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows

clause = clauses(judges=ATTENTION, level="correct", worlds=(1,))


def penalty(attend, x, place):
    """The gradient of <dQ, dQ>, "by itself" or "in a sum" with <O, 1>."""
    out = attend(x.q, x.k, x.v)
    (dq,) = torch.autograd.grad(out, (x.q,), x.do, create_graph=True)
    total = (dq * dq).sum() + (out.sum() if place == "in a sum" else 0.0)
    found = torch.autograd.grad(total, (x.q, x.k, x.v))
    return dict(zip(GRADIENTS, found, strict=True))


def second(ctx, subject, problem, place):
    """The `penalty`'s gradient, or the words of a refusal."""
    try:
        x = inputs(problem).to(ctx.device)
        return penalty(attending(ctx, subject, problem), x, place)
    except Exception as error:
        return refusal_of(ctx, subject, error)


def attending(ctx, subject, problem):
    """The function under test as one of q, k and v."""
    return lambda q, k, v: call(ctx, subject, q, k, v, **arguments(problem))


def judge_if_any(seen, wanted, what, likely):
    """Two digits must be right, where it is no refusal: what is wrong here is wrong by far.

    Args:
        what: the numbers are, for messages.
    """
    __tracebackhide__ = True
    if isinstance(seen, str):
        return
    for name, right in wanted.items():
        size = float(right.double().norm())
        error = float((seen[name].double() - right.double()).norm())
        finding = f"{what}, {name}: expected what is right or an error, got a value off by "
        judge.holds(error <= 1e-2 * size, f"{finding}{error:.3g} of {size:.3g}", likely=likely)


def judge_second(world, subject, place):
    """A penalty of the gradient, at that place of a loss, must have its own."""
    __tracebackhide__ = True
    problem = law.fitting(world, subject, Problem(seq_q=20))
    seen = observe(world, subject, second, problem, place)

    x = inputs(problem).each(torch.Tensor.double).to(torch.device("cpu"))
    defined = penalty(lambda q, k, v: (q @ k.mT * problem.factor).softmax(-1) @ v, x, place)
    likely = "the backward takes what the forward saved for constant"
    judge_if_any(seen, defined, "the second derivative", likely)


derived = rows(clause, judge_second)

test_second_derivatives = derived(
    "attention.autograd.second-derivatives",
    "A second derivative MUST be right or an error, never a number that looks like one.",
    # A backward of differentiable operations gives one: wrong by half, since what the forward saved
    # is a constant to it.
    "by itself",
    source="contract: second-derivative; PyTorch issue 116348",
)

test_second_derivatives_in_a_sum = derived(
    "attention.autograd.second-derivatives-in-a-sum",
    "A penalty of the gradient, added to a loss, MUST have its gradient or be an error.",
    # A gradient without a graph raises where it is alone, and is dropped in silence beside another
    # term: a penalty that penalises nothing.
    "in a sum",
    level="production",
    source="contract: second-derivative; `once_differentiable` lets a constant dO through",
)


def transformed(ctx, subject, problem, transform):
    """What a transform of torch.func gives, and the same by other means; or the refusal.

    jvp: <dO, the tangent of O> for a tangent of q, and <dQ, that tangent>. vmap: O of two problems
    at once, and one by one.
    """
    x, attend = bodies.on(ctx, problem), attending(ctx, subject, problem)
    q, k, v = x.q, x.k, x.v
    try:
        if transform == "jvp":
            tangent = k[:, :, : problem.seq_q]
            moved = torch.func.jvp(lambda q: attend(q, k, v), (q,), (tangent,))[1]
            dq = answer(ctx, subject, problem, x, ("dQ",))["dQ"]
            return {"<dO, J t>": (moved * x.do).sum()}, {"<dO, J t>": (dq * tangent).sum()}
        back = (t.flip(2) for t in (q, k, v))
        one_by_one = torch.stack([attend(q, k, v), attend(*back)])
        at_once = torch.vmap(attend)(*(torch.stack([t, t.flip(2)]) for t in (q, k, v)))
        return {"O": at_once}, {"O": one_by_one}
    except Exception as error:
        return refusal_of(ctx, subject, error), {}


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
    problem = law.fitting(world, subject, Problem(seq_q=20, seq_k=24))
    seen, wanted = observe(world, subject, transformed, problem, transform)

    what = {"jvp": "the product with the Jacobian", "vmap": "two problems at once"}[transform]
    judge_if_any(seen, wanted, what, "tangents are dropped where the operator calls its kernel")


def side_by_side(ctx, subject, problems, way):
    """The gradients of two calls, both forwards before both backwards; or made again for each."""
    both = [inputs(problem).to(ctx.device) for problem in problems]
    calls = [attending(ctx, subject, problem) for problem in problems]
    if way == "checkpointed":
        calls = [partial(checkpoint, attend, use_reentrant=False) for attend in calls]
    outs = [attend(x.q, x.k, x.v) for attend, x in zip(calls, both, strict=True)]
    return [bodies.differentiated(out, x) for out, x in zip(outs, both, strict=True)]


@clause(
    "attention.autograd.calls-are-independent",
    source="contract: own-results; every model of two layers; torch.utils.checkpoint",
)
@pytest.mark.parametrize("way", ["interleaved", "checkpointed", "causal-first"])
def test_two_calls_do_not_disturb_each_other(world, subject, way):
    """Gradients of a call MUST be its own, even if a second call precedes its backward.

    With activation checkpointing each forward runs once more, within the backward.
    """
    problem = law.fitting(world, subject, Problem(seq_q=40, causal=way == "causal-first"))
    problems = [problem, problem.but(causal=False, seed=1)]
    seen = observe(world, subject, side_by_side, problems, way)

    for each, of_call in zip(problems, seen, strict=True):
        law.close(world, subject, of_call, each, *OUTPUT_AND_GRADIENTS)


def changed(ctx, subject, problem, name):
    """Gradients after a tensor was changed between forward and backward, or what was raised."""
    x = inputs(problem).to(ctx.device)
    out = forward(ctx, subject, problem, x)
    with torch.no_grad():
        {"q": x.q, "k": x.k, "v": x.v, "O": out}[name].mul_(3.0)
    with refusal.caught(RuntimeError) as error:
        found = bodies.differentiated(out, x)
    return error["error"] or found


@clause(
    "attention.autograd.changes-are-noticed",
    source="contract: saved-for-backward; "
    "torch.autograd.Function: save_for_backward, version counters",
)
@pytest.mark.parametrize("name", ["q", "k", "v", "O"])
def test_a_tensor_changed_before_the_backward_is_noticed(world, subject, name):
    """If q, k, v or O was changed in place, the backward MUST raise or still be right."""
    problem = law.fitting(world, subject, Problem(seq_q=40))
    seen = observe(world, subject, changed, problem, name)

    if not isinstance(seen, str):
        law.close(world, subject, seen, problem, *GRADIENTS)


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
    problem = law.fitting(world, subject, Problem(seq_q=70, seq_k=40, causal=True))
    law.require_right(world, subject, problem.but(seq_q=problem.seq_k))
    seen = observe(world, subject, after_dirt, problem)

    law.close(world, subject, seen, problem)


@clause(
    "attention.autograd.repeatable",
    level="production",
    source="contract: equal-runs; flash-attn tests, deterministic backward: dQ by atomics is not",
)
def test_equal_inputs_give_equal_bits(world, subject):
    """Equal inputs MUST give equal bits of O, L, dQ, dK and dV, every time."""
    is_parallel = world.transport == "cuda"  # where there is something to race
    problem = Problem(seq_q=500 if is_parallel else 70, heads=8 if is_parallel else 1, causal=True)
    problem = law.fitting(world, subject, problem)
    changes = [same] * (50 if is_parallel else 3)
    first, *others = law.asked(world, subject, problem, ALL, *changes)

    judge.tensors(others, first, quantity="answer of the first call")


def second_alone(x):
    """The second sequence of the batch."""
    return x.each(lambda t: t[1:2].clone())


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
    problem = law.fitting(world, subject, Problem(seq_q=70, batch=3, heads=1, causal=True))
    whole, alone = law.asked(world, subject, problem, ALL, same, second_alone)

    inside = {name: t[1:2] for name, t in whole.items()}
    judge.tensors([inside], alone, quantity="answer of the sequence alone")


def on_side_stream(ctx, subject, problem):
    """The answer on the current stream, and on another one that made the inputs just before."""
    x = inputs(problem)
    first = answer(ctx, subject, problem, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = x.each(lambda t: torch.full_like(t, torch.nan, device=ctx.device))
        torch.cuda._sleep(50_000_000)  # a kernel on the wrong stream finds NaN
        for name, made in vars(late).items():
            made.copy_(getattr(x, name))
        again = answer(ctx, subject, problem, late)
    stream.synchronize()
    return first, again


@clause(
    "attention.device.side-stream",
    source="contract: streams; xformers, test_cuda_streams; a launch on the default stream",
    transports=("cuda",),
    no_impostor="seen on a GPU alone: elsewhere there are no streams",
)
def test_it_runs_on_the_current_stream(world, subject):
    """On a side stream the answer MUST have the same bits as on the default stream."""
    problem = Problem(seq_q=300, head_dim=64, dtype="bfloat16", causal=True)
    first, again = observe(world, subject, on_side_stream, law.fitting(world, subject, problem))

    judge.tensors([again], first, quantity="answer on the default stream")

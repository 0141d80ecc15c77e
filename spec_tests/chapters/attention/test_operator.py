"""Attention as one operator among PyTorch's: what compiles it, counts it and casts for it.

Level `production`: PyTorch's own attention offers all of this, and a kernel behind a bare autograd
function does not. A compiler believes what an operator says of its shapes, strides and mutations;
what is not true of them is no error, but other numbers in somebody else's model.
"""

from __future__ import annotations

import inspect
import unittest

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spec_tests.chapters.attention import bodies, interpreter, law, rules
from spec_tests.chapters.attention.bodies import ATTENTION, KERNELS, observe
from spec_tests.chapters.attention.problem import OUTPUT_AND_GRADIENTS, Problem, inputs
from spec_tests.chapters.attention.test_layout import laid_out
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.ranks.errors import NOT_HERE

clause = clauses(judges=ATTENTION, level="production", worlds=(1,))

# Two heads on one key head, lengths that no tile divides.
GROUPED = Problem(seq_q=20, seq_k=24, kv_heads=1, causal=True)
PYTORCHS_OWN = ("aten", "prim", "prims", "profiler")


def compiled(ctx, subject, problem):
    """O and gradients, eager and as one graph; or what the compiler said."""
    import torch._dynamo  # two seconds that no other body shall wait for

    if subject in KERNELS and ctx.device.type == "cpu":
        interpreter.mend()
    attention = inspect.unwrap(getattr(ctx.impl, subject))
    options = bodies.arguments(problem)

    def between(q, k, v):
        return 2.0 * attention(q + 1.0, k, v, **options)

    def answer(function):
        x = inputs(problem).to(ctx.device)
        return bodies.differentiated(function(x.q, x.k, x.v), x)

    eager = answer(between)
    try:
        return eager, answer(torch.compile(between, fullgraph=True, backend="aot_eager"))
    except Exception as error:
        return eager, f"{type(error).__name__}: {error}".strip()
    finally:
        torch._dynamo.reset()


@clause(
    "attention.operator.compiles",
    source="contract: compile; "
    "torch.compile(fullgraph=True); a look at a value on the way is a break of the graph",
)
def test_it_is_part_of_one_compiled_graph(world, subject):
    """torch.compile(fullgraph=True) MUST compile it, with the same outputs and gradients."""
    eager, seen = observe(world, subject, compiled, GROUPED)

    judge.holds(
        not isinstance(seen, str),
        f"expected one graph around attention, got {seen!s:.300}",
        likely="Python looks at values, or a kernel is launched that is no operator",
    )
    law.near(world, subject, seen, eager, "compiled")


class _Foreign(TorchDispatchMode):
    """Notes the first call of each operator that is none of PyTorch's own."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace not in PYTORCHS_OWN:
            self.calls.setdefault(func, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def checked(ctx, subject, problem, layout):
    """By operator and check, what `torch.library.opcheck` found; "SUCCESS" where all is well."""
    from torch.library import opcheck

    x = inputs(problem) if layout == "no-batch" else laid_out(inputs(problem), layout)
    with _Foreign() as foreign:
        bodies.answer(ctx, subject, problem, x, OUTPUT_AND_GRADIENTS)
    found: dict[str, str] = {}
    for operator, (args, kwargs) in foreign.calls.items():
        detached = tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in args)
        checks = ("test_schema", "test_faketensor")
        results = opcheck(operator, detached, kwargs, test_utils=checks, raise_exception=False)
        found |= {f"{operator} {check}": str(result) for check, result in results.items()}
    return found


@clause(
    "attention.operator.says-what-it-does",
    source="contract: operators; "
    "torch.library.opcheck; a fake with other strides than the real one, flash-attn 2777",
)
@pytest.mark.parametrize("layout", ["heads-inside", "no-batch"])
def test_operators_of_its_own_are_what_they_say(world, subject, layout):
    """Custom operators MUST pass opcheck: schema, and shapes, dtypes, strides of the fake kernel.

    For heads stored inside, where "like q" is not contiguous, and for an empty batch.
    """
    problem = GROUPED.but(batch=0) if layout == "no-batch" else GROUPED
    seen = observe(world, subject, checked, problem, layout)

    if not seen:
        raise unittest.SkipTest(f"{NOT_HERE}it has no operators of its own")
    for check, result in seen.items():
        judge.holds(
            result == "SUCCESS",
            f"{check}: expected an operator that is what it says, got {result:.300}",
            likely="`empty_like(q)` in the fake, which keeps q's strides, where the real one has "
            "its own",
            given=f"{problem!r}, {layout}",
        )


def counted(ctx, subject, problem):
    """Operations of the forward and of the backward, as FlopCounterMode counts them."""
    from torch.utils.flop_counter import FlopCounterMode  # a sixth of a second

    x = inputs(problem).to(ctx.device)
    with FlopCounterMode(display=False) as forward:
        out = bodies.forward(ctx, subject, problem, x)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out, (x.q, x.k, x.v), x.do)
    return forward.get_total_flops(), backward.get_total_flops()


@clause(
    "attention.operator.is-counted",
    source="contract: flops; "
    "FlopCounterMode has no formula for a new operator: zero; xformers, test_flop_formula",
)
@law.problems(law.varied(Problem(seq_q=48, seq_k=64, heads=4, kv_heads=2), causal=law.BOTH))
def test_its_operations_are_counted(world, subject, problem):
    """FlopCounterMode MUST count two products forward, and four to seven backward.

    2 B H Q K D each; with a causal mask from the average of keys that a query sees, which is how
    the papers count, to all of them. A utilisation of 30 % for want of a formula misleads for good.
    """
    forward, backward = observe(world, subject, counted, problem)

    one = 2 * problem.heads * problem.head_dim * problem.seq_q * problem.num_keys
    share = 1 - problem.seq_q / (2 * problem.num_keys) if problem.causal else 1.0
    for name, seen, fewest, most in (("forward", forward, 2, 2), ("backward", backward, 4, 7)):
        judge.holds(
            share * fewest * one <= seen <= most * one,
            f"{name}: expected {share * fewest * one:.0f} to {most * one} operations, counted "
            f"{seen}",
            likely="an operator without a formula counts as nothing",
        )


def under_autocast(ctx, subject, problem, inside):
    """O and gradients under autocast to the problem's dtype, or the error of mixed inputs.

    q is float32, and so are k and v unless `inside` is mixed; its values are those of the dtype.
    """
    narrow = inputs(problem)
    x = narrow.each(torch.Tensor.float)
    x = (x.but(k=narrow.k, v=narrow.v) if inside == "mixed" else x).to(ctx.device)
    with torch.autocast(ctx.device.type, dtype=problem.torch_dtype):
        try:
            out = bodies.forward(ctx, subject, problem, x)
        except (ValueError, TypeError, NotImplementedError) as error:
            return bodies.refusal_of(ctx, subject, error)
    answer = bodies.differentiated(out, x)
    return {name: t.to(problem.torch_dtype) for name, t in answer.items()}, str(out.dtype)


@clause(
    "attention.operator.under-autocast",
    source="contract: autocast, autocast-mixed; "
    "torch.amp; mamba issue 868: mixed dtypes followed q, or met in a product",
)
@pytest.mark.parametrize("inside", ["float32", "mixed"])
def test_under_autocast_values_keep_their_rounding(world, subject, inside):
    """Under autocast O MUST be within one rounding, dV within 1.25; mixed dtypes cast or refused.

    Autocast reaches into a forward that is made of PyTorch's products and makes its sums narrow;
    and it hands over q in float32 beside k and v in half precision, of which the output takes
    autocast's dtype.
    """
    problem = Problem(seq_q=40, seq_k=56, head_dim=24, heads=1, dtype="float16", data="negative")
    seen = observe(world, subject, under_autocast, problem, inside)

    if isinstance(seen, str):
        judge.holds(inside == "mixed", f"expected float32 inputs to be taken, got {seen}")
        return
    answer, dtype = seen
    if inside == "mixed":
        judge.equal([dtype], "torch.float16", quantity="dtype of the output")
    likely = (
        "autocast reaches into a forward that is made of PyTorch's products: disable it inside, "
        "after casting the inputs"
    )
    rules.close(answer, problem, names=OUTPUT_AND_GRADIENTS, likely=likely)

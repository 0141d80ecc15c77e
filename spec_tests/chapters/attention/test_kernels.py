"""Kernels, watched in Triton's interpreter: who writes, who reads, what is computed for nothing.

On a GPU the programs of a launch run at once, in no order. Two that write one element, or one that
reads what another wrote, give right values in the interpreter and wrong ones at times on a device;
so addresses are judged, not values. A kernel that is not interpreted is not judged here.
"""

from __future__ import annotations

import unittest

import pytest
import torch

from spec_tests.chapters.attention import bodies, interpreter, law, rules
from spec_tests.chapters.attention.bodies import KERNELS, observe
from spec_tests.chapters.attention.problem import ALL, AS_THE_EXERCISE, Problem, inputs
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses, rows
from spec_tests.rig.ranks.errors import NOT_HERE

clause = clauses(judges=KERNELS, level="production", worlds=(1,), transports=("gloo",))
NO_METHODS = f"{NOT_HERE}this Triton's interpreter has other methods"
# Several tiles that divide no length, and two heads: neighbours to run into.
RAGGED = law.varied(Problem(seq_q=70, seq_k=80, head_dim=24, heads=2), causal=law.BOTH)


def launched(ctx, subject, problem, has_backward=True):
    """What each launch of a forward and of a backward did; None if that cannot be watched."""
    x = inputs(problem).to(ctx.device)
    with interpreter.watched() as launches:
        out = bodies.forward(ctx, subject, problem, x)
    with interpreter.watched() as backward:
        if has_backward:
            torch.autograd.grad(out, (x.q, x.k, x.v), x.do)
    return None if launches is None else (launches, backward)


def _launches(world, subject, problem, **how):
    found = observe(world, subject, launched, problem, **how)
    if found is None:
        raise unittest.SkipTest(NO_METHODS)
    return found


@clause(
    "attention.forward.launches-a-kernel",
    level="course",
    source="contract: triton-kernel; "
    "CS336 assignment 2, flash_forward (b): the forward calls your Triton kernel",
)
def test_a_kernel_is_launched(world, subject):
    """The forward MUST launch a Triton kernel."""
    launches, _ = _launches(world, subject, AS_THE_EXERCISE, has_backward=False)
    judge.holds(
        bool(launches),
        "expected the forward to launch a Triton kernel, got none",
        likely="the version in PyTorch operations, under the kernel's name",
    )


def _interpreted(world, subject, problem):
    forward, backward = _launches(world, subject, problem)
    if not forward:
        raise unittest.SkipTest(f"{NOT_HERE}no kernel was interpreted")
    return forward, backward


def _none(world, subject, problem, *, count, wanted, likely):
    """No launch may do what its `count` counts."""
    __tracebackhide__ = True
    forward, backward = _interpreted(world, subject, law.fitting(world, subject, problem))
    for launch in (*forward, *backward):
        said = f"kernel {launch['kernel']}: {wanted}, got {launch[count]}"
        judge.holds(launch[count] == 0, said, likely=likely)


watched = rows(clause, _none)

test_one_writer = watched(
    "attention.kernels.one-writer",
    "Each launch MUST store an element at most once: no race, no atomics, one order of sums.",
    RAGGED,
    count="stored_again",
    wanted="expected no element to be stored twice",
    likely="a tail that reaches into the next head, or a sum over programs in memory",
    source="contract: kernel-race; "
    "flash-attn, deterministic backward; two programs that store one element race",
)

test_reads_nothing_of_others = watched(
    "attention.kernels.reads-nothing-of-others",
    "Within a launch no program MUST read what another one wrote.",
    RAGGED,
    count="foreign",
    wanted="expected no load of an element that another program of the launch stored",
    likely="dQ read, added to and stored by each program of keys; or two kernels merged into one",
    source="contract: kernel-race; "
    "programs of a launch have no order; the interpreter's is an accident",
)

test_in_bounds = watched(
    "attention.kernels.in-bounds",
    "Every address that is loaded or stored MUST lie within a tensor that was passed.",
    RAGGED,
    count="outside",
    wanted="expected all addresses within the storages of its arguments",
    likely="a load without a mask in the last tile",
    level="correct",
    source="contract: in-bounds; what lies beyond is another tensor, or a fault of the process",
)


def on_tensor_cores(ctx, subject, problem, names):
    """What is named, with products as a device takes them; None: not to be had."""
    with interpreter.tensor_cores() as is_rounding:
        answer = bodies.answer(ctx, subject, problem, inputs(problem), names)
    return answer if is_rounding else None


@clause(
    "attention.kernels.float32-is-float32",
    source="contract: float32-products; "
    "Triton's documentation of `tl.dot`: TF32 is the default for float32 on tensor cores",
)
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_products_on_tensor_cores_keep_24_bits(world, subject, part):
    """Of float32 inputs `tl.dot` MUST be asked for more than TF32, its default on a device.

    Judged by value: operands are rounded to TF32's eleven bits where the kernel allows it.
    """
    has_gradients = part == "backward"
    if has_gradients:
        law.require_backward(world, subject)
    law.require_right(world, subject, AS_THE_EXERCISE, is_differentiated=has_gradients)
    names = law.offered(world, subject, ALL if has_gradients else ("O", "L"))
    seen = observe(world, subject, on_tensor_cores, AS_THE_EXERCISE, names)
    if seen is None:
        raise unittest.SkipTest(NO_METHODS)
    likely = "three digits are right: `tl.dot` of float32 without `input_precision`, which is TF32"
    rules.close(seen, AS_THE_EXERCISE, names=names, likely=likely)


@clause(
    "attention.kernels.work",
    source="contract: work, hidden-tiles; "
    "Dao 2023: two products forward, five backward, seven where dQ has a pass of its own",
)
def test_products_are_those_of_the_algorithm_and_half_with_a_mask(world, subject):
    """A forward MUST take two products, a backward seven at most, and causal four fifths of that.

    At 256 queries and keys; tiles of 128 compute three quarters of a causal square, smaller ones
    less. A tenth is left for tiles that reach beyond. Nor is what nobody sees loaded: nine tenths.
    """
    problem = Problem(seq_q=256, heads=1)
    full = _interpreted(world, subject, problem)
    causal = _interpreted(world, subject, problem.but(causal=True))

    product = 2 * problem.seq_q * problem.num_keys * problem.head_dim
    for index, (name, allowed) in enumerate((("forward", 2.2), ("backward", 7.7))):
        flops = _total("flops", full[index])
        judge.holds(
            flops <= allowed * product,
            f"{name}: expected at most {allowed} products of q and k, got {flops / product}",
            likely="scores are computed more often than they are used",
        )
        for what, part in (("flops", 0.8), ("loaded", 0.9)):
            share = _total(what, causal[index]) / _total(what, full[index])
            judge.holds(
                share <= part,
                f"{name}, {what}: expected at most {part} of the work with a causal mask, got "
                f"{share:.2f}",
                likely="tiles above the diagonal are loaded, or computed and masked",
            )


def _total(what, launches):
    return sum(launch[what] for launch in launches)

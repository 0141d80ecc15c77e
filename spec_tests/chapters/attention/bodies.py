"""What a rank does in this chapter: call the function under test, observe, judge nothing.

A rank on CPU interprets Triton kernels (the pool sets TRITON_INTERPRET before the implementation is
imported); a rank on a GPU compiles them.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import unittest
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spec_tests.chapters.attention import interpreter
from spec_tests.chapters.attention.problem import (
    ALL,
    GRADIENTS,
    WHOLE_TILES,
    Answer,
    Change,
    Inputs,
    Problem,
    inputs,
)
from spec_tests.rig import judge
from spec_tests.rig.ranks.errors import NOT_HERE
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import World

ATTENTION = ("flash_attention", "flash_attention_triton")
KERNELS = ("flash_attention_triton",)
TILED = ("flash_attention",)
# Interpreted kernels compute all the time, so nothing of this is a hang; a GPU may compile first.
TIMEOUT_S = 100.0
CPU_SECONDS = 10.0
"""What a clause that chooses its size takes on one rank, about."""


def observe(world: World, subject: str, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the one rank saw. "Not here" where this machine cannot run the subject.

    Raises:
        SkipTest: Triton, or arithmetic in the dtype, is missing.
    """
    problems = [arg for arg in args if isinstance(arg, Problem)]
    judge.SITUATION.get().given = ", ".join(map(repr, problems))
    if subject in KERNELS:
        if importlib.util.find_spec("triton") is None:
            raise unittest.SkipTest(f"{NOT_HERE}needs Triton, which is not installed")
        if world.transport != "cuda" and any(p.dtype == "bfloat16" for p in problems):
            raise unittest.SkipTest(
                f"{NOT_HERE}needs a CUDA device: Triton's interpreter has no bfloat16 arithmetic"
            )
    return world.run(body, subject, *args, timeout_s=TIMEOUT_S, **kwargs)[0]


def call(ctx: Context, subject: str, *args: Any, **kwargs: Any) -> Any:
    """The function under test."""
    if ctx.device.type == "cpu" and (subject in KERNELS or "triton" in sys.modules):
        interpreter.mend()
    return getattr(ctx.impl, subject)(*args, **kwargs)


def arguments(problem: Problem) -> dict[str, Any]:
    """Keyword arguments, each only where one is asked for, so that the default is used too."""
    asked = {"causal": problem.causal, "scale": problem.scale}
    return {name: value for name, value in asked.items() if value is not None}


def forward(ctx: Context, subject: str, problem: Problem, x: Inputs, **options: Any) -> Any:
    """What the function returns for these inputs."""
    return call(ctx, subject, x.q, x.k, x.v, **arguments(problem), **options)


def answer(
    ctx: Context, subject: str, problem: Problem, x: Inputs, names: Sequence[str] = ALL
) -> Answer:
    """Those of O, L, dQ, dK and dV that are named, of one call; the inputs stay as they lie.

    L has a gradient of its own where the problem has one and L takes it.
    """
    x = x.to(ctx.device)
    leaves = dict(zip(GRADIENTS, (x.q, x.k, x.v), strict=True))
    wanted = [name for name in GRADIENTS if name in names]
    found, outputs = {}, ("O", "L") if "L" in names or problem.lse_gradient else ("O",)
    with torch.set_grad_enabled(bool(wanted)):
        if "L" in outputs:
            found["O"], found["L"] = forward(ctx, subject, problem, x, return_lse=True)
        else:
            found["O"] = forward(ctx, subject, problem, x)
    if wanted:
        upstream = {"O": x.do}
        if problem.lse_gradient and found["L"].requires_grad:  # alone where O's would be zero
            upstream = {**upstream, "L": x.dl} if problem.upstream else {"L": x.dl}
        of_leaves = torch.autograd.grad(
            [found[name] for name in upstream],
            [leaves[name] for name in wanted],
            [*upstream.values()],
            materialize_grads=not problem.upstream,
        )
        found |= dict(zip(wanted, of_leaves, strict=True))
    return {name: found[name] for name in names}


def differentiated(out: torch.Tensor, x: Inputs) -> Answer:
    """An output that is there already, and its gradients."""
    found = torch.autograd.grad(out, (x.q, x.k, x.v), x.do.to(out.dtype))
    return {"O": out, **dict(zip(GRADIENTS, found, strict=True))}


def answers(
    ctx: Context, subject: str, problem: Problem, names: Sequence[str], *changes: Change
) -> list[Answer]:
    """The answer by change of the inputs, each from a call of its own."""
    return [answer(ctx, subject, problem, change(on(ctx, problem)), names) for change in changes]


def on(ctx: Context, problem: Problem) -> Inputs:
    """The inputs on the device, before they are leaves: a copy from host memory has no layout."""
    return inputs(problem).each(lambda tensor: tensor.to(ctx.device))


def or_refused(
    ctx: Context, subject: str, problem: Problem, names: Sequence[str] = ALL
) -> Answer | str:
    """What is named, or the words of whatever error: an assertion refuses, too."""
    try:
        return answer(ctx, subject, problem, inputs(problem), names)
    except Exception as error:
        return refusal_of(ctx, subject, error)


def refusal_of(ctx: Context, subject: str, error: Exception, names: Sequence[str] = ALL) -> str:
    """The words of a refusal, which only an implementation that does the ordinary can utter."""
    usual = Problem(seq_q=WHOLE_TILES)
    answer(ctx, subject, usual, inputs(usual), names)
    return str(error) or type(error).__name__


def while_cheap(lengths: Sequence[int], work: Callable[[int], Any]) -> dict[int, Any]:
    """Return `work(length)` by length: of the first two, and of longer ones while they are cheap.

    Work over twice the length takes four times as long. A loop over small tiles in Python takes
    minutes where a kernel takes milliseconds, and is as right. CPU seconds: what other processes
    do does not count.
    """
    found: dict[int, Any] = {}
    begun = last = time.process_time()
    for length in lengths:
        found[length] = work(length)
        now = time.process_time()
        took, last = now - last, now
        if len(found) > 1 and now - begun + 4 * took > CPU_SECONDS:
            break
    return found

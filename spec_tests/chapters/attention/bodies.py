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
from spec_tests.chapters.attention.problem import WHOLE_TILES, Answer, Inputs, Problem, inputs
from spec_tests.programs.laws import footprint
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
    require_here(world, subject, *(problem.dtype for problem in problems))
    return world.run(body, subject, *args, timeout_s=TIMEOUT_S, **kwargs)[0]


def require_here(world: World, subject: str, *dtypes: str) -> None:
    """Skip with the reason where the subject cannot be observed on this machine."""
    if subject not in KERNELS:
        return
    if importlib.util.find_spec("triton") is None:
        raise unittest.SkipTest(f"{NOT_HERE}needs Triton, which is not installed")
    if world.transport != "cuda" and "bfloat16" in dtypes:
        raise unittest.SkipTest(
            f"{NOT_HERE}needs a CUDA device: Triton's interpreter has no bfloat16 arithmetic"
        )


def call(ctx: Context, subject: str, *args: Any, **kwargs: Any) -> Any:
    """The function under test."""
    if ctx.device.type == "cpu" and (subject in KERNELS or "triton" in sys.modules):
        interpreter.mend()
    return getattr(ctx.impl, subject)(*args, **kwargs)


def arguments(problem: Problem) -> dict[str, Any]:
    """Keyword arguments; a scale only where one is asked for, so that the default is used too."""
    given: dict[str, Any] = {"causal": problem.causal}
    return given if problem.scale is None else {**given, "scale": problem.scale}


def forward(ctx: Context, subject: str, problem: Problem, *, lse: bool = False) -> Answer:
    """O, and L where it is asked for, without gradients."""
    x = inputs(problem).to(ctx.device)
    with torch.no_grad():
        found = call(ctx, subject, x.q, x.k, x.v, return_lse=lse, **arguments(problem))
    out, statistics = found if lse else (found, None)
    return {"O": out} if statistics is None else {"O": out, "L": statistics}


def gradients(ctx: Context, subject: str, problem: Problem) -> Answer:
    """O, dQ, dK and dV; with a gradient into L where the problem has one and L takes it."""
    return differentiate(ctx, subject, problem, inputs(problem).to(ctx.device))


def differentiate(ctx: Context, subject: str, problem: Problem, x: Inputs) -> Answer:
    """Forward and backward over tensors that are already there."""
    outputs, upstream = [], [x.do]
    if problem.lse_gradient:
        out, lse = call(ctx, subject, x.q, x.k, x.v, return_lse=True, **arguments(problem))
        outputs.append(out)
        if lse.requires_grad:
            outputs.append(lse)
            upstream.append(x.dl)
    else:
        outputs.append(call(ctx, subject, x.q, x.k, x.v, **arguments(problem)))
    found = torch.autograd.grad(outputs, (x.q, x.k, x.v), upstream)
    return {"O": outputs[0], **dict(zip(("dQ", "dK", "dV"), found, strict=True))}


def everything(ctx: Context, subject: str, problem: Problem) -> Answer:
    """O, L, dQ, dK and dV."""
    return {
        **gradients(ctx, subject, problem),
        "L": forward(ctx, subject, problem, lse=True)["L"],
    }


def or_refused(
    ctx: Context, subject: str, problem: Problem, *, is_differentiated: bool = True
) -> Answer | str:
    """`everything` or O and L, or the words of whatever error: a bare assertion refuses, too."""
    try:
        if not is_differentiated:
            return forward(ctx, subject, problem, lse=True)
        return everything(ctx, subject, problem)
    except Exception as error:
        return refusal_of(ctx, subject, error)


def refusal_of(ctx: Context, subject: str, error: Exception) -> str:
    """The words of a refusal, which only an implementation that does the ordinary can utter."""
    everything(ctx, subject, Problem(seq_q=WHOLE_TILES))
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


def peak_bytes(ctx: Context, work: Callable[[], Any]) -> tuple[int, int]:
    """Bytes above those at the start: the most within `work`, and those left after it."""
    return footprint.peak_bytes(ctx.device, work)

"""Compilation: what `torch.compile` makes of a wrapped model computes what the model computes.

A compiler sees a wrapper's hooks as code like any other. What they do beside their result (send,
free and fill memory, set flags) it may do once, when it traces, fold into a constant, or take for a
change of its inputs. So several steps are made, with an update between them: the first one traces.
Toys hold integers, so that a compiler may sum in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from spec_tests.rig import judge

HOW = ("before aot_eager", "after eager", "whole aot_eager")
"""Parts are compiled in place, before they are wrapped or after; or the wrapped model is, whole."""
CALLS = "backward 0, zero_grad none, write parameters, accumulate 1, backward 2"


def wrapped(
    module: nn.Module,
    wrap: Callable[[], Any],
    how: str = "",
    parts: Sequence[str] = (),
    **options: Any,
) -> tuple[Any, Any]:
    """Compile and wrap; return what was wrapped, and what is called in its place.

    Args:
        module: what `wrap` wraps; `parts` are the names of what is compiled of it.
        how: when and with which backend; "" compiles nothing.
        options: of `torch.compile`.
    """
    if not how:
        made = wrap()
        return made, made
    from torch._dynamo import utils  # here: it takes seconds, and most runs compile nothing

    order, backend = how.split()
    torch.compile(wrap, backend=backend)  # "not here" where compilers are stood in for
    torch._dynamo.reset()  # ranks are used again
    utils.counters.clear()
    if order == "before":
        _compile(module, parts, backend, options)
    made = wrap()
    if order == "after":
        _compile(module, parts, backend, options)
    return made, torch.compile(made, backend=backend) if order == "whole" else made


def gradients(make: Callable[..., Any], how: str) -> tuple[Any, Any, int | None]:
    """Return gradients after `CALLS`, eager and compiled, and how many graphs there were.

    None where the wrapper is compiled: by `torch.compiler.disable` it may keep itself out of that.

    Args:
        make: returns a rank of the world model, given `how`.
    """
    from torch._dynamo import utils

    found = []
    for each in ("", how):
        rank = make(how=each)
        rank.follow(CALLS)
        shown = ((name, p.grad) for name, p in rank.named())
        found.append(
            {n: g if g is None else getattr(g, "full_tensor", g.clone)() for n, g in shown}
        )
    eager, seen = found
    graphs = utils.counters["stats"]["unique_graphs"]
    return eager, seen, None if how.startswith("whole") else int(graphs)


def _compile(module: nn.Module, parts: Sequence[str], backend: str, options: Any) -> None:
    for name in parts:
        module.get_submodule(name).compile(backend=backend, **options)


def like_eager(ranks: Sequence[Sequence[Any]], given: str) -> None:
    """On every rank the gradients must be those of the run without a compiler.

    Args:
        ranks: of each, gradients by name, eager and compiled, and the number of graphs.
    """
    __tracebackhide__ = True
    eager, seen, graphs = zip(*ranks, strict=True)
    given = f"{given}: {CALLS}"
    judge.tensors(seen, eager, quantity="gradient of the run without a compiler", given=given)
    judge.holds(
        0 not in graphs, f"expected compiled graphs on all ranks, got {graphs}", given=given
    )

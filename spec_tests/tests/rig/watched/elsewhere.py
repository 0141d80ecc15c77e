"""Have autograd call hooks in a thread of its own, as it does for a GPU, where there is none.

Of backwards within backwards, the engine runs those from the sixtieth on in a thread of its pool,
with the state of the thread that called the first, as the thread of a GPU has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_DEPTH = 60


class _Within(torch.autograd.Function):
    """What goes backward within the backward of another one, and deeper."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, depth: int, backward: Callable[[], None]) -> Tensor:
        """Keep what is to be called at the bottom."""
        ctx.depth, ctx.callee = depth, backward
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        """Go one deeper, or call it."""
        if ctx.depth:
            _go(ctx.depth - 1, ctx.callee)
        else:
            ctx.callee()
        return None, None, None


def _go(depth: int, backward: Callable[[], None]) -> None:
    with torch.enable_grad():
        output = _Within.apply(torch.ones((), requires_grad=True), depth, backward)
    engine: Any = torch.autograd.Variable._execution_engine
    given = (torch.ones(()),), False, False, ()
    engine.run_backward((output,), *given, allow_unreachable=True, accumulate_grad=True)


def call_hooks_elsewhere() -> None:
    """Run each backward of this process from now on in a thread of autograd's."""
    run_here = torch.autograd._engine_run_backward

    def run(*arguments: Any, **keywords: Any) -> Any:
        is_traced = torch._C._functorch.peek_interpreter_stack() is not None
        if is_traced or torch._C._current_graph_task_id() != -1:
            return run_here(*arguments, **keywords)
        found: list[Any] = []
        _go(_DEPTH, lambda: found.append(run_here(*arguments, **keywords)))
        return found[0]

    torch.autograd._engine_run_backward = run

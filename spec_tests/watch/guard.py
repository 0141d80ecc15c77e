"""How the watcher keeps out of the script's way: every hook of the probe passes here."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

_FAKE = torch._C._TorchDispatchModeKey.FAKE
Function = TypeVar("Function", bound=Callable[..., Any])


class Current:
    """The `probe.Probe` of this process; None in a fork, and after it gave up."""

    probe: Any = None
    is_replaying = False


def probe_to_ask() -> Any:
    """Return the probe, unless this is compiled code, another thread, or the probe's own doing."""
    probe = None if torch.compiler.is_compiling() else Current.probe
    if probe is None or probe.is_busy or not probe.is_main():
        return None
    return None if _is_traced() else probe


def _is_traced() -> bool:
    """Return whether operations are recorded or transformed: nothing may be added to them."""
    return (
        torch._C._get_dispatch_mode(_FAKE) is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )


def quiet(hook: Callable[..., None]) -> Callable[..., None]:
    """Give a hook the probe, and keep its errors and its operations from the script."""

    @functools.wraps(hook)
    def guarded(*arguments: Any, **keywords: Any) -> None:
        probe = probe_to_ask()
        if probe is None:
            return
        # What a mode of the script counts or fakes is the script's operations, not these.
        modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
        begun = time.perf_counter()
        probe.is_busy = True
        try:
            with modes, torch.no_grad():
                hook(probe, *arguments, **keywords)
        except Exception as error:
            probe.fail(error)
        finally:
            probe.is_busy = False
            probe.spent += time.perf_counter() - begun

    return guarded


def wrapped(
    original: Function,
    observed: Callable[..., Any],
    *,
    is_watched: Callable[[], bool] = lambda: probe_to_ask() is not None,
) -> Function:
    """Return a function that is observed on its way to `original`, where it is watched."""

    @functools.wraps(original)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        if not is_watched():
            return original(*arguments, **keywords)
        return observed(original, *arguments, **keywords)

    return wrapper  # type: ignore[return-value]


def wrapped_always(original: Function, observed: Callable[..., Any]) -> Function:
    """Return a function that is observed also while the probe itself computes."""

    def is_watched() -> bool:
        return not torch.compiler.is_compiling() and Current.probe is not None

    return wrapped(original, observed, is_watched=is_watched)


def wrapped_in_forks(original: Function, observed: Callable[..., Any]) -> Function:
    """Return a function that is observed also in forks of a rank, which have no probe."""
    return wrapped(original, observed, is_watched=lambda: True)


def hooked(
    original: Function,
    *,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> Function:
    """Return a function with quiet hooks.

    Args:
        before: called with what `original` is given.
        after: called with the result of `original` and what it was given.
    """

    def observed(original: Function, *arguments: Any, **keywords: Any) -> Any:
        if before is not None:
            before(*arguments, **keywords)
        result = original(*arguments, **keywords)
        if after is not None:
            after(result, *arguments, **keywords)
        return result

    return wrapped(original, observed)


def is_inside(key: int) -> bool:
    """Return whether an optimizer's step is on the stack: it has not ended by an exception."""
    steps = (f for f in outwards(sys._getframe(1)) if f.f_code.co_name == "step")
    return any(id(frame.f_locals.get("self")) == key for frame in steps)


def outwards(frame: Any) -> Iterator[Any]:
    """Yield a frame, and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back

"""How the watcher keeps out of the script's way: every hook of the probe passes here."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_IS_FREE = "trainspec_watch"
"""In torch's own state of the thread that imported it: False in the probe's own doing. Autograd
hands that state on to the thread that works for it, as that of a GPU. Other threads have none."""
Hook = Callable[..., None]


class Current:
    """The `probe.Probe` of this process; None in a fork, and after it gave up."""

    probe: Any = None
    is_replaying = False


def watch_this_thread(*, is_free: bool = True) -> None:
    """Watch what this thread does from here on; or nothing, while the probe itself does it."""
    torch._C._stash_obj_in_tls(_IS_FREE, is_free)


def probe_to_ask(*, elsewhere: bool = False) -> Any:
    """Return the probe, unless this is compiled code, another thread, or the probe's own doing.

    Args:
        elsewhere: take a thread of the script's own for the one that imported torch.
    """
    probe = None if torch.compiler.is_compiling() else Current.probe
    if probe is None or not (torch._C._get_obj_in_tls(_IS_FREE) if _is_watched() else elsewhere):
        return None
    return None if _is_traced() else probe


def _is_watched() -> bool:
    return torch._C._is_key_in_tls(_IS_FREE)


def _is_traced() -> bool:
    """Return whether operations are recorded or transformed: nothing may be added to them."""
    return (
        torch._C._get_dispatch_mode(_FAKE) is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )


def quiet(hook: Hook, *, elsewhere: bool = False) -> Hook:
    """Give a hook the probe, and keep its errors and its operations from the script."""

    @functools.wraps(hook)
    def guarded(*arguments: Any, **keywords: Any) -> None:
        probe = probe_to_ask(elsewhere=elsewhere)
        if probe is None:
            return
        is_watched = _is_watched()  # torch's state of another thread is left empty, as it was
        # What a mode of the script counts or fakes is the script's operations, not these.
        modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
        if is_watched:
            watch_this_thread(is_free=False)
        try:
            with modes, torch.no_grad():
                hook(probe, *arguments, **keywords)
        except Exception as error:
            probe.fail(error)
        finally:
            if is_watched:
                watch_this_thread()

    return guarded


def watching() -> bool:
    """Return whether a call is watched, by the probe's own doing too."""
    return not torch.compiler.is_compiling() and Current.probe is not None


def observe(
    name: str,
    *owners: Any,
    before: Hook | None = None,
    after: Hook | None = None,
    around: Callable[..., Any] | None = None,
    is_watched: Callable[[], bool] = lambda: probe_to_ask() is not None,
) -> None:
    """Replace a function in each of its owners by one that is observed, where it is watched.

    Args:
        before: a quiet hook, given the probe and what the function is given.
        after: a quiet hook, given the probe, the function's result and what it was given.
        around: called in place of the function, with the function and what it is given.
    """
    original = getattr(owners[0], name)
    begin, end = (None if hook is None else quiet(hook) for hook in (before, after))

    @functools.wraps(original)
    def observed(*arguments: Any, **keywords: Any) -> Any:
        if not is_watched():
            return original(*arguments, **keywords)
        if around is not None:
            return around(original, *arguments, **keywords)
        if begin is not None:
            begin(*arguments, **keywords)
        result = original(*arguments, **keywords)
        if end is not None:
            end(result, *arguments, **keywords)
        return result

    vars(observed)["__prepare_scriptable__"] = lambda: original  # for `torch.jit.script`
    for owner in owners:
        setattr(owner, name, observed)


def is_inside(key: int) -> bool:
    """Return whether an optimizer's step is on the stack: it has not ended by an exception."""
    steps = (f for f in outwards(sys._getframe(1)) if f.f_code.co_name == "step")
    return any(id(frame.f_locals.get("self")) == key for frame in steps)


def outwards(frame: Any) -> Iterator[Any]:
    """Yield a frame, and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back

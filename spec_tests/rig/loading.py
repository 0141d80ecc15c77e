"""Importing an implementation in a rank, whatever it does on that occasion.

It may raise anything, change global state, replace functions of torch, join a process group. What
can be put back is put back before the first body runs: a default dtype that one file sets would
decide about clauses that say nothing of dtypes. The rest is told to the parent, for the log.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from spec_tests.rig import hygiene, patches, wire
from spec_tests.target import Implementation, Target, load


@dataclass(frozen=True)
class Greeting:
    """What a rank says once it has imported the implementation, or could not."""

    preloaded: bool
    error: wire.RemoteError | None = None
    offered: tuple[str, ...] = ()
    misfits: dict[str, str] | None = None
    leaks: tuple[str, ...] = ()


def load_implementation(
    target: Target, transport: str, *, preloaded: bool
) -> tuple[Implementation | None, Greeting]:
    """The implementation, None if its import failed, and the rank's first words to the parent."""
    _spare_the_machine()
    device = prepare_device(target, transport)
    clean, whole = hygiene.snapshot(), patches.attributes()
    try:
        impl = load(target, device=device)
        error = None
    except BaseException as caught:  # SystemExit and KeyboardInterrupt too
        begun = None if target.impostor is not None else _theirs(caught.__traceback__)
        if begun is not None or isinstance(caught, SyntaxError):
            caught = caught.with_traceback(begun)
        impl, error = None, wire.RemoteError.of(caught, time.monotonic_ns())
    leaks = [str(leak) for leak in hygiene.restore(clean) if not leak.is_harmless]
    leaks += [f"replaced {name}" for name in patches.replaced(whole)]
    if impl is None:
        return None, Greeting(preloaded, error, leaks=tuple(leaks))
    return impl, Greeting(preloaded, None, impl.offered, impl.misfits, tuple(leaks))


def prepare_device(target: Target, transport: str) -> str:
    """The type of the device that the implementation finds here, a stand-in if need be."""
    if target.pretends_cuda and transport != "cuda":
        # Imported here: the other ranks have no use for it.
        from spec_tests.rig import pretended_cuda

        pretended_cuda.install()
        return "cuda"
    return "cuda" if transport == "cuda" else "cpu"


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    """From the first frame on that is neither the suite's nor importlib's; None without one."""
    suite = str(Path(__file__).parents[1])
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((suite, "<frozen importlib")):
            return trace
        trace = trace.tb_next
    return None


def _spare_the_machine() -> None:
    """Where memory runs out or a crash leaves its core, foreign code pays and not the suite."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on every platform
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        Path("/proc/self/oom_score_adj").write_text("900")

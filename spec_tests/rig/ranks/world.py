"""Worlds: where a clause's body runs. `world(n).run(body, ...)` returns what each rank observed.

    def body(ctx, seed):                      # a module-level function, from one rank's view
        ...
        return {"grad": parameter.grad}       # observations, never assertions

    ranks = worlds.world(2, target).run(body, 7)
    ranks[0]["grad"], ranks[1]["grad"]

The transport is a parameter: "gloo" (live processes on CPU), "sim" (simulated ranks, `rig.sim`),
"cuda" (live processes, a device each).
"""

from __future__ import annotations

import contextlib
import linecache
import re
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from spec_tests.rig.judge import SITUATION
from spec_tests.rig.ranks.errors import (
    NOT_HERE,
    Absent,
    NotOffered,
    RankDied,
    RankHung,
    RankRaised,
    RigError,
)
from spec_tests.rig.ranks.pool import PATIENCE, Pool, Ranks
from spec_tests.rig.ranks.wire import RemoteError
from spec_tests.rig.sim.pool import SimPool
from spec_tests.rig.sim.schedule import Schedule
from spec_tests.rig.target import Target

__all__ = ["Ranks", "World", "Worlds"]

_TORCH = str(Path(torch.__file__).parent)

TIMEOUT_S = 30.0
GRACE_S = 2.0
REPLAY_TIMEOUT_S = 4.0
# An implementation that does not load is tried again once: the machine may have been at fault.
_STARTS = 2
# How often patience with a function that computes without end is halved: 120 s for the first call,
# which may be compiling, 4 s from the sixth on. Otherwise a run over it would take hours.
_HALVINGS = 5

TRANSPORTS: dict[str, Callable[..., Pool]] = {"gloo": Pool, "sim": SimPool, "cuda": Pool}


NOTICE = "notice: "
"""How a line for the user begins among what ranks left behind."""
ONCE = ", in processes of earlier calls; repeated in new ones, the call ended well"
"""How it is said that a memory fault did not come again."""

_Key = tuple[Target | None, int, str, bool]
"""Implementation, number of ranks, transport, and whether they interpret kernels."""


@dataclass
class Worlds:
    """The live pools of one process, one per implementation, size and transport.

    At most `max_pools` live at a time; the longest unused one goes first.
    """

    transport: str = "gloo"
    max_pools: int = 6
    leaks: list[str] = field(default_factory=list)
    _pools: dict[_Key, Pool] = field(default_factory=dict)
    _failed: dict[_Key, list[RankDied | RankHung]] = field(default_factory=dict)
    _endless: Counter[tuple[Target | None, str]] = field(default_factory=Counter)

    def world(
        self, size: int, target: Target | None = None, *, transport: str | None = None
    ) -> World:
        """A world of `size` ranks that have `target` loaded.

        Raises:
            ValueError: for a size below one.
        """
        if size < 1:
            raise ValueError(f"a world has at least one rank, got size {size}")
        return World(self, size, target, transport or self.transport)

    def pool(self, size: int, target: Target | None, transport: str) -> Pool:
        """The live pool for this key, started if need be.

        Raises:
            RankDied, RankHung: a rank exits or hangs while it imports the implementation.
        """
        # An interpreted kernel that writes where it must not damages the heap of its process: what
        # is not made of kernels is judged in another one.
        runs_kernels = SITUATION.get().subject.endswith("_triton")
        key = (target, size, transport, runs_kernels)
        pool = self._pools.pop(key, None)
        if pool is None or not pool.is_alive:
            while len(self._pools) >= self.max_pools:
                self._pools.pop(next(iter(self._pools))).kill()
            pool = self._start(key)
        self._pools[key] = pool  # last in the dict: most recently used
        return pool

    def _start(self, key: _Key) -> Pool:
        target, size, transport, _ = key
        failures = self._failed.setdefault(key, [])
        if len(failures) >= _STARTS:
            raise failures[-1].with_traceback(None)  # else that would grow with every clause
        try:
            pool = TRANSPORTS[transport](size, target=target, transport=transport)
        except (RankDied, RankHung) as failure:
            failures.append(failure)
            raise
        self.leaks.extend(pool.leaks)
        return pool

    def patience(self, target: Target | None) -> float:
        """How many times its limit a call may take that visibly computes.

        Used up by the function that is being judged; by others of the same implementation, never
        so far that a call would have less than its limit.
        """
        own = self._endless[target, SITUATION.get().subject]
        if own:
            return PATIENCE / 2 ** min(own, _HALVINGS)
        others = sum(count for (whose, _), count in self._endless.items() if whose == target)
        return max(1.0, PATIENCE / 2**others)

    def note(self, target: Target | None, failure: RankHung) -> None:
        """Remember a call that computed without end."""
        self._endless[target, SITUATION.get().subject] += failure.was_computing

    def drop(self, target: Target | None) -> None:
        """Stop the pools of one implementation."""
        for key in [key for key in self._pools if key[0] == target]:
            self._pools.pop(key).kill()

    def close(self) -> None:
        """Stop every pool."""
        while self._pools:
            self._pools.popitem()[1].kill()


@dataclass(frozen=True, repr=False)
class World:
    """`size` ranks with one implementation. Cheap to make; the pool behind it is shared.

    Attributes:
        schedule: of simulated ranks.
        is_replay: live ranks that stand for simulated ones: they are given less time, for what is a
            deadlock there may go on for ever here.
    """

    worlds: Worlds
    size: int
    target: Target | None
    transport: str
    schedule: Schedule | None = None
    is_replay: bool = False

    def __repr__(self) -> str:
        # Hypothesis prints it in front of the drawn values.
        return f"{self.size} ranks of {self.target} on {self.transport}"

    def scheduled(self, schedule: Schedule) -> World:
        """The same simulated world under another schedule; a replay on live ranks takes none.

        Raises:
            ValueError: live ranks take no orders.
        """
        if self.transport == "sim":
            return replace(self, schedule=schedule)
        if not self.is_replay:
            raise ValueError(f"a schedule is an input of transport sim only, not {self.transport}")
        return self

    @property
    def live(self) -> World:
        """The same ranks, simulated or not, as processes."""
        return replace(self, transport="gloo", schedule=None) if self.transport == "sim" else self

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Hypothesis has a printer of its own, which would take dataclasses apart.
        printer.text(repr(self))

    def run(
        self,
        body: Callable[..., Any],
        *args: Any,
        seed: int = 0,
        timeout_s: float = TIMEOUT_S,
        grace_s: float = GRACE_S,
        **kwargs: Any,
    ) -> Ranks:
        """Call `body(ctx, *args, **kwargs)` on every rank.

        Args:
            body: a module-level function; its first parameter is a `rig.ranks.rank.Context`.
            seed: each rank seeds torch, NumPy and random with `1000 * seed + rank`.
            timeout_s: the longest that the body may take.
            grace_s: how long all silent ranks may be blocked before that is called a hang.

        Raises:
            NotOffered: the implementation lacks a function that the body called.
            RankRaised, RankHung, RankDied: see `rig.ranks.errors`.
            RigError: the body cannot be named.
        """
        name = _name_of(body)
        pool = self._loaded_pool()
        timeout_s = min(timeout_s, REPLAY_TIMEOUT_S) if self.is_replay else timeout_s
        limits: dict[str, Any] = {"timeout_s": timeout_s, "grace_s": grace_s}
        limits |= {"patience": self.worlds.patience(self.target), "schedule": self.schedule}
        with _translated(self.target, self.transport):
            try:
                ranks = pool.call(name, args, kwargs, seed=seed, **limits)
            except RankHung as failure:
                self.worlds.note(self.target, failure)
                raise
            except RankDied as failure:
                # Who damages memory is often long gone when somebody trips over it (a compiler's
                # cache, say): only a second time, in new processes, is it this call's own.
                if not (failure.is_memory_fault and pool.has_served):
                    raise
                ranks = self._loaded_pool().call(name, args, kwargs, seed=seed, **limits)
                self.notice(f"{failure.headline}{ONCE}")
        self.worlds.leaks.extend(ranks.leaks)
        SITUATION.get().observed = ranks
        return ranks

    def notice(self, text: str) -> None:
        """Say something beside the outcome: at the end of the run, and in the log."""
        self.worlds.leaks.append(f"{NOTICE}{text}")

    def offered(self) -> tuple[str, ...]:
        """The contract functions that the implementation brings.

        Raises:
            RigError: the implementation does not load; that is not the same as offering nothing.
        """
        return self._loaded_pool().offered

    def misfits(self) -> dict[str, str]:
        """The functions that cannot be called as the contract calls them, each with the reason.

        Raises:
            RigError: the implementation does not load.
        """
        return self._loaded_pool().misfits

    def _loaded_pool(self) -> Pool:
        name = self.target.name if self.target else "implementation"
        try:
            pool = self.worlds.pool(self.size, self.target, self.transport)
        except (RankDied, RankHung) as failure:
            raise RigError(f"{name} does not load: {failure}") from None
        if pool.load_error is not None:
            raise RigError(f"{name} does not load: {pool.load_error.headline}")
        return pool


def _name_of(body: Callable[..., Any]) -> tuple[str, str]:
    module, qualname = getattr(body, "__module__", None), getattr(body, "__qualname__", "<none>")
    if module in (None, "__main__") or "<" in qualname:
        raise RigError(
            f"a rank body travels by name, so it must be a module-level function of an importable "
            f"module; got {qualname!r} of {module!r}. Move it to the top of a module, and pass "
            "what it closes over as arguments"
        )
    return str(module), qualname


def _is_own(error: RemoteError) -> bool:
    """False if torch raised it below the implementation: an operator, a module without forward."""
    innermost = error.frames[-1].filename if error.frames else ""
    return not innermost.startswith(_TORCH) or error.message.startswith(_NO_BACKWARD)


# How torch says that an autograd function leaves its backward out.
_NO_BACKWARD = "You must implement either the backward or vjp method"

# What is said of a missing device by torch ("Torch not compiled with CUDA enabled", "NVTX functions
# not installed", "Tried to instantiate dummy base class"; for CUDA: "Found no NVIDIA driver",
# "invalid argument to reset_peak_memory_stats"), by Triton ("0 active drivers") and by
# code that checks for one. No path, which may hold any word.
_NO_CUDA = re.compile(
    r"(?<![/\w])(cuda|gpu|nvidia|nvtx|nccl)(?!/)|_cuda_|is_cuda|active drivers|dummy base class"
    r"|accelerator device when none|argument to reset_\w+_memory_stats",
    re.IGNORECASE,
)


# Errors that Python raises itself, for a missing key, name, attribute, argument or file, whatever
# name they hold. They report a missing device only where a `raise` made them.
_OF_PYTHON = ("LookupError", "NameError", "AttributeError", "TypeError", "OSError")
_RAISE = re.compile(r"(?:^|[:;])\s*raise\b")
# What the extension of a torch without CUDA leaves out.
_LEFT_OUT = re.compile(r"module 'torch\._C' has no attribute '_cuda")


def _needs_cuda(error: RemoteError) -> str:
    """Return what a rank said that raised for want of a CUDA device; empty for any other error.

    Such an error is torch's or Triton's own, or of a `raise` or an assertion that asks for a
    device. An assertion may have no words, but it has a line.
    """
    last = error.frames[-1] if error.frames else None
    line = linecache.getline(last.filename, last.lineno).strip() if last else ""
    is_of_python, is_raised = any(map(error.is_a, _OF_PYTHON)), _RAISE.search(line)
    if last and error.is_a("AttributeError") and last.filename.startswith(_TORCH):
        is_raised = None  # by `nn.Module`, in the place of Python
    if is_of_python and not is_raised and not _LEFT_OUT.search(error.message):
        return ""
    words = [error.message.partition("\n")[0]]
    if error.is_a("AssertionError"):
        words.append(line)
    for said in words:
        # What follows lists who else has this operator, whatever the device.
        if _NO_CUDA.search(said.partition("only available for these backends")[0]):
            return said
    return ""


@contextlib.contextmanager
def _translated(target: Target | None, transport: str) -> Iterator[None]:
    """ "Not offered" and "not here" are outcomes of their own, not failures."""
    try:
        yield
    except RankRaised as failure:
        if failure.error.is_a("NotHere"):
            raise unittest.SkipTest(f"{NOT_HERE}{failure.error.message}") from None
        if transport != "cuda" and (said := _needs_cuda(failure.error)):
            is_pretended = target is not None and target.pretends_cuda
            advice = "" if is_pretended else "; --pretend-cuda stands in for one"
            raise unittest.SkipTest(f"{NOT_HERE}needs a CUDA device: {said}{advice}") from None
        if failure.error.is_a("NotOfferedError"):
            raise Absent(failure.error.message) from None
        if failure.error.is_a("NotImplementedError") and _is_own(failure.error):
            raise NotOffered(failure.error.message or "raised NotImplementedError") from None
        raise

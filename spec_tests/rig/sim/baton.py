"""Who runs: one thread per rank, and a baton that exactly one of them holds.

A rank gives the baton away when it must wait, when it asks whether something is complete, and, if
the schedule interrupts, whenever it posts an operation. Nobody else ever decides anything, so a
run is a function of the bodies and the schedule. If no rank can go on and some have not ended,
that is a deadlock: proved, and told with who waits for what.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
import torch

from spec_tests.rig.ranks.watcher import stack_of_body
from spec_tests.rig.sim.faults import NotSimulated, PeerGone
from spec_tests.rig.sim.schedule import Chooser, Schedule

# So many questions in a row, without any progress, and nobody is working on the answer.
_MAX_POLLS = 2_000

Job = Callable[[int], None]


class Private:
    """What each simulated rank has for itself, while it does not run.

    Random numbers (torch, NumPy, random), the default dtype, the environment and the warning
    filters belong to the process, so they are exchanged whenever another rank goes on. Grad mode,
    autocast and the stacks of modes belong to threads, and with them to ranks already.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._torch = torch.default_generator.get_state()
        self._random = random.getstate()
        self._numpy: Any = np.random.MT19937()
        # How many of its 624 numbers are used: reading that costs nothing, reading its state does.
        self._used = ctypes.c_int.from_address(self._numpy.ctypes.state_address + 4 * 624)
        self._seen, self._second_normal = self._used.value, False
        self._dtype = torch.get_default_dtype()
        # The mapping behind os.environ: exchanged as a whole, in no time.
        self._environ = dict(os.environ._data)  # type: ignore[attr-defined]  # not in stubs
        for name, value in environment.items():
            self._environ[os.fsencode(name)] = os.fsencode(value)
        self._filters: list[Any] = list(warnings.filters)
        self._show = warnings.showwarning, warnings._showwarnmsg_impl  # type: ignore[attr-defined]  # likewise

    def leave(self) -> None:
        """Put the process's state away: this rank stops running."""
        self._torch = torch.default_generator.get_state()
        self._random = random.getstate()
        # NumPy draws normal numbers in pairs and keeps the second outside of the generator.
        if self._second_normal or self._used.value != self._seen:
            self._normals = np.random.get_state(legacy=False)
            self._seen, self._second_normal = self._used.value, bool(self._normals["has_gauss"])
        self._dtype = torch.get_default_dtype()
        self._filters = warnings.filters  # type: ignore[assignment]  # a list, whatever stubs say
        self._show = warnings.showwarning, warnings._showwarnmsg_impl  # type: ignore[attr-defined]  # not in stubs

    def enter(self) -> None:
        """Make it the process's state: this rank goes on."""
        torch.default_generator.set_state(self._torch)
        random.setstate(self._random)
        np.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]  # not in stubs
        if self._second_normal:
            np.random.set_state(self._normals)
        if self._dtype is not torch.get_default_dtype():
            torch.set_default_dtype(self._dtype)
        os.environ._data = os.environb._data = self._environ  # type: ignore[attr-defined]  # not in stubs
        if warnings.filters is not self._filters:
            warnings.filters = self._filters
            warnings._filters_mutated()  # type: ignore[attr-defined]  # not in stubs
        warnings.showwarning, warnings._showwarnmsg_impl = self._show  # type: ignore[attr-defined]  # likewise


class _State(Enum):
    READY = auto()  # can go on
    WAITING = auto()  # for a condition
    POLLING = auto()  # has asked and was told "not yet"
    ENDED = auto()  # its body has ended; waits for the others to end
    LEFT = auto()  # its job is done


@dataclass
class Blocked:
    """One row of the table of a deadlock."""

    rank: int
    waits_for: str
    stack: str


@dataclass
class Rank:
    """One thread, and what is known of it."""

    index: int
    private: Private
    baton: threading.Lock = field(default_factory=threading.Lock)
    state: _State = _State.READY
    is_ready: Callable[[], bool] = lambda: True
    waits_for: Callable[[], str] = lambda: ""
    polls: int = 0
    is_aside: bool = False
    release: BaseException | None = None  # raised where it waits, so that it unwinds
    thread: threading.Thread | None = None


class Baton:
    """`size` ranks. Its threads live as long as it does; `run` gives each of them one job."""

    def __init__(self, size: int, mark: mmap.mmap) -> None:
        self.ranks = [
            Rank(rank, Private({"RANK": str(rank), "LOCAL_RANK": str(rank)}))
            for rank in range(size)
        ]
        self.chooser = Chooser(Schedule())
        self.holder: Rank | None = None
        self.steps = 0
        self.blocked: list[Blocked] = []
        self._mark = mark
        self._home = threading.Lock()
        self._by_thread: dict[int, Rank] = {}
        self._job: Job = lambda rank: None
        self._has_failed = False
        self._home.acquire()
        for rank in self.ranks:
            rank.baton.acquire()
            rank.thread = threading.Thread(
                target=self._live, args=(rank,), name=f"rank{rank.index}", daemon=True
            )
            rank.thread.start()

    # ------------------------------------------------------------------------- from outside

    def run(self, job: Job, schedule: Schedule) -> list[Blocked]:
        """Let every rank do `job(rank)`; who was blocked when none could go on, if that happened.

        A job must not raise.
        """
        self._job, self.chooser = job, Chooser(schedule)
        self.blocked, self._has_failed = [], False
        for rank in self.ranks:
            rank.state, rank.release, rank.polls = _State.READY, None, 0
        outside = Private({})
        self._hand_to(self._choose(None))
        self._home.acquire()
        outside.enter()
        return self.blocked

    # --------------------------------------------------------------------------- from a rank

    def me(self) -> Rank:
        """The rank whose thread this is.

        Raises:
            NotSimulated: it is not a rank's thread.
        """
        found = self._by_thread.get(threading.get_ident())
        if found is None:
            raise NotSimulated(
                "a thread that the implementation started is not a rank: only the thread that runs "
                "a simulated rank may communicate; judge this code with --transport gloo"
            )
        return found

    def wait_until(self, is_ready: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """Return once `is_ready`; others run meanwhile. `waits_for` says what it is, in words.

        Raises:
            PeerGone: it will never be, for no rank can go on.
        """
        me = self.me()
        self.steps += 1
        if not is_ready():
            me.is_ready, me.waits_for, me.state = is_ready, waits_for, _State.WAITING
            self._give_away(me)
        elif self.chooser.schedule.interrupts:
            self._give_away(me)

    def pause(self) -> None:
        """Let another rank run now, if the schedule interrupts."""
        if self.chooser.schedule.interrupts:
            self._give_away(self.me())

    def step_aside(self) -> None:
        """Let the others run until each of them must wait, or steps aside as well."""
        me = self.me()
        others = [rank for rank in self.ranks if rank is not me]
        me.is_aside = True
        try:
            self.wait_until(
                lambda: not any(not r.is_aside and self._can_go_on(r) for r in others),
                lambda: "the others to get ahead",
            )
        finally:
            me.is_aside = False

    def poll(self, is_ready: Callable[[], bool], waits_for: Callable[[], str]) -> bool:
        """Whether `is_ready`, after others had a chance to make it so."""
        me = self.me()
        self.steps += 1
        if not is_ready():
            me.polls += 1
            me.is_ready, me.waits_for, me.state = is_ready, waits_for, _State.POLLING
            self._give_away(me)
        if is_ready():
            me.polls = 0
        return is_ready()

    def progress(self) -> None:
        """Something has been posted: whoever asks may get another answer."""
        for rank in self.ranks:
            rank.polls = 0

    def fail(self) -> None:
        """This rank's body has raised: who waits for it is no deadlock."""
        self._has_failed = True

    def end(self) -> None:
        """This rank's body has ended; return when all have."""
        me = self.me()
        me.state = _State.ENDED
        if all(rank.state is _State.ENDED for rank in self.ranks):
            for rank in self.ranks:
                rank.state = _State.READY
        else:
            self._give_away(me)

    # ----------------------------------------------------------------------------- the baton

    def _live(self, rank: Rank) -> None:
        self._by_thread[threading.get_ident()] = rank
        while True:
            rank.baton.acquire()
            rank.private.enter()
            self._job(rank.index)
            rank.private.leave()
            rank.state = _State.LEFT
            if all(other.state is _State.LEFT for other in self.ranks):
                self.holder = None
                self._home.release()
            else:
                self._hand_to(self._choose(rank))

    def _give_away(self, me: Rank) -> None:
        chosen = self._choose(me)
        if chosen is not me:
            me.private.leave()
            self._hand_to(chosen)
            me.baton.acquire()
            me.private.enter()
        if me.state is not _State.ENDED:
            me.state = _State.READY
        if me.release is not None:
            release, me.release = me.release, None
            raise release

    def _hand_to(self, rank: Rank) -> None:
        self.holder = rank
        self._mark[0] = rank.index  # what the parent reads when this process dies
        rank.baton.release()

    def _choose(self, current: Rank | None) -> Rank:
        able = self._able()
        if not able:
            self._release_the_blocked()
            able = self._able()
        index = current.index if current is not None else None
        return self.ranks[self.chooser.pick(index, able)]

    def _able(self) -> list[int]:
        able = [rank.index for rank in self.ranks if self._can_go_on(rank)]
        if able:
            return able
        askers = [rank for rank in self.ranks if rank.state is _State.POLLING]
        askers = [rank for rank in askers if rank.polls < _MAX_POLLS]
        return [min(askers, key=lambda rank: rank.polls).index] if askers else []

    def _can_go_on(self, rank: Rank) -> bool:
        if rank.release is not None or rank.state is _State.READY:
            return True
        return rank.state in (_State.WAITING, _State.POLLING) and rank.is_ready()

    def _release_the_blocked(self) -> None:
        stuck = [rank for rank in self.ranks if rank.state in (_State.WAITING, _State.POLLING)]
        if not self._has_failed and not self.blocked:
            self.blocked = [Blocked(r.index, r.waits_for(), stack_of_body(r.thread)) for r in stuck]
        why = "a peer has failed" if self._has_failed else "no rank can go on"
        for rank in stuck:
            rank.polls = 0
            rank.release = PeerGone(f"rank {rank.index} waited for {rank.waits_for()}, but {why}")

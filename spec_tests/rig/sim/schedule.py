"""The schedule of a simulated world: which rank runs when, as plain data.

    Schedule()                                the rank that runs goes on until it must wait
    Schedule("reversed")                      likewise, but the highest rank comes first
    Schedule("seeded", seed=3)                at every post and wait any rank may come next
    Schedule("drawn", choices=(0, 2, 1))      likewise, as the numbers say; 0 means "go on"

Two runs of a deterministic body under the same schedule are the same run. A drawn schedule shrinks
towards the empty one, which is the first of the above.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Schedule:
    """An order of events, and the faults that come with it.

    Attributes:
        policy: "lowest", "reversed", "seeded" or "drawn", as above.
        seed: of everything that is random here.
        choices: of the policy "drawn"; each picks one of the ranks that could go on.
        straggler: a rank that runs only when no other can.
        late: how often, at most, a finished operation still says that it is not (`is_completed`).
        unwaited: which work nobody may leave behind without a wait: "error" means any, "ignore"
            none. By default a gather may be left: what was gathered ahead and never used, say for
            a backward that does not come, harms nobody, and who reads it early reads poison.
    """

    policy: str = "lowest"
    seed: int = 0
    choices: tuple[int, ...] = ()
    straggler: int | None = None
    late: int = 0
    unwaited: str = "gathers may be left"

    @property
    def interrupts(self) -> bool:
        """Whether a rank that could go on may have to let another one run."""
        return self.policy in ("seeded", "drawn")


@dataclass
class Chooser:
    """Takes the decisions of one run."""

    schedule: Schedule
    _random: random.Random = field(init=False)
    _choices: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.schedule.seed)
        self._choices = iter(self.schedule.choices)

    def pick(self, current: int | None, ready: Sequence[int]) -> int:
        """One of `ready` (ascending, not empty); `current` is the rank that has just run."""
        schedule = self.schedule
        able = [rank for rank in ready if rank != schedule.straggler] or list(ready)
        if len(able) == 1:
            return able[0]
        if schedule.policy == "reversed":
            return able[-1]
        if schedule.policy == "seeded":
            return self._random.choice(able)
        if schedule.policy == "drawn":
            if current in able:
                able.remove(current)
                able.insert(0, current)
            return able[next(self._choices, 0) % len(able)]
        return able[0]

    def delay(self) -> int:
        """How many more times a finished operation denies that it is."""
        return self._random.randint(0, self.schedule.late) if self.schedule.late else 0

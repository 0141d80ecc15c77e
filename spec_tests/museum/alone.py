"""A world of one rank without a process: for near-misses of functions that only compute.

Starting a rank for each near-miss costs a second or two, which buys isolation that a function from
a file to a dict does not need. Such a class says `alone = True`; its clauses for one rank then run
in this process, those for several still on live ranks.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spec_tests.museum.card import Impostor
from spec_tests.rig.judge import SITUATION
from spec_tests.rig.ranks import hygiene
from spec_tests.rig.ranks.errors import NotOffered, RankRaised, RankReport
from spec_tests.rig.ranks.rank import Context, RankConfig, Task
from spec_tests.rig.ranks.wire import RemoteError
from spec_tests.rig.ranks.world import Ranks, World, Worlds
from spec_tests.rig.target import Implementation, Target


class Alone(Worlds):
    """Worlds of which that of one rank is this process, with the impostor's functions in it."""

    def __init__(self, impostor: Impostor, worlds: Worlds) -> None:
        super().__init__()
        functions = impostor.functions() if impostor.functions else {}
        self._impl = Implementation(impostor.id, SimpleNamespace(**functions))
        self._worlds = worlds

    def world(
        self, size: int, target: Target | None = None, *, transport: str | None = None
    ) -> World:
        """Of one rank: here. Of several: live ranks."""
        if size > 1:
            return self._worlds.world(size, target, transport=transport)
        return _Here(self, 1, target, "gloo", self._impl)


class _Here(World):
    """One rank, in this process."""

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields[:4])
        object.__setattr__(self, "_impl", fields[4])  # a frozen dataclass

    _impl: Implementation

    def run(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Ranks:
        """Call the body as a rank would."""
        for option in ("timeout_s", "grace_s"):
            kwargs.pop(option, None)
        seed = kwargs.pop("seed", 0)
        hygiene.seed_everything(1000 * seed)
        with tempfile.TemporaryDirectory() as scratch:
            config = RankConfig(0, 1, 0, "", str(Path(scratch)), self.target)
            task = Task(0, body.__module__, body.__qualname__, (), {}, seed)
            try:
                ranks = Ranks([body(Context(config, task, self._impl), *args, **kwargs)])
            except NotImplementedError as error:
                raise NotOffered(str(error)) from None
            except Exception as error:
                report = RankReport(0, "raised", RemoteError.of(error, time.monotonic_ns()))
                raise RankRaised(f"rank 0 raised {error!r}", 0, [report]) from error
        SITUATION.get().observed = ranks
        return ranks

    def offered(self) -> tuple[str, ...]:
        """What the impostor brings."""
        return self._impl.offered

    def misfits(self) -> dict[str, str]:
        """None of it, or its card is wrong."""
        return self._impl.misfits

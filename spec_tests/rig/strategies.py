"""Hypothesis strategies and profiles for properties whose body runs on live ranks.

Everything is drawn in the parent and sent: ranks that drew for themselves would build different
shapes and hang. Draws are small, printable in one line, and shrink to something that a reader can
follow by hand.

Profiles: `quick` (default; derandomised, so that a run is a function of the tree), `deep` (many
random examples, database on), `impostors` (first failure ends it, nothing is shrunk).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from spec_tests.rig.sim.schedule import Schedule

_NO_EXPLAIN = tuple(phase for phase in Phase if phase is not Phase.explain)


def register_profiles() -> None:
    """Make the profiles known to hypothesis; the plugin loads one of them."""
    common = settings(
        # Live ranks answer in milliseconds but not in constant time: deadlines would only flake.
        deadline=None,
        phases=_NO_EXPLAIN,
        # One finding is one message; a group of several would have no single outcome.
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    quick = settings(common, max_examples=12, derandomize=True, database=None, print_blob=False)
    settings.register_profile("quick", quick)
    settings.register_profile("deep", common, max_examples=300, print_blob=True)
    settings.register_profile("impostors", quick, phases=(Phase.explicit, Phase.generate))


def nothing_shrunk() -> AbstractContextManager[None]:
    """Let the first failure end a property: nobody reads a shorter example of it."""
    return profile("impostors")


def shrinks() -> bool:
    """Whether somebody reads what fails, so that it is worth a shorter example."""
    return settings.get_current_profile_name() != "impostors"


@contextlib.contextmanager
def profile(name: str) -> Iterator[None]:
    """Run properties under another profile."""
    before = settings.get_current_profile_name()
    settings.load_profile(name)
    try:
        yield
    finally:
        settings.load_profile(before)


seeds = st.integers(min_value=0, max_value=999)
"""Seed of weights and data."""


def schedules_of_ranks(max_ranks: int = 3) -> st.SearchStrategy[Schedule]:
    """Orders of events in a simulated world; the simplest is the one without any fault."""
    return st.builds(
        Schedule,
        policy=st.just("drawn"),
        seed=st.integers(0, 9),
        choices=st.lists(st.integers(0, max_ranks - 1), max_size=24).map(tuple),
        straggler=st.none() | st.integers(0, max_ranks - 1),
        late=st.integers(0, 3),
    )

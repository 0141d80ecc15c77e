"""What was found on simulated ranks, tried once more on live ones.

A finding on sim is a finding; whether gloo shows it too says how to go on: with a debugger on live
processes, or with the schedule in hand because nothing else shows it. Of a property the example is
replayed that hypothesis has shrunk to, of any other clause the case. Live ranks take no orders, so
a drawn schedule is left out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from spec_tests.clause import Clause
from spec_tests.rig import runner, unreadable
from spec_tests.rig.judge import judging
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.world import World

_FINDINGS = (Outcome.FAILED, Outcome.HANG, Outcome.DIED)


@contextlib.contextmanager
def telling(clause: Clause, case: Mapping[str, Any], world: World) -> Iterator[None]:
    """What is raised within the block gets a note: does gloo show it too?

    Args:
        case: the clause's parameters without `world`.
        world: the simulated ranks; those on gloo are made of the same implementation.
    """
    with _last_example(clause.test) as example:
        try:
            yield
        except BaseException as error:
            if runner.outcome_of(error) in _FINDINGS:
                error.add_note(_on_gloo(clause, {**case, **example}, world))
            raise


@contextlib.contextmanager
def _last_example(test: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """What a property was last called with, besides its case: at its end, the shrunk example."""
    example: dict[str, Any] = {}
    handle = getattr(test, "hypothesis", None)
    if handle is None:
        yield example
        return
    inner = handle.inner_test

    @functools.wraps(inner)
    def remember(*args: Any, **drawn: Any) -> None:
        __tracebackhide__ = True
        example.clear()
        example.update(drawn)
        inner(*args, **drawn)

    handle.inner_test = remember
    try:
        yield example
    finally:
        handle.inner_test = inner


def _on_gloo(clause: Clause, values: dict[str, Any], world: World) -> str:
    live = world.worlds.world(world.size, world.target, transport="gloo")
    handle = getattr(clause.test, "hypothesis", None)
    test = clause.test if handle is None else handle.inner_test
    drawn = "; live ranks take no schedule" if "gloo" not in clause.transports else ""
    case = {name: value for name, value in values.items() if name != "world"}
    assert world.target is not None  # a clause judges something
    here = runner.situation(clause, world.target, {"world": world.size}, "replayed on gloo")
    try:
        with judging(here), unreadable.is_a_finding():
            test(**case, world=replace(live, is_replay=True))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # hangs and deaths are no ordinary exceptions
        lines = runner.message_of(error).splitlines()
        found = next((line for line in lines if line and not line.startswith("[")), "")
        return f"replayed on gloo: {runner.outcome_of(error)} as well: {found}{drawn}"
    return f"replayed on gloo: passed{drawn}"

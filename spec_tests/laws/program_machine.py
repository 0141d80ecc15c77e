"""A state machine that writes programs: hypothesis draws legal calls and shrinks what fails.

The rule only records calls; the whole program runs when the machine is torn down. One run on the
ranks is then one example, on any transport, and a rank that hangs or dies is not an exception that
hypothesis would try to shrink. The legal calls depend on little state: whether there are unreduced
local gradients, and whether there has been a save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    rule,
    run_state_machine_as_test,
)

from spec_tests.laws.programs import RATE, Call, Program, Trainee, agree
from spec_tests.rig.judge.tolerance import Tolerance
from spec_tests.rig.ranks.world import World

LONGEST = 24
"""Calls in a program: three that must meet in order rarely do so in a short one."""

SHRUNK = 80
"""Programs that are tried in order to shorten one that fails: all could take half a minute."""

ALL_CALLS = frozenset(
    "micro local discard finish step zero_grad rate evaluate interrupt save load".split()  # noqa: SIM905
)
"""What a machine may draw; "discard" is zero_grad in a window."""


def any_sequence(
    world: World,
    body: Callable[..., Any],
    *args: Any,
    alone: Callable[[int], Trainee],
    within: Callable[[Program], Tolerance],
    calls: frozenset[str] = ALL_CALLS,
    given: str,
) -> None:
    """Every program drawn from `calls` must do on the ranks what it does in one process.

    As many programs as hypothesis' profile says.

    Args:
        body: called with (ctx, *args, program); returns what `programs.run` does.
        alone: the oracle of a rank.
        within: tolerance of a program.
        calls: names of `programs.Trainee`'s methods, and "discard".
    """
    __tracebackhide__ = True

    failed: set[str] = set()
    shrunk = 0

    def judge(program: Program) -> None:
        nonlocal shrunk
        words = repr(program)
        if failed and words not in failed:
            shrunk += 1
            if shrunk > SHRUNK:
                return  # not run any more: hypothesis settles for the shortest failure so far
        failed.add(words)
        seen = world.run(body, *args, program)
        agree(seen, alone, program, within=within(program), given=given)
        failed.remove(words)

    run_state_machine_as_test(
        lambda: _Machine(judge, calls),  # type: ignore[arg-type]  # a factory will do
        settings=settings(stateful_step_count=LONGEST, print_blob=False),
    )


class _Machine(RuleBasedStateMachine):
    def __init__(self, judge: Callable[[Program], None], calls: frozenset[str]) -> None:
        super().__init__()
        self.judge, self.calls = judge, calls
        # Moments exist from the start: another clause judges that an empty state replaces them.
        self.program: list[Call] = [("micro", 0), ("step",)]
        self.is_window_open = False  # gradients of single ranks wait for their reduction
        self.is_saved = False
        self.is_interrupted = False  # and no forward since

    # One rule for all calls: of several, hypothesis switches some off for a whole program, and
    # most programs would lack the step that shows what the others did.
    @rule(choice=st.integers(0, 359), detail=st.integers(0, 9))
    def call(self, choice: int, detail: int) -> None:
        """Note a legal call; the smaller the numbers, the simpler it is."""
        legal = self.legal()
        name = legal[choice % len(legal)]
        self.program.append(self.spelled(name, detail))
        self.is_window_open = name == "local" or (
            self.is_window_open and name not in ("micro", "discard")
        )
        self.is_saved |= name == "save"
        self.is_interrupted = name == "interrupt" or (
            self.is_interrupted and name not in ("micro", "local", "evaluate")
        )

    def legal(self) -> list[str]:
        """The calls that a right trainer may make now, as often as they are to be drawn."""
        last = self.program[-1][0]
        names = ["micro", "micro", "local", "evaluate", "interrupt", "rate"]
        if self.is_window_open:
            names += ["micro", "local", "discard"]
        else:  # a step of unreduced gradients is a mistake of the trainer: replicas then differ
            names += ["zero_grad", "save"]
            # Another clause judges weights left gathered by an exception and made stale by a step.
            names += [] if self.is_interrupted else ["step", "step", "step"]
            names += ["load"] if self.is_saved else []
            names += ["finish"] if last == "micro" else []
        unrepeated = {last} - {"micro", "local", "step"}
        return [name for name in names if name in self.calls - unrepeated]

    def spelled(self, name: str, detail: int) -> Call:
        """The call with its arguments."""
        match name:
            case "micro" | "local" | "evaluate" | "interrupt":
                return name, len(self.program)
            case "zero_grad" | "discard":
                return "zero_grad", detail % 2 == 0
            case "rate":
                return name, detail % 2, RATE + detail // 2 - 2
            case _:
                return (name,)

    def teardown(self) -> None:
        self.judge(tuple(self.program))

"""Durability: whatever happened to the disk, a load finds one whole state, or raises.

A checkpoint is many tensors that belong together. Half of them from one step and half from another
load without an error and train on, so "it loads" proves nothing: each reading is compared bit by
bit with the complete states that were ever saved.

A reading is a mapping: `where` (what had happened), `step` (what load returned), `error` (what it
raised, else ""), `before` and `state` (everything that training depends on, by name).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spec_tests.rig import judge

State = Mapping[str, torch.Tensor]
Reading = Mapping[str, Any]


def one_of(
    readings: Sequence[Reading],
    saved: Mapping[str, tuple[int, State]],
    *,
    may_refuse: bool = False,
    likely: str = "",
    given: str = "",
) -> None:
    """Every reading of a rank must be one of the saved states, whole, under its own step.

    Args:
        saved: by what the message calls it, "the older save": step and state.
        may_refuse: an error is right as well.
        likely: what it means to get the state of another step; an error says what it means.
    """
    __tracebackhide__ = True
    asked = [step for step, _ in saved.values()]
    for reading in readings:
        where = ", ".join(filter(None, [given, reading["where"]]))
        if reading["error"]:
            judge.holds(
                may_refuse,
                f"expected {_names(saved)} to load, got {reading['error'][:400]}",
                given=where,
            )
            continue
        matches = _matches(reading, saved)
        judge.holds(
            bool(matches),
            f"expected {_names(saved)}, whole, got step {reading['step']!r} and "
            f"{_mixture(reading, saved)}",
            likely=likely if reading["step"] not in asked else "",
            given=where,
        )
        under_its_step(reading, saved, given=where)


def under_its_step(
    reading: Reading, saved: Mapping[str, tuple[int, State]], *, given: str = ""
) -> None:
    """A reading that is one of the saved states must come with the step of that state."""
    __tracebackhide__ = True
    matches = _matches(reading, saved)
    steps = [saved[name][0] for name in matches]
    judge.holds(
        not matches or bool(reading["error"]) or reading["step"] in steps,
        f"expected the step of {' or '.join(matches)}, {steps[:1]}, got {reading['step']!r}",
        likely="the step is that of the newest save, also where an older one was loaded",
        given=given,
    )


def _matches(reading: Reading, saved: Mapping[str, tuple[int, State]]) -> list[str]:
    return [name for name, (_, state) in saved.items() if not differing(reading, state)]


def untouched(readings: Sequence[Reading]) -> None:
    """Every reading that raised must have left everything as it was."""
    __tracebackhide__ = True
    for reading in readings:
        changed = differing(reading, reading["before"]) if reading["error"] else []
        judge.holds(
            not changed,
            f"expected a load that raises to change nothing, got changes in {_short(changed)}; it "
            f"raised {reading['error'][:200]}",
            likely="values are copied into the live model before all of them were checked",
            given=reading["where"],
        )


def all_or_none(errors: Sequence[str], *, what: str, given: str = "") -> None:
    """Either every rank raised, or none did."""
    __tracebackhide__ = True
    failed = [rank for rank, error in enumerate(errors) if error]
    judge.holds(
        len(failed) in (0, len(errors)),
        f"expected {what} to raise on all ranks or on none, got errors on ranks {failed} of "
        f"{len(errors)}: {next(filter(None, errors), '')[:300]}",
        likely="the rank that failed told nobody; the others go on as if it had not failed",
        given=given,
    )


def differing(reading: Reading, state: State) -> list[str]:
    """Names whose values are not those of `state`; names that only one side has differ."""
    seen: State = reading["state"]
    return sorted(
        name
        for name in seen.keys() | state.keys()
        if name not in seen or name not in state or not _equal(seen[name], state[name])
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _mixture(reading: Reading, saved: Mapping[str, tuple[int, State]]) -> str:
    parts = []
    for name, (_, state) in saved.items():
        wrong = differing(reading, state)
        parts.append(f"{len(wrong)} of {len(state)} values unlike {name} ({_short(wrong)})")
    return "; ".join(parts)


def _names(saved: Mapping[str, object]) -> str:
    return " or ".join(saved)


def _short(names: Sequence[str], limit: int = 3) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")

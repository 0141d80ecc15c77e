"""Which parameters a model of shards shows in full after each call, or holds, and which it may.

Values do not show a unit that stays open after its backward, a `reshard` that does nothing, or a
gather that a later wait brings back. What a call leaves open (a pass that an exception ended, a
setting that keeps weights) is not judged until a later call settles it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spec_tests.programs.calls import VERBS, Call, Program
from spec_tests.programs.pieces import Seen
from spec_tests.programs.scene import STEPPED, Scene
from spec_tests.programs.units import parameters_of_units
from spec_tests.rig import judge
from spec_tests.rig.judge.oracle import parameters
from spec_tests.rig.toys import TOYS

SMALL = 512
"""Bytes: an output in float64, and what torch keeps by itself. Most toys have more weights."""


_WAITS = 20
"""Looks at memory that grew, a twentieth of a second apart."""


def is_weighed(scene: Scene, name: str, before: Sequence[str]) -> bool:
    """Whether what a call leaves in memory is measured.

    Of forwards only an evaluation has to free all full weights: after another one the first gather
    of its backward may be under way. The first other model may leave what a second one then uses.
    """
    if name == "another_lives":
        return name in before
    return name == "evaluate" and scene.word("reshard") == "freed"


def full_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters that are whole plain tensors with memory."""
    return [
        name
        for name, p in module.named_parameters()
        if not hasattr(p, "placements") and p.numel() and p.untyped_storage().nbytes()
    ]


def held_bytes(but: Seen) -> int:
    """Return the bytes of all storages that a tensor of Python's refers to, in this process."""
    gc.collect()
    shown = [t for _, found in but for t in found.values() if t is not None]
    ours = {id(getattr(tensor, "local", tensor)) for tensor in shown}
    storages = {}
    for thing in gc.get_objects():
        is_tensor = issubclass(type(thing), torch.Tensor) and id(thing) not in ours
        if is_tensor and not hasattr(thing, "placements"):  # whose local tensor is another object
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def growth(before: int) -> int:
    """Return how many bytes more are held than before, and stay.

    A thread of the backend lets go of a message some time after it was waited for.
    """
    for _ in range(_WAITS):
        grown = held_bytes(()) - before
        if grown <= SMALL:
            break
        time.sleep(0.05)
    return grown


def closed(program: Program, scene: Scene) -> list[frozenset[str]]:
    """Return the parameters that may not be full after each call."""
    toy = scene["toy"][0]
    module = TOYS[toy].build(0)
    every = frozenset(parameters(toy, 0))
    after_forward = {
        "freed": every,
        "usual": frozenset(parameters_of_units(module, scene.word("units"))),
    }.get(scene.word("reshard"), frozenset())
    runs_all = scene.word("toy") in STEPPED
    found, now, is_kept, waits = [], every, False, False
    for call in program:
        name = call[0]
        waits = name == "forward" or (waits and name not in ("pending", "resumed"))
        is_kept = call == ("keep", "True") or (is_kept and call != ("keep", "False"))
        is_open = is_kept or waits
        frees = runs_all and not is_kept
        now = _then(call, now, every, after_forward, is_open=is_open, frees=frees)
        found.append(now)
    return found


def _then(
    call: Call,
    now: frozenset[str],
    every: frozenset[str],
    after_forward: frozenset[str],
    *,
    is_open: bool,
    frees: bool,
) -> frozenset[str]:
    ends = VERBS[call[0]].ends
    if call[0] == "reshard":
        return every
    if ends == "open":
        return frozenset()
    if ends == "backward":
        return frozenset() if is_open else every
    if ends == "forward":
        return after_forward if frees else now & after_forward
    return now


def judge_calls(ranks: Sequence[Sequence[dict[str, Any]]], scene: Scene, program: Program) -> None:
    """After each call full weights must be shards again, where no setting keeps them."""
    __tracebackhide__ = True
    every = frozenset(parameters(scene["toy"][0], 0))
    ignored = {[*parameters(scene["toy"][0], 0)][number] for number in scene["ignored"]}
    for number, names in enumerate(closed(program, scene)):
        for rank, calls in enumerate(ranks):
            full = sorted(names.intersection(calls[number]["full"]) - ignored)
            judge.holds(
                not full,
                f"rank {rank}, after {' '.join(program[number])!r} (call {number + 1}): expected "
                f"shards, got full weights of {', '.join(map(repr, full[:3]))}",
                likely="a unit stays open after its pass, or a reshard does nothing",
            )
            grown = calls[number].get("grown", 0)
            judge.holds(
                grown <= SMALL or names != every,
                f"rank {rank}, {' '.join(program[number])!r} (call {number + 1}): expected full "
                f"weights to be freed, got {grown} bytes more in memory than before the call",
                likely="a unit stays open after its pass, or was gathered ahead and not discarded",
            )

"""Observers: what a situation shows beside values.

    form         kind, dtype, shape and placements of parameters and gradients after the program
    afterwards   an ordinary step before and after the program sends the same

`afterwards` needs no model of the traffic. Whatever the program was, the same step must be what it
was. A flag that stays, a hook that doubles, a unit that stays open changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spec_tests.laws import traffic
from spec_tests.programs.alone import shape_of
from spec_tests.programs.on_ranks import OnRank
from spec_tests.programs.scene import Scene
from spec_tests.rig import judge
from spec_tests.rig.toys import TOYS


def ordinary_step(rank: OnRank) -> dict[str, int]:
    """Return what a step sends, in elements (rank body)."""
    with rank.ctx.recording() as recorder:
        rank.backward("80")
        rank.step()
    log = recorder.log()
    return {
        "elements gathered": traffic.gathered(log, rank.ctx.world_size),
        "elements reduced": traffic.reduced(log),
    }


def warmed_step(rank: OnRank) -> dict[str, int]:
    """Return the same of the second of two steps: the first may make what later ones use."""
    rank.rest()
    ordinary_step(rank)
    return ordinary_step(rank)


def form_of(rank: OnRank) -> dict[str, Any]:
    """Return what parameters and gradients say of themselves after a backward (rank body)."""
    rank.rest()
    rank.backward("85")
    found = {}
    for name, p in zip(rank.names, rank.held, strict=True):
        found[name] = _about(p) | {"requires_grad": p.requires_grad}
        if p.grad is not None:
            found[f"{name}.grad"] = _about(p.grad)
    return found


def _about(tensor: Any) -> dict[str, Any]:
    is_dtensor = hasattr(tensor, "placements")
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": tuple(tensor.shape),
        "placements": str(tensor.placements) if is_dtensor else "none: a plain tensor",
    }


def judge_form(ranks: Sequence[dict[str, Any]], subject: str, scene: Scene, given: str) -> None:
    """Every parameter and gradient must be what the scene says."""
    __tracebackhide__ = True
    copies = shape_of(scene, len(ranks))[0] if scene["mesh"] else 0
    sharded = "(Replicate(), Shard(dim=0))" if copies else "(Shard(dim=0),)"
    placements = sharded if subject == "fully_shard" else "none: a plain tensor"
    frozen = scene.frozen() or frozenset()
    module = TOYS[scene["toy"][0]].build(0)
    for number, (name, p) in enumerate(module.named_parameters()):
        dtype = str(scene["weights"]).removeprefix("torch.")
        wanted = {"dtype": dtype, "shape": tuple(p.shape), "placements": placements}
        of_parameter = wanted | {"requires_grad": number not in frozen}
        seen = [rank.get(name) for rank in ranks]
        judge.equal(seen, of_parameter, quantity=f"parameter {name!r} with", given=given)
        gradients = [rank.get(f"{name}.grad", wanted) for rank in ranks]
        judge.equal(gradients, wanted, quantity=f"gradient of {name!r} with", given=given)


def judge_afterwards(ranks: Sequence[Sequence[dict[str, int]]], given: str) -> None:
    """An ordinary step must send what it sent before the program."""
    __tracebackhide__ = True
    for rank, (before, after) in enumerate(ranks):
        for what, number in before.items():
            judge.holds(
                after[what] == number,
                f"rank {rank}: expected an ordinary step after these calls as before them, {what} "
                f"{number}, got {after[what]}",
                likely="a call left something behind: a flag, a hook, an open unit",
                given=given,
            )

"""Observers: what a situation shows beside values.

    form         kind, dtype, shape and placements of parameters and gradients after the program
    afterwards   an ordinary step before and after the program sends and keeps the same
    sent         (`sent.py`) no call sends more than the contract lets it

`afterwards` needs no model of the traffic. Whatever the program was, the same step must be what it
was. A flag that stays, a hook that doubles, a unit that stays open changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spec_tests.programs import sent
from spec_tests.programs.alone import SEED, shape_of
from spec_tests.programs.calls import Program
from spec_tests.programs.on_ranks import OnRank
from spec_tests.programs.pieces import Seen
from spec_tests.programs.scene import Scene
from spec_tests.rig import judge
from spec_tests.rig.judge.oracle import parameters
from spec_tests.rig.toys import TOYS


def ordinary_step(rank: OnRank) -> dict[str, Any]:
    """Return what a step sends (rank body)."""
    with rank.ctx.recording() as recorder:
        rank.backward("80")
        rank.step()
    return sent.counted(recorder.log(), rank.ctx.world_size)


def warmed_step(rank: OnRank, seen: Seen = ()) -> dict[str, Any]:
    """Return the same of the second of two steps, and what is held then.

    The first step may make what later ones use. What calls have shown is ours. Nothing is weighed
    where ranks share a process.
    """
    rank.rest()
    ordinary_step(rank)
    found = ordinary_step(rank)
    found["bytes held"] = sent.held_bytes(seen) if rank.ctx.owns_process else 0
    rank.rest()
    return found


def form_of(rank: OnRank, program: Program) -> dict[str, Any]:
    """Return what parameters and gradients say of themselves after a backward (rank body)."""
    if any(name != "backward" for name, *_ in program):  # backwards alone leave nothing unsharded
        rank.rest()
    rank.backward("85")
    found = {"output": _about(rank.output("86"))}
    found |= {name: _about(buffer) for name, buffer in rank.module.named_buffers()}
    for name, p in rank.named():
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
    policy, weights = scene["precision"], scene["weights"]
    dtype = policy.get("output_dtype") or policy.get("param_dtype", weights)
    said = [rank["output"]["dtype"] for rank in ranks]
    judge.equal(said, str(dtype).removeprefix("torch."), quantity="output of dtype", given=given)
    if scene["buffers"]:
        dtypes = [rank["seen"]["dtype"] for rank in ranks]
        dtype = "int64" if scene["buffers"] == "integers" else "float32"
        judge.equal(dtypes, dtype, quantity="buffer of dtype", given=given)
    module = TOYS[scene["toy"][0]].build(0)
    for number, (name, p) in enumerate(module.named_parameters()):
        dtype = str(scene.weights or p.dtype).removeprefix("torch.")
        is_plain = number in scene["ignored"]
        where = "none: a plain tensor" if is_plain else placements
        wanted = {"dtype": dtype, "shape": tuple(p.shape), "placements": where}
        of_parameter = wanted | {"requires_grad": number not in frozen}
        seen = [rank.get(name) for rank in ranks]
        judge.equal(seen, of_parameter, quantity=f"parameter {name!r} with", given=given)
        gradients = [rank.get(f"{name}.grad", wanted) for rank in ranks]
        judge.equal(gradients, wanted, quantity=f"gradient of {name!r} with", given=given)


def judge_afterwards(ranks: Sequence[Sequence[dict[str, Any]]], toy: str, given: str) -> None:
    """An ordinary step must send what it sent before the program, and keep no copy more."""
    __tracebackhide__ = True
    values = parameters(toy, SEED).values()
    flags = sent.FLAG * len(ranks) * len(values)
    # torch itself keeps some small tensors that inference and dispatch modes have seen.
    copy = sum(8 * value.numel() for value in values)
    allowed = {"bytes gathered": flags, "bytes reduced": flags, "bytes held": copy}
    for rank, (before, after) in enumerate(ranks):
        for what, more in allowed.items():
            number = before[what]
            is_same = after[what] <= number + more
            if what != "bytes held":
                is_same = is_same and after[what] >= number - more
            judge.holds(
                is_same,
                f"rank {rank}: expected an ordinary step after these calls as before them, {what} "
                f"{number}, got {after[what]}",
                likely="a call left something behind: a flag, a hook, an open unit",
                given=given,
            )

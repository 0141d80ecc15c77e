"""The law: in any scene, a program does on the ranks what it does in one process.

    same_as_alone(world, subject, "held two: backward 0, step, evaluate 9")

A situation is a scene and a program in one line: what a clause says, what a failure prints as
`given:`, what `trainspec explore --only` takes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from spec_tests.programs import look, sent, shown, trained
from spec_tests.programs.alone import SEED, Alone
from spec_tests.programs.calls import Program, after, parsed, spelled
from spec_tests.programs.faults import FAULTS, RIGHT
from spec_tests.programs.laws import refusal
from spec_tests.programs.pieces import put_together
from spec_tests.programs.scene import OPTIMIZER, REPLICAS, SHARDS, TRAINERS, Scene
from spec_tests.programs.stepped import Divided, Stepped
from spec_tests.programs.ways import WAYS
from spec_tests.rig import judge
from spec_tests.rig.judge.oracle import Gradients, once, parameters, zeros_for_none
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import rounding
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import World

ORDINARY = {"sharded_optimizer": "even: deal 0 all, update"} | dict.fromkeys(
    TRAINERS, "even: train 0, train 1"
)
"""What no implementation may refuse, by function; a step of training for all others."""

CLIPPED = rounding(torch.float32, terms=256)
"""Of a norm, and of what is divided by it."""


def read(situation: str) -> tuple[Scene, Program]:
    """Return scene and program of a line; without a colon it is a program in the ordinary scene."""
    scene, colon, program = situation.rpartition(":")
    return Scene.of(scene if colon else ""), parsed(program)


def written(scene: Scene, program: Program) -> str:
    """Return the line that `read` reads."""
    return f"{scene}: {spelled(program)}".removeprefix(": ")


def follow(
    ctx: Context, subject: str, situation: str, looks: bool = False, folder: str = ""
) -> Any:
    """Return what each call shows, and what observers see (rank body).

    Args:
        folder: where a trainer may save.
    """
    scene, program = read(situation)
    if subject in TRAINERS:
        return trained.follow(ctx, subject, scene, program, folder)
    if subject in OPTIMIZER:
        return {"seen": Divided(ctx, scene).follow(program)}
    rank = WAYS[subject](ctx, subject, scene)
    before = look.warmed_step(rank) if looks else None  # two steps: the signs are back
    sends = sent.Sent(rank)
    seen = rank.follow(program, *[sends.watching] * looks)
    return {
        "seen": seen,
        "sent": sends.calls,
        "afterwards": (before, look.warmed_step(rank, seen)) if looks else None,
        "form": look.form_of(rank) if looks else None,
    }


def same_as_alone(world: World, subject: str, situation: str, *, looks: bool = False) -> None:
    """Every rank must see what one process sees, call by call; or refuse what may be refused.

    Args:
        looks: let the observers of `look` judge as well.

    Raises:
        ValueError: The situation is not legal for this function and number of ranks.
    """
    __tracebackhide__ = True
    scene, program = read(situation)
    left = after(program, scene, subject, world.size)
    if left is None or not scene.exists(subject, world.size):
        raise ValueError(f"{situation!r} is no situation of {subject} on {world.size} ranks")
    situation = written(scene, program)
    judge.SITUATION.get().given = situation
    with tempfile.TemporaryDirectory(prefix="trainspec-") as folder:
        asked = (follow, subject, situation, looks, folder)
        if left.may_refuse or scene.may_be_refused_by(subject):
            usual = ORDINARY.get(subject, "even: backward 0, step, evaluate 1")
            ordinary = (follow, subject, usual)
            ranks = refusal.answer_or_refusal(world, *asked, ordinary=ordinary)
        else:
            ranks = world.run(*asked)
    if ranks is None:
        return
    if subject in TRAINERS:
        trained.judge_trained(ranks, scene, program, situation)
        return
    if subject in OPTIMIZER:
        judge_updates([rank["seen"] for rank in ranks], situation)
        return
    judge_values(put_together([rank["seen"] for rank in ranks]), subject, situation)
    if looks:
        sent.judge_calls([rank["sent"] for rank in ranks], subject, scene, program)
        if subject in SHARDS:
            shown.judge_calls([rank["sent"] for rank in ranks], scene, program)
        steps = [rank["afterwards"] for rank in ranks]
        look.judge_afterwards(steps, scene["toy"][0], situation)
        frozen = scene.frozen() or frozenset()
        sent.judge_step([after for _, after in steps], subject, scene, frozen)
    if looks and subject != "fsdp":  # which says nothing about how parameters are represented
        look.judge_form([rank["form"] for rank in ranks], subject, scene, situation)


def judge_values(ranks: Sequence[Any], subject: str, situation: str) -> None:
    """Every rank must have seen what one process sees, call by call.

    Args:
        ranks: what each call showed on each rank.
    """
    __tracebackhide__ = True
    scene, program = read(situation)
    size, like = len(ranks), parameters(scene["toy"][0], SEED)
    # Of a whole model a gradient is read from an update, where its absence is zero.
    is_replicated = subject in REPLICAS
    absent_is_zero = subject == "fsdp" or ("zero_grad", "zero") in program

    def world_of(fault: str = "") -> list[Any]:
        def compute() -> list[Any]:
            given = (FAULTS[fault] if fault else RIGHT,)
            return [
                Alone(scene, size, rank, *given, is_replicated=is_replicated).follow(program)
                for rank in range(size)
            ]

        return once(("situation", situation, size, is_replicated, fault), compute)

    def at(number: int, fault: str = "") -> list[Any]:
        return [comparable(rank[number][1]) for rank in world_of(fault)]

    def comparable(found: Gradients) -> Gradients:
        known = zeros_for_none(found, like) if absent_is_zero else found
        return {name: None if t is None else t.double() for name, t in known.items()}

    within = None
    if subject != "fully_shard" and size & (size - 1):
        # A mean that is reduced again with what was added to it is divided by three once more, and
        # may cancel what is larger than itself. A fault is a third of an integer at least.
        within = rounding(scene["weights"], terms=16, depth=8 + 4 * len(program))
    for number, (call, _) in enumerate(world_of()[0]):
        judge.tensors(
            [comparable(rank[number][1]) for rank in ranks],
            at(number),
            within=CLIPPED if call.startswith("clip") else within,
            quantity=f"value of one process at call {number + 1}, {call}",
            hints=[Hint(fault.means, partial(at, number, name)) for name, fault in FAULTS.items()],
            given=situation,
        )


def judge_updates(ranks: Sequence[Any], situation: str) -> None:
    """After each call every rank must hold the weights that the plain optimizer gives."""
    __tracebackhide__ = True
    scene, program = read(situation)
    alone = once(("stepped", situation), lambda: Stepped(scene).follow(program))
    never = once(("never", situation), lambda: Stepped(scene).weights())
    before = never
    for number, (call, weights) in enumerate(alone):
        judge.tensors(
            [rank[number][1] for rank in ranks],
            weights,
            within=rounding(scene["weights"], terms=8, depth=len(program)),
            quantity=f"weight of the plain optimizer at call {number + 1}, {call}",
            hints=[
                Hint("the weight before this call: nobody updated it, or it never arrived", before),
                Hint("the initial weight: it was never updated", never),
            ],
            given=situation,
        )
        before = weights


def situations(lines: Mapping[str, str]) -> Any:
    """Parametrise a clause by situations, each with the name of its case."""
    return pytest.mark.parametrize("situation", [*lines.values()], ids=[*lines])

"""The law: in any scene, a program does on the ranks what it does in one process.

    same_as_alone(world, subject, "held two: backward 0, step, evaluate 9")

A situation is a scene and a program in one line: what a clause says, what a failure prints as
`given:`, what `trainspec explore --only` takes.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from spec_tests.programs import look, sent, stepped, trained
from spec_tests.programs.alone import SEED, Alone
from spec_tests.programs.calls import VERBS, Program, State, after, parsed, spelled
from spec_tests.programs.faults import FAULTS, RIGHT
from spec_tests.programs.laws import refusal
from spec_tests.programs.pieces import put_together
from spec_tests.programs.scene import AXES, AXIS_OF, OPTIMIZER, REPLICAS, SHARDS, TRAINERS, Scene
from spec_tests.programs.stepped import ADDED, Divided, Stepped
from spec_tests.programs.ways import WAYS
from spec_tests.programs.words import MEANS, SETTINGS
from spec_tests.rig import judge
from spec_tests.rig.judge.oracle import Gradients, Named, once, parameters, zeros_for_none
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import Tolerance, exact, rounding
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import World
from spec_tests.rig.toys import TOYS

LOOKS = ("sent", "afterwards", "form")
"""The observers, see `look`."""
SENT = {"sent", "silent"}
"""Observers of what calls send: how much, which `production` bounds, or only whether they may."""
TURNED = (
    "an update, a write or a load was left out, did not reach the weights that are read, or came "
    "twice: each turns the sign"
)
RATIOS = ("summed", "divided-twice")
"""Faults that are known by the ratio of what is seen to what is right."""
EXACT = ("sgd", "momentum", "counts-steps", "counts-later")
"""Optimizers whose factors are powers of two: each operation is the same, however it is divided."""
SHOWS = (
    dict.fromkeys(
        ("evaluate", "evaluate_apart", "infer", "aside", "record"), "output of one process"
    )
    | dict.fromkeys(("step", "step_one", "load", "unshard", "wait"), "weight of one process")
    | dict.fromkeys(("local", "directly"), "local sum of gradients")
    | {"clip": "norm and clipped gradient of one process"}
)
"""What a call shows; all others show the mean gradient."""
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


def in_words(situation: str) -> str:
    """Return a situation for a reader who does not know the language of situations."""
    scene, program = read(situation)
    called = dict.fromkeys(name for name, *_ in program)
    means = {key.split()[0]: f"{key}: {words}" for key, words in MEANS.items()}
    said = [_setting(word) for word in str(scene).split()]
    return "; ".join([*said, *(means[name] for name in called)])


def _setting(word: str) -> str:
    """Return a scene's word and its meaning; a toy's is the first line of its class's docstring."""
    axis, means = AXIS_OF[word], SETTINGS.get(word)
    if means is None and axis == "toy":
        model: Any = TOYS[AXES[axis][word].value[0]].model
        means = str(getattr(model, "func", model).__doc__).partition("\n")[0].rstrip(".").lower()
    return f"{word}: {means}" if means else f"{axis} {word}"


def follow(
    ctx: Context, subject: str, situation: str, looks: Collection[str] = (), folder: str = ""
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
    # Of two steps each: the signs are back.
    before = look.warmed_step(rank) if "afterwards" in looks else None
    sends = sent.Sent(rank)
    seen = rank.follow(program, *[sends.watching] * bool(SENT & {*looks}))
    return {
        "seen": seen,
        "sent": sends.calls,
        "afterwards": before and (before, look.warmed_step(rank, seen)),
        "form": look.form_of(rank, program) if "form" in looks else None,
    }


def is_legal(scene: Scene, program: Program, subject: str, size: int) -> bool:
    """Return whether the contract says what a function does in a situation on so many ranks."""
    return scene.exists(subject, size) and after(program, scene, subject, size) is not None


def legal(situation: str, subject: str, size: int) -> tuple[Scene, Program, State]:
    """Return scene and program of a line, and the state that the program leaves.

    Raises:
        ValueError: The function has no such situation on so many ranks.
    """
    scene, program = read(situation)
    words = f"{situation!r} is no situation of {subject} on {size} ranks"
    if not scene.exists(subject, size):
        raise ValueError(f"{words}: its words do not exist together there, see `scene.py`")
    for number, (name, *_) in enumerate(program, 1):
        if after(program[:number], scene, subject, size) is None:
            of = VERBS[name].of
            why = "the contract does not say what it does there"
            why = why if subject in of else f"it is a call of {', '.join(of)} alone"
            raise ValueError(f"{words}: call {number} is {name!r}, and {why}; see `calls.py`")
    left = after(program, scene, subject, size)
    assert left is not None
    return scene, program, left


def same_as_alone(
    world: World,
    subject: str,
    situation: str,
    *,
    looks: bool | Collection[str] = (),
    values: bool = True,
    given: str = "",
) -> None:
    """Every rank must see what one process sees, call by call; or refuse what may be refused.

    Args:
        looks: which of `LOOKS` and `SENT` judge as well; True for all of `LOOKS`.
        values: whether values judge; a clause on traffic does not fail for wrong ones. Of a
            trainer: whether the losses of evaluations judge; weights always do.
        given: what else is given, for messages.

    Raises:
        ValueError: The situation is not legal for this function and number of ranks.
    """
    __tracebackhide__ = True
    looks = LOOKS if looks is True else looks or ()
    scene, program, left = legal(situation, subject, world.size)
    situation = written(scene, program)
    judge.SITUATION.get().given = ", ".join(filter(None, (situation, given)))
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
        trained.judge_trained(ranks, scene, program, situation, losses=values)
        return
    if subject in OPTIMIZER:
        judge_updates([rank["seen"] for rank in ranks], situation)
        return
    if values:
        judge_values(put_together([rank["seen"] for rank in ranks]), subject, situation)
    _judge_looks(ranks, looks, subject, scene, program)


def _judge_looks(
    ranks: Sequence[Any], looks: Collection[str], subject: str, scene: Scene, program: Program
) -> None:
    __tracebackhide__ = True
    situation = written(scene, program)
    if SENT & {*looks}:
        calls = [rank["sent"] for rank in ranks]
        sent.judge_calls(calls, subject, scene, program, amounts="sent" in looks)
        if subject in SHARDS:
            sent.judge_shown(calls, scene, program)
    if "afterwards" in looks:
        steps = [rank["afterwards"] for rank in ranks]
        look.judge_afterwards(steps, scene["toy"][0], situation)
        frozen = scene.frozen() or frozenset()
        sent.judge_step([after for _, after in steps], subject, scene, frozen)
    # A whole model leaves open how parameters are represented.
    if "form" in looks and subject != "fsdp":
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
        given = FAULTS[fault] if fault else RIGHT, is_replicated
        return once(
            ("situation", situation, size, is_replicated, fault),
            lambda: [Alone(scene, size, n, *given).follow(program) for n in range(size)],
        )

    def at(number: int, fault: str = "") -> list[Any]:
        return [comparable(rank[number][1]) for rank in world_of(fault)]

    def comparable(found: Gradients) -> Gradients:
        known = zeros_for_none(found, like) if absent_is_zero else found
        return {name: None if t is None else t.double() for name, t in known.items()}

    within = None
    is_odd = size & (size - 1)
    if subject != "fully_shard" and is_odd and _reduces_again(program, scene, subject, size):
        # A mean that is reduced again with what was added to it is divided by three once more, and
        # may cancel what is larger than itself. A fault is a third of an integer at least.
        within = rounding(scene["weights"], terms=16, depth=8 + 4 * len(program))
        within = within.plus(0.0, f"a mean over {size} ranks, which rounds, is reduced again")
    calls = world_of()[0]
    gradient = "mean gradient" + " of its group" * bool(scene["group"])
    for number, (call, _) in enumerate(calls):
        turned = Hint(TURNED, partial(_turned, partial(at, number)))
        place = f" at call {number + 1}, {call}" if calls[1:] else ""
        judge.tensors(
            [comparable(rank[number][1]) for rank in ranks],
            at(number),
            within=CLIPPED if call.startswith("clip") else within,
            quantity=SHOWS.get(call.split()[0], gradient) + place,
            hints=[turned] * call.startswith(("step", "load"))
            + [
                Hint(fault.means, partial(at, number, name))
                for name, fault in FAULTS.items()
                if name not in RATIOS
            ],
            given=judge.SITUATION.get().given or situation,
        )


def _turned(shows: Callable[[], list[Any]]) -> list[Any]:
    return [{name: None if t is None else -t for name, t in rank.items()} for rank in shows()]


def _reduces_again(program: Program, scene: Scene, subject: str, size: int) -> bool:
    """Return whether a mean may be reduced once more, with what was added to it."""
    states = [after(program[:number], scene, subject, size) for number in range(len(program) + 1)]
    added = ((a, b.shares - a.shares) for a, b in itertools.pairwise(states) if a and b)
    return any(more > 1 or (more and a.is_reduced) for a, more in added)


def judge_updates(
    ranks: Sequence[Any], situation: str, wrong: dict[str, Callable[[], Any]] | None = None
) -> None:
    """After each call every rank must hold the weights that the plain optimizer gives.

    Args:
        wrong: what a mistake means, and what it shows at each call.
    """
    __tracebackhide__ = True
    scene, program = read(situation)

    def alone(fault: str = "") -> Any:
        return once(("stepped", situation, fault), lambda: Stepped(scene, fault).follow(program))

    faults: dict[str, Callable[[], Any]] = dict(wrong or {})
    for name, means in stepped.FAULTS.items():
        faults.setdefault(means, partial(alone, name))
    never = once(("never", situation), lambda: Stepped(scene).weights())
    before = never

    def at(shows: Callable[[], Any], number: int) -> Named:
        return shows()[number][1]  # type: ignore[no-any-return]  # what a call shows

    for number, (call, weights) in enumerate(alone()):
        for dtype in dict.fromkeys(value.dtype for value in weights.values()):
            names = [name for name, value in weights.items() if value.dtype == dtype]
            judge.tensors(
                [{n: t for n, t in rank[number][1].items() if n in names} for rank in ranks],
                {name: weights[name] for name in names},
                within=within_steps(scene, dtype, len(program)),
                quantity=("rate" if call == "save" else "weight")
                + f" of the plain optimizer at call {number + 1}, {call}",
                hints=[
                    Hint(
                        "the weight before this call: nobody updated it, or it never arrived",
                        {name: torch.full_like(weights[name], ADDED) for name in names} | before,
                    ),
                    Hint("the initial weight: it was never updated", never),
                    *(Hint(means, partial(at, shows, number)) for means, shows in faults.items()),
                ]
                * (call != "save"),
                given=judge.SITUATION.get().given or situation,
            )
        before = before if call == "save" else weights


def within_steps(scene: Scene, dtype: torch.dtype, depth: int) -> Tolerance:
    """Return how far weights may be from the plain optimizer's after so many calls."""
    if scene.word("moments") in EXACT:
        return exact()
    # A vector loop and the rest after it may round differently, and who divides moves the rest.
    return rounding(dtype, terms=8, depth=depth)


def situations(lines: Mapping[str, str]) -> Any:
    """Parametrise a clause by situations, each with the name of its case."""
    return pytest.mark.parametrize("situation", [*lines.values()], ids=[*lines])

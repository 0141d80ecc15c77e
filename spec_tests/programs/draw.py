"""The generator: scenes in which every two words meet, and a program of legal calls in each.

Faults that single clauses miss are crossings: float16 and replicas, two optimizers and a unit, an
interrupted backward and a window. They are too many to write and few enough to cover. Rows of a
covering array are scenes in which any two words of any two axes meet (Cohen et al. 1997, "The AETG
system"). In programs of 24 calls about half of all ordered pairs of calls meet.

A drawn situation is a function of its seed: a run of the suite is a function of the tree.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from spec_tests.programs import declared, law, seeds, shrink
from spec_tests.programs.calls import VERBS, Call, State, after, next_state, parsed
from spec_tests.programs.scene import (
    AXES,
    AXES_OF,
    AXIS_OF,
    MODELS,
    OPTIMIZER,
    STEPPED,
    TRAINERS,
    WHOLE,
    Scene,
)
from spec_tests.programs.words import WORDS
from spec_tests.rig import judge, strategies
from spec_tests.rig.judge import Violation
from spec_tests.rig.outcomes import LEVELS, is_within
from spec_tests.rig.ranks.errors import NotOffered, RankRaised
from spec_tests.rig.ranks.world import World

LONGEST = 24
"""Calls in a drawn program: three that must meet in order rarely do so in a short one."""

CLOSING = (
    dict.fromkeys(MODELS, "zero_grad none, backward 90, step, evaluate 91, backward 92")
    | dict.fromkeys(OPTIMIZER, "deal 90 all, update, deal 91 all, update")
    | dict.fromkeys(TRAINERS, "train 90, evaluate 91, train 92")
)
"""What shows in the end what a program has left behind."""

PARTS = 4
"""Cases of a clause at a world size; they share every second or fourth row of a covering array."""

Avoided = Callable[[str], bool]


def drawn(axis: str, subject: str, level: str) -> list[str]:
    """Return the words of an axis that the generator has for a function."""
    is_dealt = axis == "toy" and subject in OPTIMIZER + TRAINERS
    return [
        word
        for word, meant in AXES[axis].items()
        if meant.is_drawn_at(level) and not (is_dealt and word not in STEPPED)
    ]


def pairs(subject: str, size: int, level: str) -> dict[frozenset[str], None]:
    """Return every two words of two axes of a function that can meet, in a stable order."""
    words = {axis: drawn(axis, subject, level) for axis in AXES_OF[subject]}
    found: dict[frozenset[str], None] = {}
    for one, other in itertools.combinations(words, 2):
        for pair in itertools.product(words[one], words[other]):
            if any(row.exists(subject, size) for row in _completions(pair)):
                found[frozenset(pair)] = None
    return found


def _completions(words: Sequence[str]) -> Iterator[Scene]:
    """Yield the scene of these words alone, and with each toy where they name none."""
    text = " ".join(words)
    yield Scene.of(text)
    if not any(AXIS_OF[word] == "toy" for word in words):
        yield from (Scene.of(f"{text} {name}") for name in AXES["toy"])


@cache
def covering(subject: str, size: int, level: str, seed: int | None = None) -> tuple[Scene, ...]:
    """Return scenes in which every two words of a function's axes meet, chosen greedily.

    Args:
        seed: which array; None is the same as ever, in which open axes have the words that cover
            most.
    """
    chance = random.Random(seed)
    missing = pairs(subject, size, level)
    order = [*missing]
    if seed is not None:
        chance.shuffle(order)
    rows = []
    for first in order:
        if first in missing:
            row = _completed([*first], subject, size, level, missing, chance if seed else None)
            for pair in itertools.combinations(row, 2):
                missing.pop(frozenset(pair), None)
            rows.append(Scene.of(" ".join(row)))
    return tuple(rows)


def _completed(
    words: list[str],
    subject: str,
    size: int,
    level: str,
    missing: dict[frozenset[str], None],
    chance: random.Random | None,
) -> list[str]:
    """Return the words, and one for each axis that they leave open: the one that covers most."""
    row = sorted(words, key=lambda word: [*AXES].index(AXIS_OF[word]))
    for axis in AXES_OF[subject]:
        if any(AXIS_OF[word] == axis for word in row):
            continue
        open_toy = axis != "toy" and not any(AXIS_OF[word] == "toy" for word in row)
        known = [
            word
            for word in drawn(axis, subject, level)
            if open_toy or Scene.of(" ".join([*row, word])).exists(subject, size)
        ]
        if chance is not None:
            chance.shuffle(known)
        row.append(max(known, key=lambda w: sum(frozenset((w, o)) in missing for o in row)))
    return row


def situation_in(
    scene: Scene,
    subject: str,
    size: int,
    level: str,
    chance: random.Random,
    is_avoided: Avoided = lambda line: False,
) -> str:
    """Return the line of legal calls, once or twice over, and of an ordinary step that shows them.

    What is right the first time may leave something behind for the second.

    Args:
        is_avoided: whether a line is one that a declared deviation speaks of.
    """
    times = chance.choice((1, 1, 2))
    longest = LONGEST // 2 if subject in TRAINERS else LONGEST  # rounding grows by the step
    may_refuse = chance.random() < 0.5
    calls: list[Call] = []
    state = State(frozen=scene.frozen() or frozenset())
    for number in range(chance.randint(4, longest // times)):
        found = []
        for call in _calls(subject, level, number, chance):
            then = next_state(state, call, scene, subject, size)
            if then is None or (then.may_refuse and not may_refuse):
                continue
            if not is_avoided(law.written(scene, (*calls, call))):
                found += [(call, then)] * VERBS[call[0]].often
        if found:
            call, state = chance.choice(found)
            calls.append(call)
    closing, pending = parsed(CLOSING[subject]), parsed("pending" if state.waits else "")
    if state.is_left and level == LEVELS[-1]:
        pending = parsed("zero_grad none, resumed")
    for program in ((*calls * times, *pending, *closing), (*calls, *pending, *closing), closing):
        line = law.written(scene, program)
        if after(program, scene, subject, size) and not is_avoided(line):
            return line
    return law.written(scene, closing[:2])


def _calls(subject: str, level: str, number: int, chance: random.Random) -> Iterator[Call]:
    """Yield a call of each verb of a level, with words that are drawn."""
    for name, verb in VERBS.items():
        least = LEVELS[-1] if subject in verb.later else verb.level
        if subject not in verb.of or not is_within(least, level):
            continue
        words: list[str] = []
        for kind in verb.takes.split():
            if kind == "micro":
                words.append(str(number + 40 * len(words)))
            else:
                words.append(chance.choice(_words(kind, subject, level)))
        yield (name, *words)


@cache
def _words(kind: str, subject: str, level: str) -> Sequence[str]:
    return [
        word
        for word, (subjects, of) in WORDS[kind].items()
        if subject in subjects and is_within(of, level)
    ]


def judge_part(world: World, subject: str, part: int, level: str, *, looks: bool = False) -> None:
    """Every seed and every drawn situation of a part must do on the ranks what one process does.

    Args:
        part: which of `PARTS` parts of the rows of the covering array; the first has all seeds,
            which find most in a second.
        looks: let observers judge as well.
    """
    __tracebackhide__ = True
    is_avoided = declared.avoided(world.target, subject)
    lines = [
        seed.line
        for seed in (seeds.load() if part == 0 else ())
        if (seed.judges, seed.size, seed.level) == (subject, world.size, level)
    ]
    # Looks and whole models take longest: of these a case takes half as many.
    every = 4 if looks or subject in WHOLE else 2
    first = every * part + every // 2 * (world.size > 2)
    rows = covering(subject, world.size, level)[first :: every * PARTS]
    for number, row in enumerate(rows):
        if world.size > 3 and row.exists(subject, 2):
            continue  # four ranks take longer: they try what fewer cannot build
        chance = random.Random(f"{subject} {world.size} {level} {part} {number}")
        lines.append(situation_in(row, subject, world.size, level, chance, is_avoided))
    _judge(world, subject, [line for line in lines if not is_avoided(line)], looks=looks)


def _judge(world: World, subject: str, lines: Sequence[str], *, looks: bool = False) -> None:
    """Judge these situations, those left out that need what is not offered, unless all do."""
    __tracebackhide__ = True
    lacking, known = [], {seed.line for seed in seeds.load()}
    if world.transport == "sim":  # a compiler does not trace what simulates ranks
        lines = [line for line in lines if not law.read(line)[0].is_compiled]
    for line in lines:
        judge.SITUATION.get().in_words = law.in_words(line)
        try:
            law.same_as_alone(world, subject, line, looks=looks)
        except NotOffered as absent:
            lacking.append(absent)
        except (Violation, RankRaised) as failure:
            if line in known or not strategies.shrinks():
                raise
            raise _smallest(world, subject, line, failure, looks=looks) from None
    if lacking and len(lacking) == len(lines):
        raise lacking[0]
    for reason in sorted({str(absent) for absent in lacking}):
        world.notice(f"situations that need it were left out: {reason}")


def _smallest(
    world: World, subject: str, line: str, failure: Exception, *, looks: bool
) -> Exception:
    """Return how the smallest situation that was found fails, for a reader of what was drawn."""

    now = judge.SITUATION.get()
    given = {line: now.given}

    def judged(shorter: str) -> Any:
        now.in_words = law.in_words(shorter)
        try:
            law.same_as_alone(world, subject, shorter, looks=looks)
        except shrink.FAILURES as found:
            given[shorter] = now.given
            return found
        except Exception:  # not offered or not here, or another finding
            pass
        return None

    smallest, failure = shrink.smallest(
        line,
        failure,
        judged,
        subject=subject,
        size=world.size,
        is_avoided=declared.avoided(world.target, subject),
        tries=60,
        costly=2,
    )
    now.given, now.in_words = given.get(smallest, given[line]), law.in_words(smallest)
    return failure


def judge_rows(world: World, subject: str, part: int, level: str, texts: Sequence[str]) -> None:
    """Every row of a part must do on the ranks what one process does, in one of these programs.

    Rows that two ranks can build are left to `judge_part`.

    Args:
        texts: programs, which the rows take in turn.
    """
    __tracebackhide__ = True
    is_avoided = declared.avoided(world.target, subject)
    rows = [row for row in covering(subject, world.size, level) if not row.exists(subject, 2)]
    lines = []
    for number in range(part, len(rows), PARTS):
        program = parsed(texts[number // PARTS % len(texts)])
        if after(program, rows[number], subject, world.size):
            lines.append(law.written(rows[number], program))
    _judge(world, subject, [line for line in lines if not is_avoided(line)])

"""Programs: what a trainer calls, one call after another, as text.

    backward 0, accumulate 1, backward 2, step, evaluate 9

`words.MEANS` says in words what each call does. `VERBS` is the whole language: which words a call
takes, when a right trainer may make it, and which state it leaves. `Alone` and `OnRank` have a
method for each verb; what a method returns is compared. A call whose effect the contract leaves
open (a step of gradients that are not reduced) is never legal, so nothing is drawn that a right
implementation could fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from spec_tests.programs.scene import (
    DOUBLE,
    FLOAT,
    MODELS,
    OPTIMIZER,
    REPLICAS,
    SHARDS,
    TRAINERS,
    WHOLE,
    Scene,
    num_parameters,
)
from spec_tests.programs.words import BEFORE_A_FINISH, EVERY, SAVED, WORDS

Call = tuple[str, ...]
Program = tuple[Call, ...]


@dataclass(frozen=True)
class State:
    """What a trainer knows between two calls.

    Attributes:
        shares: micro-batches in the gradients; the arithmetic of a toy is exact for so many.
        is_open: gradients of single ranks wait for their reduction.
        is_begun: a reduced backward is not finished yet.
        waits: a loss exists whose backward is still to come.
        is_left: another backward raised while it waited.
        is_broken: a backward was interrupted, and nothing was cleared since.
        is_reduced: gradients were reduced since they were cleared.
        is_saved: there has been a save.
        is_zeroed: gradients were cleared to zero, and not to None, since the last step.
        frozen: numbers of the parameters that are frozen now.
        has_grown: the optimizer was given a further group.
        is_unsharded: the parameters are full ones, by hand: the model's `zero_grad` sees no shard.
        may_refuse: a call was made that may be refused, or an exception was caught: from then on an
            error is right as well.
    """

    shares: int = 0
    is_open: bool = False
    is_begun: bool = False
    waits: bool = False
    is_left: bool = False
    is_broken: bool = False
    is_reduced: bool = False
    is_saved: bool = False
    is_zeroed: bool = False
    frozen: frozenset[int] = frozenset()
    has_grown: bool = False
    is_unsharded: bool = False
    may_refuse: bool = False


When = Callable[[State], bool]


@dataclass(frozen=True)
class Verb:
    """A call.

    Attributes:
        takes: kinds of its words, see `WORDS`; "micro" is the number of a micro-batch.
        when: whether the contract says what follows, in this state.
        then: the state that it leaves.
        of: functions of the contract that have it.
        level: the level of the contract that promises it.
        often: how often it is drawn, beside the others; never if 0: seeds and clauses have it.
        refusable: functions that may refuse it with an error.
        later: functions that promise it at level "production" alone.
        sends: whether it may send more than gathers that a later pass then need not send.
        reduces: copies of the trained gradients that it may reduce, one for each forward or
            backward; None where that is not said.
        ends: the pass that it ends, "backward" or "forward"; "open" where it is open which
            parameters are shown in full afterwards.
        records: whether it has a forward that records a graph.
    """

    takes: str = ""
    when: When = lambda s: True
    then: Callable[[State], State] = lambda s: s
    of: tuple[str, ...] = MODELS
    level: str = "correct"
    often: int = 1
    refusable: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    sends: bool = True
    reduces: int | None = None
    ends: str = ""
    records: bool = False


def _is_whole(s: State) -> bool:
    """No backward was interrupted since gradients were last cleared."""
    return not s.is_broken


def _rests(s: State) -> bool:
    """Nothing waits: an optimizer may step, a state may be saved."""
    return not (s.is_open or s.waits or s.is_broken)


def _adds(number: int, **changes: Any) -> Callable[[State], State]:
    opens = changes.get("is_open", False)
    return lambda s: replace(
        s,
        **{
            "shares": s.shares + number,
            "is_open": False,
            "is_reduced": s.is_reduced or not opens,
            **changes,
        },
    )


def _becomes(**changes: Any) -> Callable[[State], State]:
    return lambda s: replace(s, **changes)


def _cleared(s: State) -> State:
    return replace(s, shares=0, is_open=False, is_reduced=False, is_broken=False)


_TWO = "micro micro"
_WAITS = _adds(1, is_open=True)
_RESTS = partial(Verb, when=_rests)
_BACKWARD = partial(Verb, takes="micro", when=_is_whole, ends="backward", records=True)
_FORWARD = partial(Verb, takes="micro", reduces=0, ends="forward")
_OF_TRAINERS = partial(Verb, of=TRAINERS, level="production")
_UPDATES = partial(_RESTS, then=lambda s: replace(_cleared(s), is_zeroed=False), sends=False)
_CHANGES_WHAT_TRAINS = _RESTS(
    takes="number",
    of=SHARDS + WHOLE + OPTIMIZER + TRAINERS,
    refusable=WHOLE + TRAINERS,
    later=WHOLE + TRAINERS,
    sends=False,
)

VERBS: dict[str, Verb] = {
    "backward": _BACKWARD(then=_adds(1), often=4, reduces=1),
    "both": _BACKWARD(takes=_TWO, then=_adds(2), reduces=2),
    "twice": _BACKWARD(then=_adds(2), refusable=MODELS, reduces=2),
    "several": _BACKWARD(
        takes=_TWO, then=_adds(2), of=REPLICAS + WHOLE, refusable=REPLICAS + WHOLE, reduces=2
    ),
    "begun": _BACKWARD(then=_adds(1, is_begun=True), of=REPLICAS, often=0, reduces=1),
    "accumulate": _BACKWARD(then=_WAITS, of=REPLICAS + SHARDS, often=2, reduces=0),
    "locally": _BACKWARD(
        then=_WAITS, of=WHOLE, level="production", refusable=WHOLE, reduces=0, records=False
    ),
    "beside": _BACKWARD(then=_adds(1), often=0),
    "amid": _BACKWARD(then=_adds(1), of=REPLICAS + SHARDS, often=0, reduces=1),
    "prepared": _BACKWARD(takes=_TWO, then=_adds(2, is_open=True), of=REPLICAS, often=0, reduces=0),
    "nested": _BACKWARD(
        takes=_TWO,
        then=_adds(2, is_open=True),
        of=REPLICAS + WHOLE,
        refusable=WHOLE,
        later=WHOLE,
        reduces=0,
    ),
    # After an exception the contract speaks of the next step alone.
    "local": Verb(
        when=lambda s: s.is_open and not (s.is_reduced or s.may_refuse), of=REPLICAS, sends=False
    ),
    "early": _BACKWARD(then=_WAITS, of=SHARDS, level="production", ends="open", records=False),
    "aside": _BACKWARD(then=_WAITS, of=REPLICAS, reduces=0),
    "leave": _RESTS(of=REPLICAS + WHOLE, level="production", refusable=WHOLE),
    "partly": _BACKWARD(then=_WAITS, of=SHARDS, level="production", reduces=1),
    "directly": Verb(
        "micro",
        lambda s: _rests(s) and s.is_reduced,
        _cleared,
        of=REPLICAS,
        level="production",
        sends=False,
        records=True,
    ),
    "outermost_waits": _BACKWARD(then=_WAITS, of=SHARDS, level="production", records=False),
    "forward": _FORWARD(
        when=lambda s: _is_whole(s) and not s.waits, then=_becomes(waits=True, is_left=False)
    ),
    "pending": Verb(
        when=lambda s: s.waits and _is_whole(s),
        then=_adds(1, waits=False),
        often=4,
        reduces=1,
        ends="backward",
    ),
    "resumed": Verb(
        when=lambda s: s.is_left and _is_whole(s),
        then=_adds(1, is_left=False),
        of=SHARDS,
        level="production",
        often=4,
        reduces=1,
        ends="backward",
    ),
    # After an exception it ends a backward, or nothing is promised.
    "finish": Verb(
        when=lambda s: _rests(s) and (s.is_reduced or not s.may_refuse),
        then=_becomes(is_begun=False),
        of=REPLICAS + WHOLE,
    ),
    "step": _UPDATES(often=4),
    "step_one": _UPDATES(takes="which"),
    "zero_grad": Verb("how", then=_cleared, of=EVERY, sends=False),
    "clip": Verb("order", lambda s: _rests(s) and s.is_reduced, _cleared, of=REPLICAS + SHARDS),
    "train": Verb("micro", then=_cleared, of=TRAINERS, often=4),
    "train_of": _OF_TRAINERS("micro count", then=_cleared, refusable=TRAINERS),
    "read": _OF_TRAINERS(),
    "late": _OF_TRAINERS("rank"),
    "fails_evaluating": _OF_TRAINERS("micro", then=_becomes(may_refuse=True)),
    "evaluate": _FORWARD(of=MODELS + TRAINERS),
    "infer": _FORWARD(reduces=None),
    "evaluate_apart": _FORWARD(often=0),
    "record": _FORWARD(of=SHARDS + WHOLE, later=WHOLE),
    "fails": _FORWARD(
        takes="micro layer",
        then=_becomes(may_refuse=True),
        of=MODELS + TRAINERS,
        ends="open",
        records=True,
    ),
    "fails_backward": _BACKWARD(
        takes="micro layer",
        then=lambda s: replace(
            s, is_broken=True, may_refuse=True, waits=False, is_left=s.waits or s.is_left
        ),
        often=2,
        of=REPLICAS + SHARDS + TRAINERS,  # of a whole model nothing is promised then
        later=TRAINERS,
        ends="open",
    ),
    "keep": Verb("flag", lambda s: not (s.waits or s.is_broken), of=SHARDS, sends=False),
    "reloads": Verb("", lambda s: not (s.waits or s.is_broken), of=SHARDS, often=0, sends=False),
    "unshard": _RESTS("at_once", then=_becomes(is_unsharded=True), of=SHARDS, ends="open"),
    "reshard": _RESTS(then=_becomes(is_unsharded=False), of=SHARDS, sends=False),
    "wait": _RESTS(of=SHARDS, level="production", sends=False),
    "write": _RESTS("where", of=EVERY, sends=False),
    "freeze": _CHANGES_WHAT_TRAINS,
    "thaw": _CHANGES_WHAT_TRAINS,
    "save": _RESTS(then=_becomes(is_saved=True), of=SAVED),
    "load": Verb("assigns", lambda s: _rests(s) and s.is_saved, _cleared, of=SAVED),
    "another_steps": Verb("rank", of=EVERY + TRAINERS),
    "another_lives": Verb(of=EVERY + TRAINERS),
    "deal": Verb("micro whose", then=lambda s: replace(s, shares=1), of=OPTIMIZER, often=4),
    "update": Verb(then=_cleared, of=OPTIMIZER, often=4),
    "closure": Verb("micro does", then=_cleared, of=OPTIMIZER),
    "rate": Verb("factor", of=OPTIMIZER + TRAINERS),
    "decay": Verb(of=OPTIMIZER),
    "add_group": Verb("", lambda s: not s.has_grown, _becomes(has_grown=True), of=OPTIMIZER),
}
"""Every call."""


def parsed(text: str | Program) -> Program:
    """Return the calls of a text; a program is one already.

    Raises:
        ValueError: A call is no verb, or has other words than its verb takes.
    """
    if not isinstance(text, str):
        return text
    program = tuple(tuple(call.split()) for call in text.split(",") if call.strip())
    for name, *words in program:
        if name not in VERBS:
            raise ValueError(f"program {text!r}: {name!r} is no call; known: {', '.join(VERBS)}")
        kinds = VERBS[name].takes.split()
        if len(words) != len(kinds) or not all(map(_fits, kinds, words)):
            known = {kind: [*WORDS[kind]] for kind in kinds if kind in WORDS}
            raise ValueError(
                f"program {text!r}: expected {name!r} with {' '.join(kinds) or 'no words'}, got "
                f"{' '.join(words) or 'none'}; known: {known}"
            )
    return program


def _fits(kind: str, word: str) -> bool:
    return word.isdecimal() if kind == "micro" else word in WORDS[kind]


def spelled(program: Program) -> str:
    """Return the text of a program: what `parsed` reads."""
    return ", ".join(" ".join(call) for call in program)


def after(program: Program, scene: Scene, subject: str, size: int) -> State | None:
    """Return the state that a program leaves; None where one of its calls is not legal."""
    state: State | None = State(frozen=scene.frozen() or frozenset())
    for call in program:
        state = state and next_state(state, call, scene, subject, size)
    return state


def next_state(state: State, call: Call, scene: Scene, subject: str, size: int) -> State | None:
    """Return the state that a call leaves; None where it is not legal."""
    name, *words = call
    verb = VERBS[name]
    is_open = (
        # Ranks that use other branches are interrupted after other reductions.
        (scene["toy"][2] and name == "fails_backward")
        # The contract of replicas is silent about a forward between a forward and its backward.
        or (state.waits and subject in REPLICAS and verb.records)
        # Outside of training steps it is open whether replicas take the first rank's buffers.
        or (
            scene["buffers"]
            and subject in REPLICAS
            and name in ("evaluate", "evaluate_apart", "infer", "aside", "fails")
        )
        # Plain gradients that differ between ranks have no norm; narrow ones are rounded.
        or (name == "clip" and (scene["ignored"] or scene["weights"] not in (FLOAT, DOUBLE)))
        or (state.is_unsharded and call == ("zero_grad", "of-the-model"))
        or (state.is_begun and name not in BEFORE_A_FINISH)
    )
    if is_open or subject not in verb.of or not verb.when(state):
        return None
    if any(
        subject not in WORDS[k][w][0]
        for k, w in zip(verb.takes.split(), words, strict=True)
        if k in WORDS
    ):
        return None
    found = verb.then(state)
    if verb.ends == "backward":
        found = replace(found, is_unsharded=False)
    if verb.when is _rests:
        found = replace(found, is_left=False)  # the loss was of other weights: it is dropped
    if name == "partly" and not scene["mesh"]:
        found = replace(found, is_open=False, is_reduced=True)  # no replicas: nothing waits
    if name == "zero_grad" and words == ["zero"]:
        found = replace(found, is_zeroed=True)
    if name in ("freeze", "thaw"):
        frozen = _frozen(state.frozen, name, int(words[0]), scene)
        if frozen is None:
            return None
        found = replace(found, frozen=frozen)
    if subject in verb.refusable or _is_refusable(call, state, found, subject):
        found = replace(found, may_refuse=True)
    return found if found.shares <= scene.most(size) else None


def _frozen(frozen: frozenset[int], name: str, number: int, scene: Scene) -> frozenset[int] | None:
    """Return which parameters are frozen then; None where the call changes or leaves nothing."""
    count = num_parameters(scene["toy"][0])
    found = frozen | {number} if name == "freeze" else frozen - {number}
    return found if found != frozen and len(found) < count and number < count else None


def _is_refusable(call: Call, state: State, found: State, subject: str) -> bool:
    """Whether the contract lists this call, in this state, under "May be refused"."""
    adds = found.shares > state.shares
    if subject in REPLICAS:  # two-finishes
        return adds and state.is_reduced and not found.is_open
    if subject in WHOLE:  # adds-up, zeroed; reused: two forwards call each layer
        # Of shards beside plain tensors foreach optimizers cannot clear to zero.
        return (
            call[0] == "both"
            or call == ("zero_grad", "zero")
            or (adds and (state.shares > 0 or state.is_zeroed))
            or (state.waits and VERBS[call[0]].records)
        )
    if subject in SHARDS:  # backward-after-clear
        return call == ("zero_grad", "of-the-model") and state.waits
    return call == ("zero_grad", "zero")  # zero-grad-zeros

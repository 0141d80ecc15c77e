"""State: stop after any batch, go on in another process, and no token is lost or read again.

A loader whose state is one integer over the global order resumes exactly and at any world size;
one that saves its own rank's position, or what it has prefetched, does neither. The state of a run
is only as good as that of its loader.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_tests.chapters.data import reading
from spec_tests.programs.laws import refusal, stream
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=reading.LOADER, level="correct", worlds=(1,))

HERE = reading.Layout((61, 4, 50, 37), sequence_length=4, batch_size=2, world_size=2)
SMALL = reading.Layout((61, 50), sequence_length=4, batch_size=2)


@contextlib.contextmanager
def files_for_state(ctx, layout):
    """The layout's shards. Asked first, of one long shard: a loader without a state is not offered.

    Raises:
        AttributeError: the loader lacks one of the two methods.
    """
    with reading.files_of(ctx, layout.lengths) as paths, reading.files_of(ctx, (200,)) as long:
        operator.attrgetter("state_dict", "load_state_dict")(reading.open_loader(ctx, long, layout))
        yield paths


def played(ctx, script, layout, after=None):
    """What a script of loaders reads: "take 3, state | load, take all".

    A bar begins new loaders, one per rank, from then on of the layout `after`. `take` reads from
    a new `iter`, `more` from the last one. `state` keeps a state, `look` asks for one and drops it.
    `load` hands over the state that was kept last, of this loader or before the bar.

    Returns:
        Uninterrupted passes of both layouts by rank, what was read first, and after the last bar.
    """
    after = after or layout
    phases = [phase.split(", ") for phase in script.split(" | ")]
    with files_for_state(ctx, layout) as paths:
        begun, whole = (
            [reading.whole_pass(ctx, paths, cut, rank) for rank in range(cut.world_size)]
            for cut in (layout, after)
        )
        read, states = [], [None]
        for number, phase in enumerate(phases):
            cut = after if number else layout
            loaders = [reading.open_loader(ctx, paths, cut, rank) for rank in range(cut.world_size)]
            ends = [
                _played(loader, phase, states[rank % len(states)], cut.limit)
                for rank, loader in enumerate(loaders)
            ]
            states = [state for _, state in ends]
            read.append([takes for takes, _ in ends])
    before = [takes[0] for takes in read[0]]
    return {"begun": begun, "whole": whole, "before": before, "read": read[-1]}


def _played(loader, phase, state, limit):
    takes, batches = [], iter(())
    for word, _, number in (each.partition(" ") for each in phase):
        if word == "take":
            del batches  # one at a time; the last is alive while a state is taken, as in training
            batches = iter(loader)
        if word in ("take", "more"):
            takes.append(reading.take(batches, limit if number == "all" else int(number)))
        elif word == "load":
            loader.load_state_dict(state)
        else:
            found = loader.state_dict()
            state = found if word == "state" else state
    return takes, state


def goes_on(world, script, *starts, layout=SMALL, after=None):
    """After the last bar each take must hold a rank's own whole pass, from these batches on.

    Args:
        starts: one per take; None is not judged.
    """
    __tracebackhide__ = True
    [found] = world.run(played, script, layout, after)
    told = f"{layout}, {script}" + (f", gone on with {after}" if after else "")
    first, last = script.split(" | ")[0], script.split(" | ")[-1]
    begun = [batches[: _counts(first)[0]] for batches in found["begun"]]
    stream.same(found["before"], begun, given=told)
    for number, (start, count) in enumerate(zip(starts, _counts(last), strict=True)):
        if start is not None:
            wholes = [batches[: count and start + count] for batches in found["whole"]]
            seen = [takes[number] for takes in found["read"]]
            given = f"{told}; read number {number + 1} after the last bar"
            limit = (after or layout).limit
            stream.goes_on(seen, wholes, start, limit=limit, given=given)


def _counts(phase):
    """How many batches each take of a phase reads; None for all."""
    takes = [each[5:] for each in phase.split(", ") if each.startswith("take ")]
    return [None if count == "all" else int(count) for count in takes]


def resumes(world, layout, taken, after=None):
    """A pass that was stopped goes on with the next batch, and the pass after it is whole."""
    __tracebackhide__ = True
    script = f"take {taken}, state | load, take all, take all"
    goes_on(world, script, taken, 0, layout=layout, after=after)


@clause(
    "data.state.resumes-exactly",
    source="contract: resumes; nanoGPT issue 467: resuming repeats the seed's batches",
)
@given(taken=st.integers(0, 8), size=st.integers(1, 3))
def test_a_stopped_pass_goes_on_with_the_next_batch(world, subject, taken, size):
    """A new loader given the state MUST go on with the next batch: none lost, none read again."""
    resumes(world, reading.Layout(HERE.lengths, 4, 1, size), taken)


@clause(
    "data.state.at-any-place",
    source="contract: resumes, no-batch; "
    "restart at the shard's start, as loaders with a file index do",
)
@given(layout=reading.layouts(), share=st.integers(0, 100))
def test_any_layout_can_be_stopped_anywhere(world, subject, layout, share):
    """Whatever the shards, T, B and W, a pass stopped anywhere MUST go on exactly there."""
    if number := len(layout.expected()[0]):
        resumes(world, layout, number * share // 100)


@clause(
    "data.state.another-world-size",
    source="contract: any-world-size; torchtitan issues 811 and 816",
)
@pytest.mark.parametrize("cut", ["2x2", "4x1", "1x4"])
@given(taken=st.integers(0, 8), size=st.sampled_from([1, 2, 4]))
def test_a_run_goes_on_at_another_world_size(world, subject, cut, taken, size):
    """With the same W * B, a state MUST be valid at any world size.

    The machine that comes back has fewer devices. State per rank dies there, or repeats the data of
    some ranks and loses that of others.
    """
    world_size, batch_size = map(int, cut.split("x"))
    before = reading.Layout(HERE.lengths, 4, batch_size, world_size)
    resumes(world, before, taken, after=reading.Layout(HERE.lengths, 4, 4 // size, size))


@clause(
    "data.state.counts-what-was-yielded",
    source="contract: state-counts; StatefulDataLoader's snapshots are made for this",
)
@pytest.mark.parametrize("taken", [0, 1], ids=["none", "one"])
def test_what_was_only_prefetched_is_not_counted(world, subject, taken):
    """The state MUST count batches that were yielded: neither `iter` nor a prefetch moves it."""
    resumes(world, HERE, taken)


@clause("data.state.at-the-end", source="contract: state-at-end; accelerate issue 2016")
@pytest.mark.parametrize("how", ["last-batch-read", "pass-ended"])
def test_a_state_from_the_end_has_nothing_left(world, subject, how):
    """From a state taken at the end the next pass MUST be empty, and the one after it whole."""
    number = len(world.run(played, "take all", HERE)[0]["begun"][0])
    if number < HERE.limit:  # a pass without an end has no state there
        taken = "all" if how == "pass-ended" else number
        goes_on(world, f"take {taken}, state | load, take all, take all", number, 0, layout=HERE)


@clause(
    "data.state.of-a-resumed-pass",
    source="contract: state-counts; "
    "accelerate issue 2859: batches skipped on resuming are not counted again",
)
@given(first=st.integers(0, 5), second=st.integers(0, 5))
def test_a_resumed_pass_can_be_stopped_again(world, subject, first, second):
    """The state of a resumed pass MUST count from the start of the data, not from the stop."""
    script = f"take {first}, state | load, take {second}, state | load, take all"
    goes_on(world, script, first + second)


@clause(
    "data.state.is-a-snapshot",
    source="contract: state-snapshot; "
    "a state dict that holds the live counter is that of the end by the time it is written",
)
@pytest.mark.parametrize(
    "script",
    [
        "take 2, state, more all, look | load, take all",
        "take 2, state | load, take 3 | load, take all",
    ],
    ids=["taken", "loaded"],
)
def test_a_state_does_not_change_once_it_is_taken(world, subject, script):
    """A state MUST stay that of the moment at which it was taken, also once it is loaded."""
    goes_on(world, script, 2)


@clause(
    "data.state.of-what-was-loaded", source="contract: state-loaded; a save right after a restore"
)
@pytest.mark.parametrize(
    "script",
    [
        "take 1, state | take 3, load, state | load, take all",
        "take 1, state | look, load, take all",
    ],
    ids=["read", "state"],
)
def test_the_state_after_a_load_is_what_was_loaded(world, subject, script):
    """Until the next `iter` a loader's state MUST be the one that it was given.

    Whatever was done before: asking for the state must not make an iterator that the load does not
    reach (torchdata pull request 1548).
    """
    goes_on(world, script, 1)


def off_the_grid(ctx, layout, wider):
    """The error of going on at a place that is between two batches of the wider layout."""
    with files_for_state(ctx, layout) as paths:
        first = reading.open_loader(ctx, paths, layout)
        batches = iter(first)
        reading.take(batches, 1)
        state = first.state_dict()
        loader = reading.open_loader(ctx, paths, wider)
        with refusal.caught() as caught:
            loader.load_state_dict(state)
            reading.take(loader, 1)
    return caught["error"]


@clause(
    "data.state.off-the-grid",
    level="production",
    source="contract: off-grid; a run that goes on with a larger batch",
)
def test_a_place_between_two_batches_is_refused(world, subject):
    """A state that lies between two batches of another W*B MUST be refused with an error."""
    wider = dataclasses.replace(SMALL, batch_size=4)
    [error] = world.run(off_the_grid, SMALL, wider)

    judge.holds(
        bool(error),
        "expected an error for a state of 2 sequences where W*B is 4, got batches",
        likely="batches are counted and not sequences, or nobody compares",
    )


def as_json(ctx, layout):
    """Bytes of a state as JSON, and whether it is the same after that; 0 if it has no such form."""
    with files_for_state(ctx, layout) as paths:
        loader = reading.open_loader(ctx, paths, layout)
        batches = iter(loader)
        reading.take(batches, 2)
        state = loader.state_dict()
        with contextlib.suppress(TypeError, ValueError):
            written = json.dumps(state)
            return len(written), json.loads(written) == state
    return 0, None


@clause(
    "data.state.is-plain-data",
    level="production",
    source="torch.load with weights_only; torchdata's tests of JSON state",
)
def test_the_state_is_plain_and_small(world, subject):
    """A state SHOULD survive JSON and be smaller than a kilobyte.

    Then it fits beside any checkpoint, and a person can read how far a run has come.
    """
    [(size, is_same)] = world.run(as_json, SMALL)

    judge.equal([is_same], True, quantity="equal after JSON:")
    judge.holds(size <= 1000, f"expected at most 1000 bytes, got {size} as JSON")


@clause("data.state.load-moves-a-used-loader", source="contract: resumes, starts-anew")
def test_a_loader_that_was_used_takes_a_state_as_well(world, subject):
    """After `load_state_dict` the next `iter` MUST go on there, and the one after it begin anew.

    Wherever the loader stood, and also if the pass that went on was left.
    """
    goes_on(world, "take 3, state, take 6, load, take 1, take 1", None, None, 3, 0)

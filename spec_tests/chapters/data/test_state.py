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

from spec_tests.chapters.data.reading import (
    LOADER,
    Layout,
    files_of,
    layouts,
    open_loader,
    take,
    whole_pass,
)
from spec_tests.programs.laws import refusal, stream
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=LOADER, level="correct", worlds=(1,))

HERE = Layout((61, 4, 50, 37), sequence_length=4, batch_size=2, world_size=2)


@contextlib.contextmanager
def files_for_state(ctx, layout):
    """The layout's shards. Asked first: a loader without a state is not offered, also if it fails.

    Raises:
        AttributeError: the loader lacks one of the two methods.
    """
    with files_of(ctx, layout.lengths) as paths:
        operator.attrgetter("state_dict", "load_state_dict")(open_loader(ctx, paths, layout))
        yield paths


def resumed(ctx, layout, taken, after=None, *, ended=False):
    """Per rank: batches up to a stop, then two passes of new loaders that were given the state.

    `begun` and `whole` are uninterrupted passes of the layout before and of the one after.

    Args:
        taken: batches read before the stop.
        after: the layout of the loaders that go on; the same if left out.
        ended: read until the pass says that it is over.
    """
    after = after or layout
    before, states, rest, anew = [], [], [], []
    with files_for_state(ctx, layout) as paths:
        begun = [whole_pass(ctx, paths, layout, rank) for rank in range(layout.world_size)]
        whole = [whole_pass(ctx, paths, after, rank) for rank in range(after.world_size)]
        for rank in range(layout.world_size):
            loader = open_loader(ctx, paths, layout, rank)
            batches = iter(loader)  # alive while the state is taken, as in a training loop
            before.append(take(batches, layout.limit if ended else taken))
            states.append(loader.state_dict())
        for rank in range(after.world_size):
            loader = open_loader(ctx, paths, after, rank)
            loader.load_state_dict(states[rank % layout.world_size])
            rest.append(take(loader, after.limit))
            anew.append(take(loader, after.limit))
    return {"begun": begun, "whole": whole, "before": before, "rest": rest, "anew": anew}


def goes_on(found, layout, taken, after=None):
    """Before the stop and after it every rank reads what its whole pass holds, then starts anew."""
    __tracebackhide__ = True
    after = after or layout
    begun, whole, limit = found["begun"], found["whole"], after.limit
    told = f"{layout}, stopped after {taken} batches"
    told += f", gone on with {after}" if after != layout else ""
    stream.same(found["before"], [batches[:taken] for batches in begun], given=told)
    stream.goes_on(found["rest"], whole, taken, limit=limit, given=f"{told}; batches since")
    stream.goes_on(found["anew"], whole, limit=limit, given=f"{told}; the pass after that")


@clause(
    "data.state.resumes-exactly",
    source="contract: resumes; nanoGPT issue 467: resuming repeats the seed's batches",
)
@given(taken=st.integers(0, 8), size=st.integers(1, 3))
def test_a_stopped_pass_goes_on_with_the_next_batch(world, subject, taken, size):
    """A new loader given the state MUST go on with the next batch: none lost, none read again."""
    layout = Layout(HERE.lengths, 4, 1, size)
    ranks = world.run(resumed, layout, taken)

    goes_on(ranks[0], layout, taken)


@clause(
    "data.state.at-any-place",
    source="contract: resumes, no-batch; "
    "restart at the shard's start, as loaders with a file index do",
)
@given(layout=layouts(), share=st.integers(0, 100))
def test_any_layout_can_be_stopped_anywhere(world, subject, layout, share):
    """Whatever the shards, T, B and W, a pass stopped anywhere MUST go on exactly there."""
    number = len(layout.expected()[0])
    if number == 0:
        return
    taken = number * share // 100
    ranks = world.run(resumed, layout, taken)

    goes_on(ranks[0], layout, taken)


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
    before = Layout(HERE.lengths, 4, batch_size, world_size)
    after = Layout(HERE.lengths, 4, 4 // size, size)
    ranks = world.run(resumed, before, taken, after)

    goes_on(ranks[0], before, taken, after)


@clause(
    "data.state.counts-what-was-yielded",
    source="contract: state-counts; StatefulDataLoader's snapshots are made for this",
)
@pytest.mark.parametrize("taken", ["none", "one"])
def test_what_was_only_prefetched_is_not_counted(world, subject, taken):
    """The state MUST count batches that were yielded: neither `iter` nor a prefetch moves it."""
    number = {"none": 0, "one": 1}[taken]
    ranks = world.run(resumed, HERE, number)

    goes_on(ranks[0], HERE, number)


@clause("data.state.at-the-end", source="contract: state-at-end; accelerate issue 2016")
@pytest.mark.parametrize("how", ["last-batch-read", "pass-ended"])
def test_a_state_from_the_end_has_nothing_left(world, subject, how):
    """From a state taken at the end the next pass MUST be empty, and the one after it whole."""
    number = len(world.run(resumed, HERE, 0)[0]["begun"][0])
    if number < HERE.limit:  # a pass without an end has no state there
        found = world.run(resumed, HERE, number, ended=how == "pass-ended")
        goes_on(found[0], HERE, number)


def twice_resumed(ctx, layout, first, second):
    """A whole pass, and what is left after stopping, going on, and stopping again."""
    with files_for_state(ctx, layout) as paths:
        whole = whole_pass(ctx, paths, layout)
        loader = open_loader(ctx, paths, layout)
        take(iter(loader), first)
        state = loader.state_dict()
        loader = open_loader(ctx, paths, layout)
        loader.load_state_dict(state)
        take(iter(loader), second)
        state = loader.state_dict()
        loader = open_loader(ctx, paths, layout)
        loader.load_state_dict(state)
        return whole, take(loader, layout.limit)


@clause(
    "data.state.of-a-resumed-pass",
    source="contract: state-counts; "
    "accelerate issue 2859: batches skipped on resuming are not counted again",
)
@given(first=st.integers(0, 5), second=st.integers(0, 5))
def test_a_resumed_pass_can_be_stopped_again(world, subject, first, second):
    """The state of a resumed pass MUST count from the start of the data, not from the stop."""
    layout = Layout((61, 50), sequence_length=4, batch_size=2)
    whole, rest = world.run(twice_resumed, layout, first, second)[0]

    given = f"{layout}, stopped after {first} batches and again after {second}"
    stream.goes_on([rest], [whole], first + second, limit=layout.limit, given=given)


def kept_state(ctx, layout):
    """What is left after a state that was taken early and used late, by way of JSON if possible."""
    with files_for_state(ctx, layout) as paths:
        whole = whole_pass(ctx, paths, layout)
        loader = open_loader(ctx, paths, layout)
        batches = iter(loader)
        take(batches, 2)
        state = loader.state_dict()
        take(batches, layout.limit)
        loader.state_dict()
        found = {"whole": whole, "json": None, "bytes": 0}
        with contextlib.suppress(TypeError, ValueError):
            written = json.dumps(state)
            found |= {"json": json.loads(written) == state, "bytes": len(written)}
        return {**found, "rest": _rest(ctx, paths, layout, state)}


def _rest(ctx, paths, layout, state):
    loader = open_loader(ctx, paths, layout)
    loader.load_state_dict(state)
    return take(loader, layout.limit)


@clause(
    "data.state.is-a-snapshot",
    source="contract: state-snapshot; "
    "a state dict that holds the live counter is that of the end by the time it is written",
)
def test_a_state_does_not_change_once_it_is_taken(world, subject):
    """A state MUST stay that of the moment at which it was taken, while the pass goes on."""
    layout = Layout((61, 50), sequence_length=4, batch_size=2)
    ranks = world.run(kept_state, layout)

    given = "state taken after 2 batches, used at the end"
    rest, whole = ranks[0]["rest"], ranks[0]["whole"]
    stream.goes_on([rest], [whole], 2, limit=layout.limit, given=given)


def loaded_late(ctx, layout, before):
    """A whole pass, and what is left after a loader that was used before it was given a state.

    Args:
        before: it was "read" from, and its state is taken again; or it was asked for its "state",
            and is read itself.
    """
    with files_for_state(ctx, layout) as paths:
        whole = whole_pass(ctx, paths, layout)
        first = open_loader(ctx, paths, layout)
        batches = iter(first)
        take(batches, 1)
        state = first.state_dict()
        used = open_loader(ctx, paths, layout)
        if before == "state":
            used.state_dict()
            used.load_state_dict(state)
            return whole, take(used, layout.limit)
        others = iter(used)
        take(others, 3)
        used.load_state_dict(state)
        return whole, _rest(ctx, paths, layout, used.state_dict())


@clause(
    "data.state.of-what-was-loaded", source="contract: state-loaded; a save right after a restore"
)
@pytest.mark.parametrize("before", ["read", "state"])
def test_the_state_after_a_load_is_what_was_loaded(world, subject, before):
    """Until the next `iter` a loader's state MUST be the one that it was given.

    Whatever was done before: asking for the state must not make an iterator that the load does not
    reach (torchdata pull request 1548).
    """
    layout = Layout((61, 50), sequence_length=4, batch_size=2)
    whole, rest = world.run(loaded_late, layout, before)[0]

    used = "3 batches were read" if before == "read" else "its state was taken"
    given = f"state of 1 batch, loaded after {used}"
    stream.goes_on([rest], [whole], 1, limit=layout.limit, given=given)


def off_the_grid(ctx, layout):
    """The error of going on at a place that is between two batches; "" if there is none."""
    with files_for_state(ctx, layout) as paths:
        first = open_loader(ctx, paths, layout)
        batches = iter(first)
        take(batches, 1)
        state = first.state_dict()
        wider = open_loader(ctx, paths, dataclasses.replace(layout, batch_size=4))
        with refusal.caught() as error:
            wider.load_state_dict(state)
            take(wider, 1)
    return error["error"]


@clause(
    "data.state.off-the-grid",
    level="production",
    source="contract: off-grid; a run that goes on with a larger batch",
)
def test_a_place_between_two_batches_is_refused(world, subject):
    """A state that lies between two batches of another W*B MUST be refused with an error."""
    ranks = world.run(off_the_grid, Layout((61, 50), sequence_length=4, batch_size=2))

    judge.holds(
        bool(ranks[0]),
        "expected an error for a state of 2 sequences where W*B is 4, got batches",
        likely="batches are counted and not sequences, or nobody compares",
    )


@clause(
    "data.state.is-plain-data",
    level="production",
    source="torch.load with weights_only; torchdata's tests of JSON state",
)
def test_the_state_is_plain_and_small(world, subject):
    """A state SHOULD survive JSON and be smaller than a kilobyte.

    Then it fits beside any checkpoint, and a person can read how far a run has come.
    """
    ranks = world.run(kept_state, Layout((61, 50), sequence_length=4, batch_size=2))

    judge.equal([rank["json"] for rank in ranks], True, quantity="equal after JSON:")
    judge.holds(
        ranks[0]["bytes"] <= 1000, f"expected at most 1000 bytes, got {ranks[0]['bytes']} as JSON"
    )


def place_of(ctx, layout, taken):
    """A whole pass, and the first batch after a load into a loader that stands elsewhere."""
    with files_for_state(ctx, layout) as paths:
        whole = whole_pass(ctx, paths, layout)
        loader = open_loader(ctx, paths, layout)
        take(iter(loader), taken)
        state = loader.state_dict()
        take(iter(loader), taken + 3)
        loader.load_state_dict(state)
        return whole, take(iter(loader), 1)


@clause("data.state.load-moves-a-used-loader", source="contract: resumes")
def test_a_loader_that_was_used_takes_a_state_as_well(world, subject):
    """After `load_state_dict` the next `iter` MUST go on there, wherever the loader stood."""
    layout = Layout((61, 50), sequence_length=4, batch_size=2)
    whole, found = world.run(place_of, layout, 3)[0]

    stream.same([found], [whole[3:4]], given="state of batch 3, loader at 6")

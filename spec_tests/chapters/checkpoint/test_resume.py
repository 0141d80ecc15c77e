"""Resume: stop, start anew, go on, and nobody can tell.

The comparison with an uninterrupted run is the one test that forgets nothing: whatever a checkpoint
leaves out shows up in the weights a step or two later. The run uses dropout, NumPy's and Python's
generators, a falling learning rate and a loader, and it is stopped at every step.
"""

from __future__ import annotations

from spec_tests.chapters.checkpoint.disk import in_folder
from spec_tests.chapters.checkpoint.trainee import Trainee, part, round_trip
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.symptoms import Hint

clause = clauses(needs=("save_checkpoint", "load_checkpoint"), level="correct", worlds=(2, 3))
TWIN = "the twin run; KempnerForge pull request 115, Megatron issue 7468, torchtitan issue 811"
STEPS = 4


def stopped_everywhere(ctx, directory, toy, wrapper, stops):
    """Last states: of the uninterrupted run, of runs that were stopped, of runs without a load."""
    whole = Trainee(ctx, toy=toy, wrapper=wrapper)
    whole.train(STEPS)
    wanted, resumed = whole.state(), {}
    for stop in stops:
        first = Trainee(ctx, toy=toy, wrapper=wrapper)
        first.train(stop)
        place = f"{directory}-{stop}"
        first.save(place, step=stop)
        second = Trainee(ctx, toy=toy, wrapper=wrapper, seed=8)
        second.train(1)  # whatever was there before must not matter
        step = second.load(place)
        second.train(STEPS - step)
        resumed[stop] = {"state": second.state(), "step": step}
        third = Trainee(ctx, toy=toy, wrapper=wrapper, seed=8)
        third.train(1 + STEPS - step)
        resumed[stop]["unloaded"] = third.state()
    return {"whole": wanted, "resumed": resumed}


def equal_to_the_whole(ranks, stops, given):
    """Every resumed run ends like the one that was not interrupted."""
    __tracebackhide__ = True
    for stop in stops:
        found = [rank["resumed"][stop] for rank in ranks]
        where = f"{given}, stopped after {stop} of {STEPS} steps"
        judge.equal([each["step"] for each in found], stop, quantity="step", given=where)
        own = [rank["whole"] for rank in ranks]
        judge.tensors(
            [each["state"] for each in found],
            own,
            quantity="state of the uninterrupted run",
            hints=[
                Hint("the first rank's: its part was given to all ranks", own[0]),
                Hint(
                    "the state of a run into which nothing was loaded",
                    [each["unloaded"] for each in found],
                ),
            ],
            given=where,
        )


@clause(
    "checkpoint.resume.equals-uninterrupted",
    source="contract: optimizer, loader, save_checkpoint/generators; " + TWIN,
    worlds=(1, 2),
)
def test_a_run_stopped_at_any_step_ends_like_one_that_was_not(world):
    """A run that is stopped, at any step, and loaded MUST end with the uninterrupted run's bits."""
    stops = range(STEPS + 1)
    ranks = in_folder(world, stopped_everywhere, "ragged", "torch", list(stops))

    equal_to_the_whole(ranks, stops, "DistributedDataParallel")


@clause(
    "checkpoint.resume.wrapped", judges=("ddp", "ddp_bucketed"), source="contract: model; " + TWIN
)
def test_a_wrapped_run_goes_on_as_if_it_had_not_stopped(world, subject):
    """A run of the implementation's own wrapper MUST resume with the uninterrupted run's bits.

    The model has buffers, which differ between ranks when they are saved, and of which the first
    rank's are those that count. A save that divides the work over the ranks mixes them up.
    """
    ranks = in_folder(world, stopped_everywhere, "buffers", subject, [2])

    for rank in ranks:  # between two forwards only the first rank's buffers mean anything
        for state in (rank["whole"], rank["resumed"][2]["state"]):
            for name in [n for n in state if "norm." in n and "running" in n]:
                del state[name]
    equal_to_the_whole(ranks, [2], f"{subject}, toy 'buffers'")


@clause(
    "checkpoint.resume.buffers-of-first-rank",
    source="contract: first-buffers; "
    "DistributedDataParallel takes the first rank's buffers before each forward",
)
def test_where_buffers_differ_the_first_ranks_are_loaded(world):
    """Where replicas' buffers differ, a load MUST bring back the first rank's, all of them.

    A library that writes each name on whichever rank has least to do takes the running mean from
    one rank and the variance from another. Loading each rank its own is right as well, while there
    are as many ranks; what counts is that the first rank's are the first rank's.
    """
    ranks = in_folder(world, round_trip, toy="buffers", wrappers=("torch", None))

    own = [part(rank["saved"], "model") for rank in ranks]
    judge.tensors(
        [part(ranks[0]["loaded"], "model")],
        own[:1],
        quantity="first rank's own",
        hints=[Hint("another rank's", other) for other in own[1:]],
    )

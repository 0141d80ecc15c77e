"""Durability: machines die in the middle of a save, and disks fill up. Then the older save counts.

A checkpoint exists for the bad day, and on that day it is read. A file half written under the final
name, a pointer moved before what it points to, new tensors beside old ones in one folder: each of
these loads, or makes the newest unreadable while an older one is gone. The crash clauses copy the
folder before every operation that the save performs on it, which is what a killed process leaves,
and read each copy.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from spec_tests.chapters.checkpoint.disk import CrashImages, contents, damaged, full_disk, in_folder
from spec_tests.chapters.checkpoint.trainee import Trainee
from spec_tests.programs.laws import durability, refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(needs=("save_checkpoint", "load_checkpoint"), level="correct", worlds=(1,))
CRASH = "Lightning issues 688 and 19970, prime-rl pull request 2992; Pillai et al. 2014 (ALICE)"


def second_save(ctx, directory, step):
    """A run whose second save is done, its state at the first one, and what kills would leave."""
    trainee = Trainee.saved(ctx, directory)
    older = trainee.state()
    trainee.train()
    crashes = CrashImages(directory, into=f"{directory}-images")
    with crashes:
        trainee.save(directory, step=step)
    return trainee, older, crashes.images


def crashed_everywhere(ctx, directory, step):
    """What each copy of the folder, taken during a second save, loads."""
    trainee, older, images = second_save(ctx, directory, step)
    readings = [Trainee(ctx, seed=8).read(image, where) for where, image in images]
    final = Trainee(ctx, seed=8).read(directory, "undisturbed")
    return {"older": older, "newer": trainee.state(), "readings": readings, "final": final}


def judge_crashes(world, step):
    """Every image is the older save or the newer one, and the end is the newer."""
    __tracebackhide__ = True
    (rank,) = in_folder(world, crashed_everywhere, step)

    newer = {"the newer save": (step, rank["newer"])}
    durability.one_of(
        rank["readings"], {"the older save": (1, rank["older"]), **newer}, given="a second save"
    )
    durability.one_of([rank["final"]], newer)


@clause("checkpoint.crash.old-or-new", source="contract: keeps-older; " + CRASH)
def test_a_save_killed_at_any_moment_leaves_the_older_one(world):
    """A save killed at any moment MUST leave a folder that loads the older save or the new one."""
    judge_crashes(world, step=2)


@clause(
    "checkpoint.crash.same-step-again",
    source="contract: replaces; "
    + CRASH
    + "; torch.distributed.checkpoint saves over what is there, tensor by tensor",
)
def test_saving_a_step_again_never_tears(world):
    """A step saved again and killed at any moment MUST load as it was or as it is, never mixed.

    It happens after each restart from an older checkpoint. Half of the files new and half old load
    without an error.
    """
    judge_crashes(world, step=1)


def saved_after_a_kill(ctx, directory, step):
    """What loads where a save was killed and the same step is then saved to the end."""
    trainee, _, images = second_save(ctx, directory, step)
    newer, readings = trainee.state(), []
    for where, image in images[:: max(1, len(images) // 4)]:
        trainee.save(image, step=step)
        readings.append(Trainee(ctx, seed=8).read(image, f"saved again after a kill {where}"))
    return newer, readings


@clause(
    "checkpoint.crash.next-save-works",
    source="contract: next-save; "
    "speechturn issue 15: what a killed save left behind is in the way of the next one",
)
@pytest.mark.parametrize("step", [2, 1], ids=["new-step", "step-again"])
def test_after_a_killed_save_the_next_one_works(world, step):
    """After a save that was killed, a save of the same step MUST work and load."""
    ((newer, readings),) = in_folder(world, saved_after_a_kill, step)

    durability.one_of(readings, {"the save that was not killed": (step, newer)})


def said(after_bytes):
    """What `full_disk` does, for people."""
    return f"files end after {after_bytes} bytes" if after_bytes is not None else "no rename works"


def try_to_save(trainee, directory, step):
    """The error of a save, "" if there is none."""
    with refusal.caught(BaseException) as caught:  # the library's own is no Exception
        trainee.save(directory, step=step)
    return caught["error"]


def saved_on_full_disk(ctx, directory, after_bytes, full_ranks, step=2):
    """A second save while some ranks cannot write, and what loads after it and after a third."""
    trainee = Trainee.saved(ctx, directory)
    older = trainee.state()
    trainee.train()
    found = {"older": older, "newer": trainee.state()}
    is_full = ctx.rank in full_ranks
    with full_disk(after_bytes=after_bytes) if is_full else contextlib.nullcontext():
        found["error"] = try_to_save(trainee, directory, step)
    ctx.barrier()
    found["reading"] = Trainee(ctx, seed=8).read(directory, said(after_bytes))
    trainee.save(directory, step=3)
    after = Trainee(ctx, seed=8).read(directory, "saved once more, with space")
    return {**found, "third": trainee.state(), "after": after}


HAVE_DISKS = ("gloo", "cuda")  # a limit on files is of a process, which simulated ranks share
FULL = pytest.mark.parametrize("after_bytes", [0, 5000, None], ids=["0", "5000", "no-rename"])


@clause(
    "checkpoint.failure.on-all-ranks",
    source="contract: all-fail; torch issue 143536",
    worlds=(2,),
    transports=HAVE_DISKS,
)
@FULL
@pytest.mark.parametrize("full", ["first", "last"])
def test_a_save_that_fails_on_one_rank_fails_on_all(world, after_bytes, full):
    """A save that fails on one rank MUST raise on all ranks, without a hang."""
    ranks_full = [0 if full == "first" else world.size - 1]
    ranks = in_folder(world, saved_on_full_disk, after_bytes, ranks_full)

    durability.all_or_none(
        [rank["error"] for rank in ranks],
        what="a save",
        given=f"on rank {ranks_full[0]} {said(after_bytes)}",
    )


class Gone:
    """A loader that has lost its place, and says so with an error."""

    def __init__(self, error):
        self.error = error

    def state_dict(self):
        raise self.error

    def load_state_dict(self, state):
        raise ConnectionError("the server of the stream does not answer")


ERRORS = {
    "said": ConnectionError("the server of the stream does not answer"),
    "without-words": AssertionError(),
}


def saved_with_a_broken_loader(ctx, directory, error):
    """The error of a save for which the first rank's loader has no state, and what loads then."""
    trainee: Any = Trainee.saved(ctx, directory)
    older = trainee.state()
    if ctx.rank == 0:  # whose loader counts, if one is enough
        trainee.loader = Gone(ERRORS[error])
    failed = try_to_save(trainee, directory, step=2)
    ctx.barrier()
    return failed, older, Trainee(ctx, seed=8).read(directory, "after a failed save")


@clause(
    "checkpoint.failure.of-a-loader",
    level="production",
    source="contract: all-fail; a stream that lost its server",
    worlds=(2,),
)
@pytest.mark.parametrize("error", ERRORS)
def test_a_loader_that_fails_on_one_rank_fails_the_save_on_all(world, error):
    """A save MUST raise on all ranks, without a hang, where one rank's loader has no state."""
    ranks = in_folder(world, saved_with_a_broken_loader, error)

    refusal.on_all_ranks([error for error, *_ in ranks], given="the first rank's loader raises")
    for _, older, reading in ranks:
        durability.one_of([reading], {"the older save": (1, older)})


@clause(
    "checkpoint.failure.is-reported",
    source="contract: on-return",
    worlds=(1, 2),
    transports=HAVE_DISKS,
)
def test_a_save_that_nobody_could_write_raises(world):
    """A save MUST raise where no rank can write."""
    ranks = in_folder(world, saved_on_full_disk, 0, range(world.size))

    refusal.on_all_ranks([rank["error"] for rank in ranks], given="no rank can write")


@clause(
    "checkpoint.failure.keeps-older",
    source="contract: keeps-older, on-return; " + CRASH,
    worlds=(1, 2),
    transports=HAVE_DISKS,
)
@FULL
@pytest.mark.parametrize("step", [2, 1], ids=["next-step", "same-step"])
def test_after_a_failed_save_the_older_one_loads(world, after_bytes, step):
    """After a save that raised, the older one MUST load; after one that did not, the new one."""
    ranks = in_folder(world, saved_on_full_disk, after_bytes, [world.size - 1], step)

    for rank in ranks:
        failed = {"the older save": (1, rank["older"])}
        worked = {"the newer save": (step, rank["newer"])}
        durability.one_of(
            [rank["reading"]],
            failed if rank["error"] else worked,
            likely="what could not be written was taken for a checkpoint, or was not missed",
            given=f"the save {'raised' if rank['error'] else 'did not raise'}",
        )


@clause(
    "checkpoint.failure.next-save-works",
    source="contract: next-save; "
    "speechturn issue 15: what a killed save left behind is in the way of the next one",
    worlds=(1, 2),
    transports=HAVE_DISKS,
)
@FULL
def test_after_a_failed_save_the_next_one_works(world, after_bytes):
    """After a save that raised, the next one MUST work and load."""
    ranks = in_folder(world, saved_on_full_disk, after_bytes, [0])

    for rank in ranks:
        durability.one_of([rank["after"]], {"the third save": (3, rank["third"])})


def places_of(tensors, path):
    """Yield how to flip a bit in the middle of each tensor whose bytes stand in the file."""
    data = path.read_bytes()
    for tensor in tensors:
        values = tensor.cpu().contiguous().numpy().tobytes()
        if (start := data.find(values)) >= 0:
            yield f"flipped at {(start + len(values) // 2) / len(data)}"


def read_damaged(ctx, directory, hows):
    """Of two saves, what loads when a file of the newer one is damaged."""
    trainee = Trainee.saved(ctx, directory)
    older, before = trainee.state(), contents(directory)
    ctx.barrier()
    trainee.train()
    trainee.save(directory, step=2)
    newer, note = trainee.state(), Path(f"{directory}-ways")
    if ctx.rank == 0:
        fresh = [file for file, facts in contents(directory).items() if before.get(file) != facts]
        found = [(file, how) for file in fresh for how in hows]
        if "flipped" in hows[0]:  # much of a file may be padding: in values as well
            large = [values for values in newer.values() if values.numel() > 8]
            found += [(f, how) for f in fresh for how in places_of(large, Path(directory, f))]
        note.write_text(json.dumps(found))
    ctx.barrier()
    ways = json.loads(note.read_text())
    readings = []
    for number, (file, how) in enumerate(ways):
        copy = f"{directory}-{number}"
        if ctx.rank == 0:
            damaged(directory, file, how, into=copy)
        ctx.barrier()
        readings.append(Trainee(ctx, seed=8).read(copy, f"{Path(file).name} {how}"))
    return {"older": older, "newer": newer, "readings": readings}


def judge_damaged(world, hows, *, is_whole=True, **law):
    """With a file damaged in these ways, all ranks load one whole state, or none does.

    Args:
        is_whole: otherwise only the step is judged of what is loaded.
        law: of `durability.one_of`.
    """
    __tracebackhide__ = True
    ranks = in_folder(world, read_damaged, hows)
    for rank in ranks:
        saved = {"the older save": (1, rank["older"]), "the newer save": (2, rank["newer"])}
        if is_whole:
            durability.one_of(rank["readings"], saved, **law)
        for reading in rank["readings"]:
            durability.under_its_step(reading, saved, given=reading["where"])
    for readings in zip(*(rank["readings"] for rank in ranks), strict=True):
        where = readings[0]["where"]
        if is_whole:
            errors = [each["error"] for each in readings]
            durability.all_or_none(errors, what="a load", given=where)
        steps = [each["step"] for each in readings]
        judge.equal(steps, steps[0], quantity="step that was loaded", given=where)


INCOMPLETE = ["cut", "emptied", "removed"]
OR_REFUSED = {"may_refuse": True, "likely": "what could not be read was left out without a word"}


@clause("checkpoint.damage.never-in-part", source="contract: damaged; " + CRASH)
def test_a_damaged_save_is_never_loaded_in_part(world):
    """With a file cut, emptied or missing, a load MUST find a whole save or raise."""
    judge_damaged(world, INCOMPLETE, **OR_REFUSED)


@clause(
    "checkpoint.damage.older-is-used",
    level="production",
    source="contract: damaged; torchtitan looks for the newest folder that has its metadata",
)
def test_with_a_damaged_newest_the_older_save_is_used(world):
    """With a file of the newest save cut, emptied or missing, a load SHOULD use the one before."""
    judge_damaged(world, INCOMPLETE)


@clause(
    "checkpoint.damage.under-its-step",
    source="contract: newest, step; returns its step",
    worlds=(1, 2),
)
def test_what_is_loaded_comes_with_its_own_step(world):
    """With a bit flipped, a load of the older save MUST return its step, the same on all ranks."""
    judge_damaged(world, ["flipped at 0.5"], is_whole=False)


@clause(
    "checkpoint.damage.flipped-bit-is-noticed",
    level="production",
    source="contract: damaged; torch.load does not look at the check sums that torch.save wrote",
    worlds=(1, 2),
)
def test_a_flipped_bit_is_noticed(world):
    """With a bit flipped in a file, a load SHOULD find a whole save or raise."""
    judge_damaged(world, [f"flipped at {n / 8}" for n in range(8)], **OR_REFUSED)

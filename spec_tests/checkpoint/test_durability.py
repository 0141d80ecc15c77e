"""Durability: machines die in the middle of a save, and disks fill up. Then the older save counts.

A checkpoint exists for the bad day, and on that day it is read. A file half written under the final
name, a pointer moved before what it points to, new tensors beside old ones in one folder: each of
these loads, or makes the newest unreadable while an older one is gone. The crash clauses copy the
folder before every operation that the save performs on it, which is what a killed process leaves,
and read each copy.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from spec_tests.checkpoint.disk import CrashImages, contents, damaged, folder, full_disk
from spec_tests.checkpoint.trainee import Trainee
from spec_tests.clause import clauses
from spec_tests.laws import durability, refusal
from spec_tests.rig import judge

clause = clauses(needs=("save_checkpoint", "load_checkpoint"), level="correct", worlds=(1,))
CRASH = "Lightning issues 688 and 19970, prime-rl pull request 2992; Pillai et al. 2014 (ALICE)"


def crashed_everywhere(ctx, directory, is_same_step):
    """What each copy of the folder, taken during a second save, loads."""
    trainee = Trainee(ctx)
    trainee.train()
    trainee.save(directory, step=1)
    older = trainee.state()
    trainee.train()
    crashes = CrashImages(directory, into=f"{directory}-images")
    with crashes:
        trainee.save(directory, step=1 if is_same_step else 2)
    newer = trainee.state()
    readings = [Trainee(ctx, seed=8).read(image, where) for where, image in crashes.images]
    final = Trainee(ctx, seed=8).read(directory, "undisturbed")
    return {"older": older, "newer": newer, "readings": readings, "final": final}


def old_or_new(rank, newer_step):
    """Every image is the older save or the newer one, and the end is the newer."""
    __tracebackhide__ = True
    newer = {"the newer save": (newer_step, rank["newer"])}
    durability.one_of(
        rank["readings"], {"the older save": (1, rank["older"]), **newer}, given="a second save"
    )
    durability.one_of([rank["final"]], newer)


@clause("checkpoint.crash.old-or-new", source=CRASH)
def test_a_save_killed_at_any_moment_leaves_the_older_one(world):
    """A save killed at any moment MUST leave a folder that loads the older save or the new one."""
    with folder() as directory:
        (rank,) = world.run(crashed_everywhere, directory, False)

    old_or_new(rank, newer_step=2)


@clause(
    "checkpoint.crash.same-step-again",
    source=CRASH + "; torch.distributed.checkpoint saves over what is there, tensor by tensor",
)
def test_saving_a_step_again_never_tears(world):
    """A step saved again and killed at any moment MUST load as it was or as it is, never mixed.

    It happens after each restart from an older checkpoint. Half of the files new and half old load
    without an error.
    """
    with folder() as directory:
        (rank,) = world.run(crashed_everywhere, directory, True)

    old_or_new(rank, newer_step=1)


def saved_on_full_disk(ctx, directory, after_bytes, full_ranks):
    """A second save while some ranks cannot write, and what loads after it and after a third."""
    trainee = Trainee(ctx)
    trainee.train()
    trainee.save(directory, step=1)
    older, error = trainee.state(), ""
    trainee.train()
    newer = trainee.state()
    is_full = ctx.rank in full_ranks
    with full_disk(after_bytes=after_bytes) if is_full else contextlib.nullcontext():
        try:
            trainee.save(directory, step=2)
        except refusal.NO_ANSWERS:
            raise
        except BaseException as caught:  # the library's own is no Exception
            error = f"{type(caught).__name__}: {caught}"
    ctx.barrier()
    reading = Trainee(ctx, seed=8).read(directory, f"files end after {after_bytes} bytes")
    trainee.save(directory, step=3)
    third = trainee.state()
    after = Trainee(ctx, seed=8).read(directory, "saved once more, with space")
    return {
        "older": older,
        "newer": newer,
        "error": error,
        "reading": reading,
        "third": third,
        "after": after,
    }


FULL = pytest.mark.parametrize("after_bytes", [0, 5000])


@clause(
    "checkpoint.failure.on-all-ranks",
    source="torch issue 143536; contract: a failure on any rank is an error on all",
    worlds=(2,),
)
@FULL
@pytest.mark.parametrize("full", ["first", "last"])
def test_a_save_that_fails_on_one_rank_fails_on_all(world, after_bytes, full):
    """A save that fails on one rank MUST raise on all ranks, without a hang."""
    ranks_full = [0 if full == "first" else world.size - 1]
    with folder() as directory:
        ranks = world.run(saved_on_full_disk, directory, after_bytes, ranks_full)

    durability.all_or_none(
        [rank["error"] for rank in ranks],
        what="a save",
        given=f"rank {ranks_full[0]} cannot write more than {after_bytes} bytes to a file",
    )


@clause("checkpoint.failure.is-reported", source="contract: complete, or nothing", worlds=(1, 2))
def test_a_save_that_nobody_could_write_raises(world):
    """A save MUST raise where no rank can write."""
    with folder() as directory:
        ranks = world.run(saved_on_full_disk, directory, 0, range(world.size))

    judge.equal(
        [bool(rank["error"]) for rank in ranks], True, quantity="whether it raised, the answer"
    )


@clause("checkpoint.failure.keeps-older", source=CRASH, worlds=(1, 2))
@FULL
def test_after_a_failed_save_the_older_one_loads(world, after_bytes):
    """After a save that raised, the older one MUST load; after one that did not, the new one."""
    with folder() as directory:
        ranks = world.run(saved_on_full_disk, directory, after_bytes, [world.size - 1])

    for rank in ranks:
        failed = {"the older save": (1, rank["older"])}
        worked = {"the newer save": (2, rank["newer"])}
        durability.one_of(
            [rank["reading"]],
            failed if rank["error"] else worked,
            likely="what could not be written was taken for a checkpoint, or was not missed",
            given=f"the save {'raised' if rank['error'] else 'did not raise'}",
        )


@clause(
    "checkpoint.failure.next-save-works",
    source="speechturn issue 15: what a killed save left behind is in the way of the next one",
    worlds=(1, 2),
)
@FULL
def test_after_a_failed_save_the_next_one_works(world, after_bytes):
    """After a save that raised, the next one MUST work and load."""
    with folder() as directory:
        ranks = world.run(saved_on_full_disk, directory, after_bytes, [0])

    for rank in ranks:
        durability.one_of([rank["after"]], {"the third save": (3, rank["third"])})


def read_damaged(ctx, directory, hows):
    """Of two saves, what loads when a file of the newer one is damaged."""
    trainee = Trainee(ctx)
    trainee.train()
    trainee.save(directory, step=1)
    older, before = trainee.state(), contents(directory)
    trainee.train()
    trainee.save(directory, step=2)
    newer = trainee.state()
    fresh = [file for file, facts in contents(directory).items() if before.get(file) != facts]
    readings = []
    for number, (file, how) in enumerate((file, how) for file in fresh for how in hows):
        copy = damaged(directory, file, how, into=f"{directory}-{number}")
        readings.append(Trainee(ctx, seed=8).read(copy, f"{Path(file).name} {how}"))
    return {"older": older, "newer": newer, "readings": readings}


def whole_or_refused(rank):
    """Each reading is a whole state under its own step, or an error."""
    __tracebackhide__ = True
    durability.one_of(
        rank["readings"],
        {"the older save": (1, rank["older"]), "the newer save": (2, rank["newer"])},
        may_refuse=True,
        likely="what could not be read was left out without a word",
    )


@clause("checkpoint.damage.never-in-part", source=CRASH)
def test_a_damaged_save_is_never_loaded_in_part(world):
    """With a file cut, emptied or missing, a load MUST find a whole save or raise."""
    with folder() as directory:
        (rank,) = world.run(read_damaged, directory, ["cut", "emptied", "removed"])

    whole_or_refused(rank)


@clause(
    "checkpoint.damage.older-is-used",
    level="production",
    source="torchtitan looks for the newest folder that has its metadata",
)
def test_with_a_damaged_newest_the_older_save_is_used(world):
    """With a file of the newest save cut, emptied or missing, a load SHOULD use the one before."""
    with folder() as directory:
        (rank,) = world.run(read_damaged, directory, ["cut", "emptied", "removed"])

    durability.one_of(
        rank["readings"],
        {"the older save": (1, rank["older"]), "the newer save": (2, rank["newer"])},
    )


@clause(
    "checkpoint.damage.flipped-bit-is-noticed",
    level="production",
    source="torch.load does not look at the check sums that torch.save wrote",
)
def test_a_flipped_bit_is_noticed(world):
    """With a bit flipped in a file, a load SHOULD find a whole save or raise."""
    with folder() as directory:
        (rank,) = world.run(read_damaged, directory, [f"flipped at {n / 8}" for n in range(8)])

    whole_or_refused(rank)

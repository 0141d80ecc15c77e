"""Refusals: what is wrong is said when the loader is made, not in hour three on one rank of eight.

A loader that skips a bad file, or ends its pass there, leaves its peers waiting in a collective;
one that loops with a rank that does not exist never comes back. All bad input is a ValueError at
construction.
"""

from __future__ import annotations

import contextlib
import os
import re
from functools import partial
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from spec_tests.chapters.data.reading import LOADER, files_of, folder_of
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge, shards
from spec_tests.rig.clause import clauses

clause = clauses(judges=LOADER, level="correct", worlds=(1,))

TIMEOUT_S = 10.0  # none of this reads more than a header
LENGTH = 40
SIZE = shards.HEADER_BYTES + 2 * LENGTH

refused = partial(refusal.of_kinds, when="when the loader is made")

# Name to what is passed in place of the right arguments.
BAD_ARGUMENTS = {
    "batch-size-0": {"batch_size": 0},
    "batch-size-negative": {"batch_size": -2},
    "sequence-length-0": {"sequence_length": 0},
    "sequence-length-negative": {"sequence_length": -4},
    "rank-is-world-size": {"rank": 2, "world_size": 2},
    "rank-beyond": {"rank": 5, "world_size": 1},
    "rank-negative": {"rank": -1, "world_size": 2},
    "world-size-0": {"rank": 0, "world_size": 0},
    "world-size-negative": {"rank": 0, "world_size": -1},
}


def opened(ctx, paths, **changed):
    """Make a loader."""
    arguments = {"batch_size": 2, "sequence_length": 4, "rank": 0, "world_size": 1, **changed}
    ctx.impl.token_loader(paths, **arguments)


def ending(world, body, *args, **kwargs):
    """What making a loader raises on each rank."""
    return world.run(refusal.raised, body, *args, timeout_s=TIMEOUT_S, **kwargs)


def with_arguments(ctx, changed):
    """Make a loader with these arguments."""
    with files_of(ctx, (LENGTH, LENGTH)) as paths:
        opened(ctx, paths, **changed)


@clause(
    "data.refusal.bad-arguments",
    source="contract: bad-arguments; a course's loader loops for ever when rank >= world_size",
)
@pytest.mark.parametrize("argument", BAD_ARGUMENTS)
def test_bad_arguments_are_refused_at_construction(world, subject, argument):
    """Sizes that are not positive and ranks outside the world MUST be a ValueError at once."""
    changed = BAD_ARGUMENTS[argument]
    refused(ending(world, with_arguments, changed), "ValueError", given=str(changed))


@clause("data.refusal.no-files", source="contract: no-files; a glob that matches nothing")
def test_an_empty_list_of_files_is_refused(world, subject):
    """An empty list of files MUST be a ValueError: a glob that matches nothing is no data set."""
    refused(ending(world, opened, []), "ValueError", given="no files")


def in_environment(ctx, variables, *, is_early=False):
    """Make a loader without rank and world_size, under these variables alone.

    Args:
        is_early: there is no process group yet.
    """
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    early = mock.patch.object(dist, "is_initialized", return_value=False)
    with files_of(ctx, (LENGTH,)) as paths, early if is_early else contextlib.nullcontext():
        opened(ctx, paths, rank=None, world_size=None)


@clause(
    "data.refusal.half-an-environment",
    source="contract: half-environment; a course's loader reads the two independently",
)
@pytest.mark.parametrize("variables", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("is_early", [False, True], ids=["with-group", "before-the-group"])
def test_rank_without_world_size_is_refused(world, subject, variables, is_early):
    """RANK without WORLD_SIZE, or the reverse, MUST be a ValueError.

    With a default for the missing one, every process reads the same tokens, or one that does not
    exist reads none. Loaders are often made before the process group is.
    """
    alone = {variables: {"RANK": "0", "WORLD_SIZE": "1"}[variables]}
    ranks = ending(world, in_environment, alone, is_early=is_early)
    refused(ranks, "ValueError", given=f"{alone} alone in the environment")


@clause("data.refusal.neither-is-one-rank", source="contract: one-rank")
def test_without_both_variables_there_is_one_rank(world, subject):
    """With neither RANK nor WORLD_SIZE set, a loader MUST be made: a baseline is one process."""
    errors = [rank["error"] for rank in ending(world, in_environment, {})]
    judge.equal(errors, "", quantity="error", given="neither RANK nor WORLD_SIZE set")


def with_damage(ctx, damage, *, first):
    """Make a loader over a right file and a damaged one."""
    with folder_of(ctx) as folder:
        good = shards.write_numbered(folder, (LENGTH,))
        bad = shards.write_damaged(folder / "the_damaged_one.bin", damage, LENGTH)
        opened(ctx, [bad, *good] if first else [*good, bad])


@clause(
    "data.refusal.bad-files",
    source="contract: bad-files; llm.c checks magic, version and exact size when it opens a file",
)
@pytest.mark.parametrize("damage", list(shards.DAMAGES))
def test_a_bad_file_is_refused_at_construction(world, subject, damage):
    """A file that is not exactly what its header says MUST be a ValueError at construction.

    The damaged file is the second of two: who opens files as they come finds it in hour three, and
    on one rank first.
    """
    ranks = ending(world, with_damage, damage, first=False)
    refused(ranks, "ValueError", given=f"damage {damage!r}")


@clause("data.refusal.no-file-there", source="contract: absent-files")
@pytest.mark.parametrize("damage", shards.NO_FILES)
def test_a_path_without_a_file_is_refused_at_construction(world, subject, damage):
    """A missing file or a directory MUST be an error at construction: ValueError, or OSError."""
    ranks = ending(world, with_damage, damage, first=False)
    refused(ranks, "ValueError", "OSError", given=f"a path that is {damage}")


def with_length(ctx, size):
    """Make a loader over a shard cut or extended to `size` bytes."""
    with folder_of(ctx) as folder:
        data = shards.shard_bytes(shards.numbered(0, LENGTH))
        path = folder / "cut.bin"
        path.write_bytes((data + bytes(64))[:size])
        opened(ctx, [path])


@clause("data.refusal.any-other-size", source="contract: bad-files")
@given(size=st.integers(0, SIZE + 64))
@example(size=SIZE - 1)
@example(size=SIZE)
@example(size=SIZE + 1)
def test_a_file_of_any_other_size_is_refused(world, subject, size):
    """A file of any size but the one that its header claims MUST be a ValueError."""
    ranks = ending(world, with_length, size)

    if size == SIZE:
        judge.equal([rank["error"] for rank in ranks], "", quantity="error", given="a right file")
    else:
        given = f"a shard of {LENGTH} tokens, cut or extended to {size} bytes"
        refused(ranks, "ValueError", given=given)


@clause(
    "data.refusal.names-the-file",
    level="production",
    source="contract: names-file; one bad file of 103: which?",
)
@pytest.mark.parametrize("damage", ["foreign-magic", "half", "empty", "one-byte-long", "missing"])
def test_the_message_names_the_file(world, subject, damage):
    """The message about a bad file MUST name it: there are a hundred of them."""
    [error] = ending(world, with_damage, damage, first=True)

    text = error["text"] or "no error"
    judge.holds("the_damaged_one.bin" in text, f"expected the file's name in {text!r}")


@clause(
    "data.refusal.says-what-it-found",
    level="production",
    source="a message says what was expected, what came, what to do",
)
@pytest.mark.parametrize("damage", ["foreign-magic", "later-version", "one-token-short"])
def test_the_message_says_what_was_found(world, subject, damage):
    """The message about a bad file SHOULD hold the number that was found."""
    [error] = ending(world, with_damage, damage, first=True)

    # In bytes of the file, in bytes of its tokens, and in tokens.
    short = {SIZE - 2, 2 * (LENGTH - 1), LENGTH - 1}
    found = {"foreign-magic": {20240801}, "later-version": {2}, "one-token-short": short}
    # As a word: digits of a folder's name are no finding.
    said = any(re.search(rf"\b{number}\b", error["text"]) for number in found[damage])
    judge.holds(said, f"expected one of {found[damage]} in {error['text'] or 'no error'!r}")

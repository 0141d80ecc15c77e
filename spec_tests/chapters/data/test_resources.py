"""Resources: a pass over a corpus of gigabytes costs a few megabytes and no descriptor.

Level `production`: reading whole files is right, and dear as soon as eight ranks do it. Sizes are
read from /proc; where there is none these clauses are not judged.
"""

from __future__ import annotations

import itertools
import os
import unittest
from pathlib import Path

from spec_tests.chapters.data.reading import LOADER, Layout, files_of, folder_of, open_loader, take
from spec_tests.programs.laws import footprint
from spec_tests.rig import judge, shards
from spec_tests.rig.clause import clauses
from spec_tests.rig.ranks.errors import NOT_HERE

clause = clauses(judges=LOADER, level="production", worlds=(1,))

MIB = 2**20
BIG = 40_000_000  # tokens: 76 MiB, sparse
LARGE = Layout((), sequence_length=4096, batch_size=16)


def require_proc():
    """Skip where the system does not say what a process holds."""
    if not Path("/proc/self/statm").is_file():
        raise unittest.SkipTest(f"{NOT_HERE}no /proc to read resident memory from")


def _resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(ctx, layout, count):
    """By how much a pass over a shard of `count` tokens adds to resident memory at most."""
    with folder_of(ctx) as folder:
        path = shards.write_sparse(folder / "big.bin", count, [])
        before = _resident_bytes()
        largest = before
        batches = count // (layout.batch_size * layout.sequence_length)
        for number, _ in enumerate(itertools.islice(open_loader(ctx, [path], layout), batches)):
            if number % 16 == 0:
                largest = max(largest, _resident_bytes())
        return max(largest, _resident_bytes()) - before


@clause(
    "data.resources.resident-memory",
    source="contract: memory; "
    "nanoGPT makes a new memory map per batch for this reason; Megatron's bin reader",
)
def test_a_pass_does_not_grow_with_the_shard(world, subject):
    """A pass MUST NOT add more to resident memory than some batches and a little.

    Reading whole shards, or holding a map of them, adds the shard on every rank.
    """
    require_proc()
    ranks = world.run(growth, LARGE, BIG)

    batch = 2 * 8 * LARGE.batch_size * LARGE.sequence_length
    footprint.at_most(
        ranks,
        {"six batches": 6 * batch, "slack": 8 * MIB},
        quantity="growth of resident memory",
        likely="the whole shard is read, or its memory map is held",
        given=f"a shard of {BIG} tokens ({2 * BIG // MIB} MiB)",
    )


def _open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def descriptors(ctx, layout, passes):
    """Open descriptors before and after many passes, some left half-way, some loaders dropped."""
    with files_of(ctx, layout.lengths) as paths:
        loader = open_loader(ctx, paths, layout)
        take(loader, layout.limit)
        before = _open_descriptors()
        for number in range(passes):
            take(loader, layout.limit if number % 2 else 1)
        return _open_descriptors() - before


@clause(
    "data.resources.descriptors",
    source="contract: descriptors; a file that is opened again for every pass and never closed",
)
def test_passes_leave_no_descriptor_behind(world, subject):
    """Further passes MUST NOT leave further descriptors open."""
    require_proc()
    [number] = world.run(descriptors, Layout((40, 40, 40), 4, 2), 30)

    judge.holds(number <= 3, f"rank 0: {number} more open descriptors after 30 passes")

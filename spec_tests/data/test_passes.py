"""Passes: which files, which rank, from where to where.

One loader serves a baseline and every rank of a distributed run: the files are the caller's, the
rank comes from torchrun's environment or from arguments, and each `iter` is one pass.
"""

from __future__ import annotations

import itertools

from spec_tests.clause import clauses
from spec_tests.data.reading import CONTRACT, LOADER, Layout, files_of, open_loader, take
from spec_tests.laws import stream

clause = clauses(judges=LOADER, level="correct", worlds=(1,))


def in_given_order(ctx, layout, order):
    """A pass over the files in another order than that of their names."""
    with files_of(ctx, layout.lengths) as paths:
        return take(open_loader(ctx, [paths[i] for i in order], layout), layout.limit)


@clause(
    "data.partition.callers-order", source=CONTRACT + "; sorted() over strings puts 10 before 9"
)
def test_files_are_read_in_the_callers_order(world, subject):
    """Files MUST be read in the caller's order, whatever their names, dates or sizes."""
    layout, order = Layout((13, 29, 17, 21), sequence_length=4, batch_size=1), (2, 0, 3, 1)
    ranks = world.run(in_given_order, layout, order)

    firsts = [1000 * i + 4 * k for i in order for k in range((layout.lengths[i] - 1) // 4)]
    wanted = [stream.batch_of([first], 4) for first in firsts]
    stream.same([ranks[0]], [wanted], given=f"files given in the order {order}")


def three_passes(ctx, layout):
    """Two whole passes and an abandoned one in between, of the same loader."""
    with files_of(ctx, layout.lengths) as paths:
        loader = open_loader(ctx, paths, layout)
        first = take(loader, layout.limit)
        take(loader, 2)
        return [first, take(loader, layout.limit)]


@clause("data.partition.one-pass-per-iter", source=CONTRACT)
def test_every_iter_is_one_pass_from_the_start(world, subject):
    """Each `iter` MUST give one pass and end; the next starts anew, even if the last was left."""
    layout = Layout((31, 22), sequence_length=4, batch_size=2)
    ranks = world.run(three_passes, layout)

    wanted = layout.expected()[0]
    stream.same([ranks[0][0]], [wanted], given="first pass")
    stream.same([ranks[0][1]], [wanted], given="third pass, after the second was left half-way")


def own_stream(ctx, layout, *, explicit):
    """What this live rank reads, placed by its environment or by arguments that override it."""
    numbers = {"rank": 0, "world_size": 1} if explicit else {}
    with files_of(ctx, layout.lengths) as paths:
        loader = ctx.impl.token_loader(
            paths,
            batch_size=layout.batch_size,
            sequence_length=layout.sequence_length,
            **numbers,
        )
        return take(loader, layout.limit)


@clause(
    "data.partition.rank-from-environment",
    source=CONTRACT + "; torchrun sets RANK and WORLD_SIZE",
    worlds=(1, 2, 3),
)
def test_live_ranks_read_their_own_part(world, subject):
    """Without arguments a rank MUST read the part that RANK and WORLD_SIZE say is its own."""
    layout = Layout((53, 40), sequence_length=3, batch_size=2, world_size=world.size)
    ranks = world.run(own_stream, layout, explicit=False)

    stream.same(ranks, layout.expected(), given="RANK and WORLD_SIZE set, no arguments")


@clause("data.partition.arguments-win", source=CONTRACT, worlds=(2,))
def test_arguments_win_over_the_environment(world, subject):
    """An explicit rank and world_size MUST win over RANK and WORLD_SIZE.

    Evaluation on one rank of many reads everything that way.
    """
    layout = Layout((53, 40), sequence_length=3, batch_size=2)
    ranks = world.run(own_stream, layout, explicit=True)

    stream.same(ranks, layout.expected() * world.size, given="rank=0, world_size=1 on each rank")


def interleaved(ctx, layout):
    """Two passes of one loader at the same time."""
    with files_of(ctx, layout.lengths) as paths:
        loader = open_loader(ctx, paths, layout)
        one, other = iter(loader), iter(loader)
        pairs = itertools.islice(zip(one, other, strict=False), layout.limit)
        return [take(side, layout.limit) for side in zip(*pairs, strict=True)]


@clause(
    "data.partition.independent-passes",
    level="production",
    source="iterators of a Python sequence do not disturb each other",
)
def test_two_passes_at_a_time_do_not_disturb_each_other(world, subject):
    """Two iterators of one loader SHOULD each give the whole pass."""
    layout = Layout((31, 22), sequence_length=4, batch_size=2)
    ranks = world.run(interleaved, layout)

    stream.same(ranks[0], layout.expected() * 2, given="two iterators in turns")

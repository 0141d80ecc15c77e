"""Partition: one global order of sequences, cut by rank, the same whatever the number of ranks.

Two well-known loaders test for the end of a shard at each rank's own offset, so that ranks change
shard at different steps: some tokens are read twice, some never, and the loss falls. Numbered
shards make every token say where it stands, and plain Python of ten lines says where it belongs.

Passes: which files, which rank, from where to where.

One loader serves a baseline and every rank of a distributed run: the files are the caller's, the
rank comes from torchrun's environment or from arguments, and each `iter` is one pass.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import example, given

from spec_tests.chapters.data.reading import (
    LOADER,
    Layout,
    all_ranks,
    cut,
    files_of,
    last_words,
    layouts,
    open_loader,
    take,
    whole_pass,
)
from spec_tests.programs.laws import stream
from spec_tests.rig import judge, shards
from spec_tests.rig.clause import clauses

clause = clauses(judges=LOADER, level="correct", worlds=(1,))

NANOGPT = "build-nanogpt DataLoaderLite and llm.c train_gpt2.py; build-nanogpt pull request 109"


def read(world, layout):
    """Each rank's pass. None may be empty: nothing would be compared."""
    __tracebackhide__ = True
    [streams] = world.run(all_ranks, layout)
    empty = [rank for rank, batches in enumerate(streams) if not batches]
    [line] = world.run(last_words, layout) if empty else [""]
    said = f"; the last line that it printed: {line}" if line else ""
    judge.holds(not empty, f"expected batches, got none on ranks {empty}{said}", given=str(layout))
    return streams


@clause("data.partition.shifted-by-one", level="course", source="contract: shifted")
@pytest.mark.parametrize("length", [1, 4, 7])
def test_the_target_is_the_next_token(world, subject, length):
    """Every target MUST be the token after its input in the file, in the last column too.

    A roll takes the last column's target from the row's first token: 1/T of the loss is noise.
    """
    [batches] = read(world, Layout((43,), length, 2))

    for number, (inputs, targets) in enumerate(batches):
        for row, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            quantity = f"targets in row {row} of batch {number}"
            judge.equal([y], [token + 1 for token in x], quantity=quantity, given=f"inputs {x}")


@clause("data.partition.sequences-in-order", level="course", source="contract: in-order")
def test_one_rank_reads_a_shard_from_front_to_back(world, subject):
    """Alone, a rank MUST read sequence after sequence, each beginning where the last one ended."""
    layout = Layout((50,), sequence_length=5, batch_size=2)
    stream.agree(read(world, layout), layout.expected(), given=str(layout))


@clause(
    "data.partition.ranks-differ",
    level="course",
    source="contract: ranks-differ; "
    "the loss of W ranks with the same data falls as well; mlcommons/training issue 625",
)
@pytest.mark.parametrize("size", [2, 3, 4], ids=["for-2-ranks", "for-3-ranks", "for-4-ranks"])
def test_no_token_is_read_by_two_ranks_or_twice(world, subject, size):
    """A pass MUST NOT give a token as an input twice, neither on one rank nor on two.

    The last target of a sequence is the first input of the next one: targets are not compared.
    """
    layout = Layout((90, 61), sequence_length=3, batch_size=2, world_size=size)
    streams = cut(read(world, layout), layout)

    seen: dict[int, tuple[int, str]] = {}
    rows = [
        (rank, f"row {place} of batch {number} of rank {rank}", row)
        for rank, batches in enumerate(streams)
        for number, (inputs, _) in enumerate(batches)
        for place, row in enumerate(inputs)
    ]
    for at, (rank, here, row) in enumerate(rows):
        for token in row:
            if token in seen:
                other, there = seen[token]
                whole = any(row == before for _, _, before in rows[:at])
                likely = f"ranks {other} and {rank} read the same tokens" if other != rank else ""
                if other == 0 < rank and streams[rank] == streams[0]:
                    likely = f"rank {rank} reads rank 0's batches"
                what = "the sequence that begins with token" if whole else "token"
                raise judge.violated(
                    f"{what} id {token} is in {there} and in {here}",
                    likely=likely,
                    given=str(layout),
                )
            seen[token] = rank, here


@clause("data.partition.sequences-stay-in-a-shard", source="contract: within-shard")
@pytest.mark.parametrize("length", [4, 5])
def test_no_sequence_crosses_from_one_shard_into_the_next(world, subject, length):
    """The inputs and targets of a sequence MUST lie in one shard."""
    layout = Layout((4 * length + 3, 3 * length + 1, 6 * length), length, 2)
    [batches] = read(world, layout)

    for number, (inputs, targets) in enumerate(batches):
        for row in [[*x, *y] for x, y in zip(inputs, targets, strict=True)]:
            judge.holds(
                len({token // shards.STRIDE for token in row}) == 1,
                f"batch {number}: expected inputs and targets from one shard, got "
                f"{shards.place(row[0])} to {shards.place(row[-1])}",
                given=str(layout),
            )


@clause("data.partition.global-order", source="contract: global-order")
@given(layout=layouts())
@example(layout=Layout((100, 100), 8, 1, 2))
@example(layout=Layout((129,), 64, 1, 2))
@example(layout=Layout((21, 21), 4, 2, 1))
def test_batch_and_rank_say_which_sequences_are_read(world, subject, layout):
    """Batch i of rank r MUST be the global sequences from iWB + rB to iWB + rB + B.

    Pinned: the shard at whose end two famous loaders part; the one whose last full batch a third
    one drops; the two that a course's baseline and distributed loader read differently.
    """
    [streams] = world.run(all_ranks, layout)

    # Where there is no batch a refusal is as good; how many there are is for other clauses.
    if streams is not None:
        wanted = layout.expected()
        as_many = [got[: len(right)] for got, right in zip(streams, wanted, strict=True)]
        stream.same(as_many, wanted, given=str(layout))


@clause("data.partition.ranks-change-shard-together", source="contract: global-order; " + NANOGPT)
@pytest.mark.parametrize("size", [2, 3], ids=["for-2-ranks", "for-3-ranks"])
def test_all_ranks_are_in_the_same_window_of_the_order(world, subject, size):
    """In each step all ranks together MUST read W * B sequences in a row, also at a shard's end.

    Who tests for the end of a shard at its own offset changes shard at another step than its
    peers: 96 of 141 shard lengths made that happen.
    """
    lengths = tuple(range(40, 40 + 12 * 5, 5))
    layout = Layout(lengths, sequence_length=4, batch_size=1, world_size=size)
    streams = cut(read(world, layout), layout)

    order = stream.sequences(lengths, 4)
    for step, batches in enumerate(zip(*streams, strict=True)):
        begun = sorted(row[0] for inputs, _ in batches for row in inputs)
        judge.equal(
            [begun],
            order[order.index(begun[0]) if begun[0] in order else 0 :][:size],
            quantity=f"first tokens of all ranks in step {step}",
            given=str(layout),
        )


@clause(
    "data.partition.equally-many-batches",
    source="contract: whole-batches; "
    "datasets split_dataset_by_node gives 6, 6, 5; torch join exists because of it",
)
@given(layout=layouts())
@example(layout=Layout((52,), 3, 1, 3))
def test_every_rank_yields_as_many_full_batches(world, subject, layout):
    """Every rank MUST yield equally many full batches; it drops what does not fill W * B.

    A rank with one batch more waits for ever in its next all-reduce.
    """
    streams = world.run(all_ranks, layout)[0] or [[]] * layout.world_size

    counts = [len(batches) for batches in cut(streams, layout)]
    wanted = [min(len(layout.expected()[0]), *counts)] * layout.world_size
    judge.equal([counts], wanted, quantity="number of batches per rank", given=str(layout))
    rows = {len(inputs) for batches in streams for inputs, _ in batches}
    judge.holds(
        rows <= {layout.batch_size},
        f"expected batches of {layout.batch_size} rows, got some of {sorted(rows)}",
        given=str(layout),
    )


@clause(
    "data.partition.any-world-size",
    source="contract: global-order; "
    "torch streaming's elastic determinism; a course's baseline and distributed loader",
)
@given(layout=layouts().map(lambda drawn: Layout(drawn.lengths, drawn.sequence_length, 12, 1)))
@example(layout=Layout((21, 21, 37), 2, 12, 1))
def test_the_same_global_batches_at_every_world_size(world, subject, layout):
    """As long as W * B is the same, every global batch MUST hold the same sequences in order.

    Otherwise a run on two ranks and its baseline train on different data, and nobody can compare.
    """
    joined = {}
    for size in (12, 6, 4, 3, 1):
        one = replace(layout, batch_size=size, world_size=12 // size)
        [streams] = world.run(all_ranks, one)
        if streams is not None:
            steps = zip(*cut(streams, one), strict=False)
            joined[size] = [[row for inputs, _ in step for row in inputs] for step in steps]
    for size, batches in joined.items():
        what = f"expected global batches at W={12 // size}, B={size} as at W=1, B=12"
        right = joined.get(12, [])
        for number, pairs in enumerate(map(zip, batches, right)):
            for row, (got, wanted) in enumerate(pairs):
                finding = f"{what}: in row {row} of batch {number} {wanted}, got {got}"
                judge.holds(got == wanted, finding, given=str(layout))
        finding = f"{what}: {[*map(len, right)]} rows in them, got {[*map(len, batches)]}"
        judge.holds(batches == right, finding, given=str(layout))


def in_order(ctx, layout, *orders, is_one_name=False):
    """A pass over the files of each list of numbers; files of one name are in several folders."""
    with files_of(ctx, layout.lengths) as paths:
        for number, path in enumerate(paths if is_one_name else []):
            folder = path.with_suffix("")
            folder.mkdir()
            paths[number] = path.rename(folder / "tokens.bin")
        return [whole_pass(ctx, [paths[i] for i in order], layout) for order in orders]


@clause("data.partition.short-shards", source="contract: within-shard")
@pytest.mark.parametrize("position", ["first", "between", "last"])
def test_a_shard_too_short_for_a_sequence_contributes_nothing(world, subject, position):
    """A shard of at most sequence_length tokens MUST contribute nothing and end nothing."""
    short = (0, 1, 5)
    lengths = {"first": (*short, 33, 28), "between": (33, *short, 28), "last": (33, 28, *short)}
    layout = Layout(lengths[position], sequence_length=5, batch_size=2)
    every = range(len(layout.lengths))
    long = [number for number in every if layout.lengths[number] > layout.sequence_length]
    [(all_of_them, without)] = world.run(in_order, layout, every, long)

    given = f"{layout}, as without short ones"
    stream.goes_on([all_of_them], [without], limit=layout.limit, given=given)


@clause(
    "data.partition.callers-order",
    source="contract: callers-order; sorted() over strings puts 10 before 9",
)
@pytest.mark.parametrize("is_one_name", [False, True], ids=["names", "one-name"])
def test_files_are_read_in_the_callers_order(world, subject, is_one_name):
    """Files MUST be read in the caller's order, whatever their names, dates or sizes."""
    layout, order = Layout((13, 29, 17, 21), sequence_length=4, batch_size=1), (2, 0, 3, 1)
    [[batches]] = world.run(in_order, layout, order, is_one_name=is_one_name)

    firsts = [token for inputs, _ in batches for row in inputs for token in row[:1]]
    seen = [token // shards.STRIDE for token in firsts]
    given = f"files given in the order {order}" + ", all of one name" * is_one_name
    judge.equal([[*dict.fromkeys(seen)]], [*order], quantity="order of shards", given=given)


def three_passes(ctx, layout):
    """Two whole passes and an abandoned one in between, of the same loader."""
    with files_of(ctx, layout.lengths) as paths:
        loader = open_loader(ctx, paths, layout)
        first = take(loader, layout.limit)
        take(loader, 2)
        return [first, take(loader, layout.limit)]


@clause("data.partition.one-pass-per-iter", source="contract: one-pass, starts-anew")
def test_every_iter_is_one_pass_from_the_start(world, subject):
    """Each `iter` MUST give one pass and end; the next starts anew, even if the last was left."""
    layout = Layout((31, 22), sequence_length=4, batch_size=2)
    [(first, third)] = world.run(three_passes, layout)

    most = len(layout.expected()[0])
    judge.holds(
        0 < len(first) < layout.limit,
        f"expected a first pass of 1 to {most} batches and an end, got {len(first)} batches",
        given=str(layout),
    )
    stream.same([third], [first], given="third pass, after the second was left half-way")


def own_streams(ctx, layout):
    """What this live rank reads, placed by its environment and by the same numbers as arguments."""
    sizes = {"batch_size": layout.batch_size, "sequence_length": layout.sequence_length}
    with files_of(ctx, layout.lengths) as paths:
        own = take(ctx.impl.token_loader(paths, **sizes), layout.limit)
        return own, whole_pass(ctx, paths, layout, ctx.rank)


@clause(
    "data.partition.rank-from-environment",
    source="contract: environment; torchrun sets RANK and WORLD_SIZE",
    worlds=(1, 2, 3),
)
def test_live_ranks_read_their_own_part(world, subject):
    """Without arguments a rank MUST read the part that RANK and WORLD_SIZE say is its own."""
    layout = Layout((53, 40), sequence_length=3, batch_size=2, world_size=world.size)
    own, explicit = zip(*world.run(own_streams, layout), strict=True)

    given = "RANK and WORLD_SIZE set, no arguments; as with rank= and world_size="
    stream.goes_on(own, explicit, limit=layout.limit, given=given)


def against_the_environment(ctx, layout):
    """What rank 0 of 1 reads by arguments: as this live rank, and where the environment agrees."""
    with files_of(ctx, layout.lengths) as paths:
        own = whole_pass(ctx, paths, layout)
        with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
            return own, whole_pass(ctx, paths, layout)


@clause("data.partition.arguments-win", source="contract: environment", worlds=(2,))
def test_arguments_win_over_the_environment(world, subject):
    """An explicit rank and world_size MUST win over RANK and WORLD_SIZE.

    Evaluation on one rank of many reads everything that way.
    """
    layout = Layout((53, 40), sequence_length=3, batch_size=2)
    own, agreeing = zip(*world.run(against_the_environment, layout), strict=True)

    given = "rank=0, world_size=1 on each rank; as on rank 0, and as with RANK=0, WORLD_SIZE=1"
    stream.goes_on(own, own[:1] * world.size, limit=layout.limit, given=given)
    stream.goes_on(own, agreeing, limit=layout.limit, given=given)


def interleaved(ctx, layout):
    """A pass of one loader, and two passes of another at the same time."""
    with files_of(ctx, layout.lengths) as paths:
        whole = whole_pass(ctx, paths, layout)
        loader = open_loader(ctx, paths, layout)
        one, other = iter(loader), iter(loader)
        pairs = itertools.islice(zip(one, other, strict=False), layout.limit)
        return whole, [take(side, layout.limit) for side in zip(*pairs, strict=True)]


@clause(
    "data.partition.independent-passes",
    level="production",
    source="iterators of a Python sequence do not disturb each other",
)
def test_two_passes_at_a_time_do_not_disturb_each_other(world, subject):
    """Two iterators of one loader SHOULD each give the whole pass."""
    layout = Layout((31, 22), sequence_length=4, batch_size=2)
    whole, sides = world.run(interleaved, layout)[0]

    stream.goes_on(sides, [whole] * 2, limit=layout.limit, given="two iterators in turns")

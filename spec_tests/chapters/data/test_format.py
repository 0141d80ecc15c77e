"""Format: the file's tokens arrive as int64, and nothing that the caller does changes the file.

A token is a uint16 and a batch is int64: whoever reads int16 on the way turns half of a large
vocabulary negative. A batch that is a view of the file or of a reused buffer changes under the
caller's hands. The format is Karpathy's (llm.c, dev/data/data_common.py).
"""

from __future__ import annotations

import itertools

from spec_tests.chapters.data import reading
from spec_tests.programs.laws import stream
from spec_tests.rig import judge, shards
from spec_tests.rig.clause import clauses

clause = clauses(judges=reading.LOADER, level="correct", worlds=(1,))

SMALL = reading.Layout((30, 21), sequence_length=4, batch_size=2)


def described(ctx, layout):
    """The dtypes and shapes of the inputs and of the targets that a pass yields."""
    with reading.files_of(ctx, layout.lengths) as paths:
        batches = [*itertools.islice(reading.open_loader(ctx, paths, layout), layout.limit)]
    return {
        which: sorted({(str(batch[place].dtype), tuple(batch[place].shape)) for batch in batches})
        for place, which in enumerate(("inputs", "targets"))
    }


@clause("data.format.int64-of-batch-and-length", level="course", source="contract: int64")
def test_batches_are_int64_of_the_asked_shape(world, subject):
    """Inputs and targets MUST be int64 tensors of shape [batch_size, sequence_length].

    An embedding takes int64, and a target of another shape is broadcast in silence. How many there
    are is not asked here: a course's loader leaves more at the end of a shard.
    """
    ranks = world.run(described, SMALL)

    right = [("torch.int64", (SMALL.batch_size, SMALL.sequence_length))]
    judge.equal(ranks, {"inputs": right, "targets": right}, quantity="dtypes and shapes")


def read_ids(ctx, ids):
    """The inputs that are not all zero, of a shard that holds these ids and then zeros."""
    with reading.folder_of(ctx) as folder:
        path = folder / "ids.bin"
        path.write_bytes(shards.shard_bytes([*ids, *[0] * (len(ids) + 2)]))
        layout = reading.Layout((), sequence_length=len(ids), batch_size=1)
        loader = reading.open_loader(ctx, [path], layout)
        rows = [inputs[0] for inputs, _ in reading.take(loader, 2)]
        return [token for row in rows if any(row) for token in row]


@clause(
    "data.format.every-id",
    source="contract: in-order; "
    "llm.c data_common.py: uint16 tokens; 65535 is used as a marker there",
)
def test_every_id_of_the_format_arrives_as_written(world, subject):
    """Every id from 0 to 65535 MUST arrive as it was written.

    GPT-2's vocabulary ends at 50257, so an int16 in between spoils a third of it.
    """
    ids = [0, 1, 255, 256, 32767, 32768, 50256, 65279, 65534, 65535, 513]
    ranks = world.run(read_ids, ids)

    judge.equal(ranks, ids, quantity="tokens", given="one sequence of these ids")


def overwritten(ctx, layout):
    """A pass, one whose batches are overwritten as they come, another one, and the files."""
    with reading.files_of(ctx, layout.lengths) as paths:
        before = [path.read_bytes() for path in paths]
        whole = reading.whole_pass(ctx, paths, layout)
        loader = reading.open_loader(ctx, paths, layout)
        first, kept = [], []
        for batch in itertools.islice(loader, layout.limit):
            first += reading.take([batch], 1)
            kept += [tensor.fill_(7) for tensor in batch]
        kept[0].fill_(9)
        shared = [number // 2 for number, t in enumerate(kept) if number and (t == 9).any()]
        second = reading.take(loader, layout.limit)
        after = [path.read_bytes() for path in paths]
        return [whole], [first], [second], shared, before == after


@clause(
    "data.format.batches-own-their-memory",
    source="contract: own-memory; torch.from_numpy over a memory map",
)
def test_writing_into_a_batch_changes_nothing_else(world, subject):
    """Writing into a batch MUST change no other tensor, no later pass and no file.

    Masking targets in place is ordinary; with views of a map or of one reused buffer it spoils the
    data for everybody.
    """
    [(whole, first, second, shared, is_kept)] = world.run(overwritten, SMALL)

    given = "each batch overwritten after it was read"
    stream.goes_on(first, whole, limit=SMALL.limit, given=given)
    judge.equal([shared], [], quantity="batches with memory of the first one's inputs")
    stream.goes_on(second, whole, limit=SMALL.limit, given=f"{given}, the pass after that")
    judge.equal([is_kept], True, quantity="files unchanged")


def files_after(ctx, layout):
    """Whether a pass leaves bytes and dates of the files alone."""
    with reading.files_of(ctx, layout.lengths) as paths:
        before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths]
        reading.whole_pass(ctx, paths, layout)
        after = [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths]
        return before == after


@clause(
    "data.format.files-are-only-read",
    source="contract: read-only; "
    "torch.from_file(shared=True) makes a file as long as it is told to",
)
def test_reading_leaves_the_files_as_they_were(world, subject):
    """A pass MUST leave every file as it was, to the byte and the date.

    Shards are shared by all ranks and all runs; a mapping that may write grows or touches them.
    """
    judge.equal(world.run(files_after, SMALL), True, quantity="files unchanged after a pass:")


HUGE = 2**30 + 6_000_000


def far_away(ctx, count, ids):
    """The very last sequence of a shard of 2 GiB, read as the last of many ranks."""
    length = len(ids) - 1
    sequences = (count - 1) // length
    start = (sequences - 1) * length
    tail = [*ids, *[0] * (count - start - len(ids))]
    with reading.folder_of(ctx) as folder:
        path = shards.write_sparse(folder / "huge.bin", count, tail)
        layout = reading.Layout((), sequence_length=length, batch_size=1, world_size=sequences)
        inputs, targets = next(iter(reading.open_loader(ctx, [path], layout, rank=sequences - 1)))
        return [*inputs[0].tolist(), int(targets[0, -1])]


@clause(
    "data.format.beyond-two-gigabytes",
    level="production",
    source="contract: in-order; llm.c pull request 828: an offset cast to int; count * 2 in int32",
)
def test_tokens_beyond_two_gigabytes_are_found(world, subject):
    """Tokens beyond 2 GiB of a file MUST be the right ones: counts and offsets do not wrap.

    The file is sparse and takes no room. Production, because code that reads whole files is right
    elsewhere and would need the memory here.
    """
    ids = list(range(1, 66))
    ranks = world.run(far_away, HUGE, ids)

    judge.equal(ranks, ids, quantity="last sequence", given=f"a shard of {HUGE} tokens")

"""One rank's view of a loader: what the bodies of this chapter are made of."""

from __future__ import annotations

import contextlib
import io
import itertools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from spec_tests.programs.laws import stream
from spec_tests.programs.laws.stream import Stream
from spec_tests.rig import shards
from spec_tests.rig.ranks.rank import Context

LOADER = ("token_loader",)


@dataclass(frozen=True)
class Layout:
    """Shards and how they are read; `repr` is what a failure prints.

    Attributes:
        lengths: tokens per numbered shard.
        sequence_length, batch_size, world_size: T, B and W of the contract.
    """

    lengths: tuple[int, ...]
    sequence_length: int
    batch_size: int
    world_size: int = 1

    def expected(self) -> list[Stream]:
        """What every rank receives in one pass."""
        return stream.expected(
            self.lengths,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            world_size=self.world_size,
        )

    @property
    def limit(self) -> int:
        """More batches than any pass can have: where to stop reading what does not end."""
        return sum(self.lengths) + 2


@contextlib.contextmanager
def folder_of(ctx: Context) -> Iterator[Path]:
    """An empty folder of this rank's own, gone afterwards."""
    with tempfile.TemporaryDirectory(dir=ctx.scratch) as folder:
        yield Path(folder)


@contextlib.contextmanager
def files_of(ctx: Context, lengths: Sequence[int]) -> Iterator[list[Path]]:
    """Numbered shards of these lengths, gone afterwards."""
    with folder_of(ctx) as folder:
        yield shards.write_numbered(folder, lengths)


def open_loader(ctx: Context, paths: Sequence[Path], layout: Layout, rank: int = 0) -> Any:
    """The implementation's loader for one rank of the layout."""
    return ctx.impl.token_loader(
        paths,
        batch_size=layout.batch_size,
        sequence_length=layout.sequence_length,
        rank=rank,
        world_size=layout.world_size,
    )


def whole_pass(ctx: Context, paths: Sequence[Path], layout: Layout, rank: int = 0) -> Stream:
    """One uninterrupted pass of a loader that is asked nothing else."""
    return take(open_loader(ctx, paths, layout, rank), layout.limit)


def take(batches: Iterable[Any], limit: int) -> Stream:
    """Up to `limit` batches as plain lists."""
    return [(x.tolist(), y.tolist()) for x, y in itertools.islice(batches, limit)]


def all_ranks(ctx: Context, layout: Layout) -> list[Stream] | None:
    """One pass of every rank of the layout, read one after another in this process.

    None if the loader refuses a layout that holds no batch at all.

    Raises:
        ValueError: the loader refuses one that holds some.
    """
    with files_of(ctx, layout.lengths) as paths:
        try:
            loaders = [open_loader(ctx, paths, layout, r) for r in range(layout.world_size)]
        except ValueError:
            if any(layout.expected()):
                raise
            return None
        return [take(loader, layout.limit) for loader in loaders]


def last_words(ctx: Context, layout: Layout) -> str:
    """The last line that a pass prints: some loaders print what they catch, and end."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        all_ranks(ctx, layout)
    return printed.getvalue().strip().rpartition("\n")[2]


def cut(streams: Sequence[Stream], layout: Layout) -> list[Stream]:
    """The streams, without the further passes of a loader that does not end."""
    return [
        _first_pass(batches, len(right), spare=2 * len(layout.lengths))
        if len(batches) >= layout.limit
        else batches
        for batches, right in zip(streams, layout.expected(), strict=True)
    ]


def _first_pass(batches: Stream, length: int, spare: int) -> Stream:
    """The first pass of an endless stream; up to `spare` batches may have been dropped from it."""
    for number in range(max(1, length - spare), length):
        if batches[number] == batches[0]:
            return batches[:number]
    return batches[:length]


@st.composite
def layouts(draw: Any) -> Layout:
    """Shard lengths around every edge (0, 1, T, T + 1, whole sequences), small T, B and W."""
    length = draw(st.integers(1, 6))
    edges = [0, 1, length, length + 1, 3 * length, 3 * length + 1]
    lengths = draw(
        st.lists(st.one_of(st.sampled_from(edges), st.integers(0, 60)), min_size=1, max_size=5)
    )
    # One shard that always holds something, anywhere among the others.
    lengths.insert(draw(st.integers(0, len(lengths))), draw(st.integers(8 * length, 90)))
    return Layout(tuple(lengths), length, draw(st.integers(1, 3)), draw(st.integers(1, 4)))

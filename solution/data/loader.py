"""The token loader: one global order of sequences, cut by rank.

    shard 0           shard 1          shard 2
    [s0 s1 s2 s3 .]   [s4 s5 .]        [s6 s7 s8 s9 s10]     sequence k of a shard is tokens
                                                             [kT, (k+1)T]: T inputs, and the
    batch 0: rank 0 takes s0 s1, rank 1 takes s2 s3          targets are the same, shifted by one
    batch 1: rank 0 takes s4 s5, rank 1 takes s6 s7
    dropped: s8 s9 s10 do not fill W * B = 4                 '.' are tokens that fill no sequence

1. A shard of n tokens yields (n - 1) // T sequences; they never cross a shard. Prefix sums over the
   shards number them globally. Neither rank nor world size enters.
2. Batch i of rank r is the global sequences [iWB + rB, iWB + rB + B).
3. Sequences that do not fill W * B are dropped, so every rank yields the same number of full
   batches: a rank with one batch more would wait for ever in its next all-reduce.

So the whole state is one integer, the number of sequences consumed by all ranks, and a run saved on
2 ranks goes on with 4 as long as W * B stays. Finding the place is a binary search. Cost: one
positioned read per batch and shard touched, two copies (uint16 to int64, inputs and targets).

Left out: shuffling (the order of the files is the caller's) and prefetching (a batch takes
microseconds). Popular loaders test for the end of a shard at the *rank's* position, so that ranks
change shard at different steps (build-nanogpt, llm.c's train_gpt2.py).
"""

import bisect
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from solution import comm
from solution.config import require_positive
from solution.data.shards import Shard
from solution.world import rank_and_size

Batch = tuple[torch.Tensor, torch.Tensor]
PathLike = str | os.PathLike[str]


class TokenLoader:
    """Batches of this rank over token shards, in the order of `paths`; one pass per `iter`.

    It yields `(inputs, targets)`, int64 `[batch_size, sequence_length]`, on the CPU, that own their
    memory. Iterators are independent; the state follows the newest one.

    Args:
        paths: kjj0 `.bin` shards (see `solution.data.shards`), at least one.
        batch_size: sequences per batch and rank, B.
        sequence_length: tokens per sequence, T.
        rank, world_size: both or neither; when not given, those of RANK and WORLD_SIZE, both or
            neither; without those, one rank.

    Attributes:
        num_sequences: in all shards together.
        num_batches: of one pass, the same on every rank.
        num_dropped: sequences at the end that do not fill a batch on every rank.

    Raises:
        ValueError: a bad argument, a bad file, or shards in which not one sequence fits.
    """

    def __init__(
        self,
        paths: Sequence[PathLike],
        *,
        batch_size: int,
        sequence_length: int,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.batch_size = require_positive("batch_size", batch_size)
        self.sequence_length = require_positive("sequence_length", sequence_length)
        self.rank, self.world_size = _resolve_rank(rank, world_size)
        if isinstance(paths, str | os.PathLike):
            raise ValueError(
                f"expected a list of shards, got one path {str(paths)!r}; write [path]"
            )
        self.shards = [Shard(path) for path in paths]
        if not self.shards:
            raise ValueError("expected at least one shard, got an empty list of paths")

        counts = [max(0, len(shard) - 1) // sequence_length for shard in self.shards]
        self._starts = [0, *itertools.accumulate(counts)]  # global index of each shard's first
        self.num_sequences = self._starts[-1]
        if self.num_sequences == 0:
            raise ValueError(
                f"expected a shard of at least sequence_length + 1 = {sequence_length + 1} tokens, "
                f"got {len(self.shards)} shards, the longest of {max(map(len, self.shards))}; "
                "use a shorter sequence_length or more data"
            )
        self.global_batch_size = self.batch_size * self.world_size
        self.num_batches, self.num_dropped = divmod(self.num_sequences, self.global_batch_size)

        self._resume_at = 0  # where the next iterator starts
        self._newest: _Pass | None = None

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        self._newest = _Pass(self, self._resume_at)
        self._resume_at = 0
        return self._newest

    def state_dict(self) -> dict[str, int]:
        """Return the number of sequences that all ranks together have yielded."""
        position = self._newest.consumed if self._newest else self._resume_at
        return {"consumed_sequences": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next `iter` goes on where `state` was taken.

        Raises:
            ValueError: not a state of this loader, or one from another global batch size.
        """
        if set(state) != {"consumed_sequences"}:
            raise ValueError(f"expected a state with 'consumed_sequences', got keys {list(state)}")
        position = state["consumed_sequences"]
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise ValueError(f"expected consumed_sequences to be an integer >= 0, got {position!r}")
        if position % self.global_batch_size:
            raise ValueError(
                f"expected consumed_sequences to be a multiple of batch_size * world_size = "
                f"{self.global_batch_size}, got {position}; the state was saved with another "
                "global batch, keep batch_size * world_size"
            )
        if position > self.num_batches * self.global_batch_size:
            raise ValueError(
                f"expected consumed_sequences <= {self.num_batches * self.global_batch_size}, got "
                f"{position}; the state belongs to more data than these shards hold"
            )
        self._resume_at, self._newest = position, None

    def read(self, first: int) -> Batch:
        """The batch of global sequences [first, first + batch_size), wherever they lie."""
        shape = (self.batch_size, self.sequence_length)
        inputs, targets = np.empty(shape, np.int64), np.empty(shape, np.int64)
        row = 0
        while row < self.batch_size:
            # The last shard that starts at or before this sequence: empty shards have equal starts.
            index = bisect.bisect_right(self._starts, first + row) - 1
            count = min(self.batch_size - row, self._starts[index + 1] - first - row)
            start = (first + row - self._starts[index]) * self.sequence_length
            # Neighbouring sequences share a token: the last target of one is the next one's input.
            tokens = self.shards[index].read(start, count * self.sequence_length + 1)
            inputs[row : row + count] = tokens[:-1].reshape(count, -1)
            targets[row : row + count] = tokens[1:].reshape(count, -1)
            row += count
        return torch.from_numpy(inputs), torch.from_numpy(targets)


token_loader = TokenLoader  # its name in the contract


class _Pass(Iterator[Batch]):
    """One pass over the data from `consumed_sequences` on; disturbs no other pass."""

    def __init__(self, loader: TokenLoader, consumed_sequences: int) -> None:
        self._loader = loader
        self.consumed = consumed_sequences

    def __next__(self) -> Batch:
        loader = self._loader
        if self.consumed >= loader.num_batches * loader.global_batch_size:
            raise StopIteration
        batch = loader.read(self.consumed + loader.rank * loader.batch_size)
        self.consumed += loader.global_batch_size  # only now: a read that failed was not consumed
        return batch


def _resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this rank and the number of ranks: the arguments, or the environment's, or 0 of 1."""
    if (rank is None) != (world_size is None):
        raise ValueError(
            f"expected rank and world_size together, got {rank=} and {world_size=}; pass both"
        )
    if rank is None or world_size is None:
        found = rank_and_size()
        group = comm.rank(), comm.size()
        # Without this, ranks with no such environment would all read the same tokens.
        if comm.is_initialized() and found != group:
            raise ValueError(
                f"expected RANK and WORLD_SIZE to agree with the process group (rank {group[0]} of "
                f"{group[1]}), got {found[0]} of {found[1]}; pass rank and world_size"
            )
        return found
    require_positive("world_size", world_size)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
        raise ValueError(
            f"expected rank and world_size with 0 <= rank < world_size, got rank={rank!r} and "
            f"world_size={world_size}; ranks count from 0"
        )
    return rank, world_size

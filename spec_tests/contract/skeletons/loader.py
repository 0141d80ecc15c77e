"""A loader of tokens: one global order of sequences, cut by rank.

Training is repeatable only if the data are: which tokens are in step k must follow from the
files and the global batch, and not from how many ranks there are or how often the run was
interrupted.

Do one task after the other; the clauses of a task say when it is done:

    1. Read shards as the only rank: headers, then batches of sequences.
        python -m spec_tests --impl THIS_FILE --clause 'data.format.*'
    2. Give every rank its own sequences, in one global order.
        python -m spec_tests --impl THIS_FILE --clause 'data.partition.*'
    3. Refuse what cannot be right, at once and by name.
        python -m spec_tests --impl THIS_FILE --clause 'data.refusal.*'
    4. Stop anywhere and go on, with more or fewer ranks.
        python -m spec_tests --impl THIS_FILE --clause 'data.state.*'
    5. Keep memory and open files in bounds.
        python -m spec_tests --impl THIS_FILE --level production --clause 'data.resources.*'

All of it: `make check IMPL=THIS_FILE`; what a course asks: `ARGS="--level course"` besides.
Names and arguments are those of spec_tests/contract/training.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike

import torch


class ToDo(Exception):
    """This step is still to be done."""


def token_loader(
    paths: Sequence[str | PathLike[str]],
    *,
    batch_size: int,
    sequence_length: int,
    rank: int | None = None,
    world_size: int | None = None,
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """An iterable with `state_dict` and `load_state_dict`, over kjj0 `.bin` shards.

    It yields int64 `[batch_size, sequence_length]` inputs and targets.

    Task 1:
      a. A shard is 256 little-endian int32 words (20240520, 1, number of tokens, zeros), then that
         many uint16 tokens, and the file ends. Anything else is a ValueError at construction.
      b. With T the sequence length, sequence k of a shard has inputs `tokens[kT : (k+1)T]`, and
         as targets the same, shifted by one: so it needs one token more, of the same shard.
      c. A batch is the next B sequences, shard after shard in the caller's order; what does not
         fill one is left. Tensors own their memory. One pass per `iter`; the next begins anew.
    Task 2:
      a. With W ranks, batch i of rank r has the sequences `iWB + rB` to `iWB + rB + B`; what does
         not fill W*B is left.
      b. RANK and WORLD_SIZE count where the arguments are not given: both or neither.
    Task 3: a ValueError names the argument or the file, what was expected and what came.
    Task 4: `state_dict()` counts the batches that were *yielded*; after `load_state_dict` the next
      `iter` goes on there, at another W with the same W*B as well.
    """
    raise ToDo("task 1: read and check the header of every shard")

"""One rank of a world that is not there: what it sends and keeps, at sizes no test machine has.

PyTorch's fake process group takes every collective and moves nothing, so values mean nothing in it.
Counts, bytes and memory do: they follow from shapes, and one rank of 64 costs what any rank costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def pretended(rank: int, num_ranks: int) -> Iterator[None]:
    """Within the block, this process is `rank` of `num_ranks`; for bodies in a world of one."""
    if dist.get_world_size() != 1:
        raise ValueError(f"expected a world of one, got {dist.get_world_size()} ranks")
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

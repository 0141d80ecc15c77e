"""Fully sharded data parallelism. Read `api.py` first, then what it stands on, from the ground up.

layout.py    where rows lie in a message          policy.py, nested.py   dtypes, and whose
grid.py      who shards, who replicates           param.py     shard and full tensor
message.py   what is sent, its memory and views
unit.py      gather and reduce, start             reduction.py finish: one mean, or two
schedule.py  when: hooks, prefetch, end           module.py    what a sharded module can do
api.py       fully_shard                          checks.py    what is refused
whole.py     a model in one call

The names below are those of `torch.distributed.fsdp`: code changes over by one import.
"""

from solution.parallel.fsdp.api import fully_shard
from solution.parallel.fsdp.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
)
from solution.parallel.fsdp.policy import MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
]

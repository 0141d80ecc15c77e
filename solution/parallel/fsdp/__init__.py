"""Fully sharded data parallelism. Read `api.py` first, then bottom-up.

mesh.py      process groups: shard, replicate    options.py   dtypes, and what is refused
param.py     a parameter and its gradient        message.py   buffers of collectives
unit.py      all-gather and reduce-scatter       schedule.py  hooks, prefetching
module.py    methods of a sharded module         api.py       fully_shard, fsdp

The names below are those of `torch.distributed.fsdp`: code changes over by one import.
"""

from solution.parallel.fsdp.api import fully_shard
from solution.parallel.fsdp.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
)
from solution.parallel.fsdp.options import MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
]
